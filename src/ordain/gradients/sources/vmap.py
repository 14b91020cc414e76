"""Per-example gradients of a whole model by torch.func, out of an ordinary ``loss.backward()``.

A hook keeps the model's inputs and the gradient that arrives at its outputs. For each example the
gradient is then a vector-Jacobian product of the model at that example alone, vmapped over the batch.
Needs a second forward and backward, and ``[chunk, d]`` memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from ordain.errors import GradientError, UnsupportedModuleError
from ordain.gradients.dense import Dense
from ordain.gradients.memory import few_examples, shrinking
from ordain.gradients.protocol import Collected
from ordain.gradients.rules.mixing import mixing_modules, refuse_mixing
from ordain.gradients.sources.backward import Backwards
from ordain.gradients.sources.layout import examples_in
from ordain.gradients.sources.params import check_reduction, choose


@dataclass
class _Pass:
    """One forward: its inputs (tensors detached) and the gradients that came back, by output leaf.

    Only the graph of the forward holds it until a backward arrives, so a forward whose backward never
    comes (an exception, a discarded loss) leaves nothing behind.
    """

    number: int
    inputs: tuple[Any, dict[str, Any]]
    cotangents: dict[int, Tensor] = field(default_factory=dict)


class FuncSource:
    """Watch ``model`` and make per-example gradients with torch.func.

    Args:
        model: called once for each batch.
        params: which trainable parameters to order by, as a test of their names; all by default.
        loss_reduction: how the loss reduces over the examples of a batch. Under ``"mean"`` a backward
            gives each example 1/B of its gradient, which is undone here.
        batch_dim: the dimension of the model's inputs that counts the examples.
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
        self._model = model
        self._mixing = mixing_modules(model)
        self._names = list(choose(model, params))
        self.dim = sum(model.get_parameter(name).numel() for name in self._names)
        first = model.get_parameter(self._names[0])
        self.like = first.detach().new_empty(0)
        self._batch_dim = batch_dim
        self._chunk_size = chunk_size
        self._count = 0
        self._reached: dict[int, _Pass] = {}
        self._backwards = Backwards(self._finish)
        self._recomputing = False
        self._handles: list[Any] = []
        self.attach()

    def attach(self) -> None:
        if not self._handles:
            self._handles.append(self._model.register_forward_hook(self._watch, with_kwargs=True))

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._reached.clear()
        self._backwards.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> FuncSource:
        """A copy of the model takes the hook along: it goes on to watch this one only."""
        return self

    def _watch(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if module is not self._model or self._recomputing or not torch.is_grad_enabled() or not module.training:
            return
        flat, spec = tree_flatten((args, kwargs))
        detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in flat]
        self._count += 1
        record = _Pass(self._count, tree_unflatten(detached, spec))
        for i, leaf in enumerate(tree_flatten(output)[0]):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._reach, record, i))  # type: ignore[no-untyped-call]

    def _reach(self, record: _Pass, i: int, grad: Tensor) -> None:
        brought = self._backwards.here()
        if record.number not in brought:
            brought[record.number] = record
            if record.number not in self._reached:
                record.cotangents = {}  # an earlier backward may have broken off, or been collected
        before = record.cotangents.get(i)
        record.cotangents[i] = grad.detach().clone() if before is None else before + grad.detach()

    def _finish(self, brought: dict[int, _Pass]) -> None:
        self._reached |= brought

    def collect(self) -> list[Collected]:
        self._backwards.forget()
        reached, self._reached = self._reached, {}
        passes = [reached[number] for number in sorted(reached)]  # in the order of the forwards
        batches = [shrinking(partial(self._gradients, one)) for one in passes]
        return [Collected(batch, batch.size) for batch in batches]

    def drop(self, size: int | None = None) -> bool:
        self._backwards.forget()
        self._recomputing = False  # an interrupt may have fallen on the very line that begins or ends it
        last = self._reached.get(self._count)
        if size is None:
            self._reached.clear()
        elif last is not None and examples_in(*last.inputs, self._batch_dim) == size:
            del self._reached[last.number]
        return bool(self._reached)

    def _gradients(self, record: _Pass) -> Dense:
        refuse_mixing(self._mixing)
        kept, cotangents = list(record.cotangents), list(record.cotangents.values())
        dim = self._batch_dim
        args, kwargs = record.inputs
        size = examples_in(args, kwargs, dim)
        if not size:
            return Dense([cotangents[0].new_zeros(0, self.dim)])
        # An output that has lost the dimensions before it counts the examples in its first.
        axes = [dim if grad.ndim > dim and grad.shape[dim] == size else 0 for grad in cotangents]
        if any(grad.ndim == 0 or grad.shape[axis] != size for grad, axis in zip(cotangents, axes, strict=True)):
            raise GradientError(
                f"model outputs of shapes {[tuple(grad.shape) for grad in cotangents]} for {size} examples",
                expected="a dimension that counts the examples in every output",
                remedy="Return one row an example from the model and take the loss outside it.",
            )
        model = self._model
        trained = {name: model.get_parameter(name).detach() for name in self._names}
        fixed = {name: p.detach() for name, p in model.named_parameters() if name not in trained}
        fixed |= dict(model.named_buffers())
        flat, spec = tree_flatten(record.inputs)
        mapped = [isinstance(leaf, Tensor) and leaf.ndim > dim and leaf.shape[dim] == size for leaf in flat]
        tensors = [leaf for leaf, yes in zip(flat, mapped, strict=True) if yes]

        def gradient(xs: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
            rows = iter(xs)
            leaves = [next(rows).unsqueeze(dim) if yes else leaf for leaf, yes in zip(flat, mapped, strict=True)]
            args, kwargs = tree_unflatten(leaves, spec)

            def outputs(weights: dict[str, Tensor]) -> list[Tensor]:
                out, _ = tree_flatten(functional_call(model, {**fixed, **weights}, args, kwargs))
                return [out[i] for i in kept]

            pull = vjp(outputs, trained)[1]
            answer: dict[str, Tensor] = pull([grad.unsqueeze(axis) for grad, axis in zip(grads, axes, strict=True)])[0]
            return answer

        self._recomputing = True
        try:
            chunk_size = few_examples(size) or self._chunk_size
            made = vmap(gradient, in_dims=(dim, axes), chunk_size=chunk_size)(tensors, cotangents)
        except RuntimeError as error:
            if "randomness" not in str(error):
                raise
            raise UnsupportedModuleError(
                "a model that draws random numbers in training (dropout)",
                expected="a forward that gives the same output twice",
                remedy="Take gradients='exact', set dropout to 0, or pass your own gradients to observe().",
            ) from error
        finally:
            self._recomputing = False
        scale = float(size) if self._mean else 1.0
        blocks = [made[name].reshape(size, -1) for name in self._names]
        return Dense([block.to(torch.promote_types(block.dtype, torch.float32)) * scale for block in blocks])
