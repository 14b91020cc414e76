"""Per-example gradients of a whole model by torch.func, out of an ordinary ``loss.backward()``.

Hooks keep the model's inputs and the gradient that arrives at its outputs. For each example the gradient is then a
vector-Jacobian product of the model at that example alone, vmapped over the batch. Needs a second forward and
backward, and ``[chunk, d]`` memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ordain.errors import GradientError, UnsupportedModuleError
from ordain.gradients.dense import Dense
from ordain.gradients.memory import few_examples, shrinking
from ordain.gradients.protocol import Collected
from ordain.gradients.rules.fallback import vmapped_vjp
from ordain.gradients.sources.hooks import Hooks, Pass
from ordain.gradients.sources.model_checks import check_reduction, choose, mixing_modules, refuse_mixing


class FuncSource:
    """Watch ``model`` and compute per-example gradients with torch.func.

    Args:
        model: called once for each batch.
        params: which trainable parameters to order by, as a test of their names; all by default.
        loss_reduction: how the loss reduces over the examples of a batch. Under ``"mean"`` a backward
            gives each example 1/B of its gradient, which is undone here.
        batch_dim: the batch dimension of the model's inputs.
        chunk_size: examples at a time; all by default.
    """

    name = "func"
    whole_units = False

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Callable[[str], bool] | None = None,
        loss_reduction: str = "mean",
        batch_dim: int = 0,
        chunk_size: int | None = None,
    ) -> None:
        self._mean = check_reduction(loss_reduction) == "mean"
        self._model, self._batch_dim, self._chunk_size = model, batch_dim, chunk_size
        self._mixing = mixing_modules(model)
        chosen = choose(model, params)
        self._names = list(chosen)
        self.dim = sum(p.numel() for p in chosen.values())
        self.like = chosen[self._names[0]].detach().new_empty(0)
        self._hooks = Hooks(model, chosen.values(), batch_dim=batch_dim, whole=True)
        self.attach, self.detach, self.drop = self._hooks.attach, self._hooks.detach, self._hooks.drop
        self.attach()

    def __deepcopy__(self, memo: dict[int, Any]) -> FuncSource:
        """It watches one model, whatever is copied."""
        return self

    def collect(self) -> list[Collected]:
        passes, _ = self._hooks.take()
        self._hooks.rerunning = True
        try:
            batches = [shrinking(partial(self._gradients, one)) for one in passes]
        finally:
            self._hooks.rerunning = False
        return [Collected(batch, batch.size) for batch in batches]

    def _gradients(self, record: Pass) -> Dense:
        refuse_mixing(self._mixing)
        use, size, dim = record.reached[self._model][0], record.size, self._batch_dim
        if not size:
            return Dense([self.like.new_zeros(0, self.dim)])

        def batched(tensor: Any) -> bool:
            return isinstance(tensor, Tensor) and tensor.ndim > dim and tensor.shape[dim] == size

        in_axes = [dim if batched(leaf) else None for leaf in tree_leaves((use.args, use.kwargs))]
        # An output that has lost the dimensions before it has the batch dimension first.
        out_axes = [dim if batched(grad) else 0 for grad in use.grads.values()]
        shapes = [tuple(grad.shape) for grad in use.grads.values()]
        if any(not shape or shape[axis] != size for shape, axis in zip(shapes, out_axes, strict=True)):
            raise GradientError(
                f"model outputs of shapes {shapes} for {size} examples",
                expected="a batch dimension in every output",
                remedy="Return one row an example from the model and take the loss outside it.",
            )
        trained = {name: self._model.get_parameter(name).detach() for name in self._names}
        chunk_size = few_examples(size) or self._chunk_size
        try:
            grads = vmapped_vjp(self._model, trained, use, in_axes, out_axes, chunk_size=chunk_size)
        except RuntimeError as error:
            if "randomness" not in str(error):
                raise
            raise UnsupportedModuleError(
                "a model that draws random numbers in training (dropout)",
                expected="a forward that gives the same output twice",
                remedy="Take gradients='exact', set dropout to 0, or pass your own gradients to observe().",
            ) from error
        scale = float(size) if self._mean else 1.0
        blocks = [grads[name].reshape(size, -1) for name in self._names]
        return Dense([block.to(torch.promote_types(block.dtype, torch.float32)) * scale for block in blocks])
