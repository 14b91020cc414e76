"""Per-example gradients of a whole model by torch.func, out of an ordinary ``loss.backward()``.

Hooks keep the model's inputs and the gradient that arrives at its outputs. For each example the gradient is then a
vector-Jacobian product of the model at that example alone, vmapped over the batch. Needs a second forward and
backward, and ``[chunk, d]`` memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ordain._context import undisturbed
from ordain.errors import GradientError, UnsupportedModuleError
from ordain.gradients.dense import Dense
from ordain.gradients.memory import few_examples, out_of_memory, shrinking
from ordain.gradients.protocol import Collected
from ordain.gradients.rules import Use
from ordain.gradients.sources.backward import own_run
from ordain.gradients.sources.graph import Graph
from ordain.gradients.sources.hooks import Hooks, Pass
from ordain.gradients.sources.independence import untouched
from ordain.gradients.sources.inspection import Inspection
from ordain.gradients.sources.model_checks import check_reduction, like, mixing_modules, refuse_mixing
from ordain.gradients.sources.saved_tensors import unpacks_only_once
from ordain.gradients.sources.selection import Selection, choose, described, places
from ordain.gradients.sources.spot_checks import SpotChecks, differing


class FuncSource:
    """Watch ``model`` and compute per-example gradients with torch.func.

    Args:
        model: called once for each batch.
        params: which trainable parameters to order by.
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
        params: Selection = None,
        loss_reduction: str = "mean",
        batch_dim: int = 0,
        chunk_size: int | None = None,
    ) -> None:
        self._mean = check_reduction(loss_reduction) == "mean"
        self._model, self._batch_dim, self._chunk_size = model, batch_dim, chunk_size
        self._mixing = mixing_modules(model)
        chosen = choose(model, params)
        self.parameters = described(chosen)
        self._names = list(chosen)
        self._offsets = places(chosen)
        self.dim = sum(p.numel() for p in self._offsets)
        self.like = like(self._offsets)
        self._checks = SpotChecks()
        self._hooks = Hooks(model, self._offsets, batch_dim=batch_dim, listener=self, whole=True)
        self._hooks.read_again = dict.fromkeys(model.parameters(), "weights of a model that torch.func runs again")
        self.attach, self.detach, self.drop = self._hooks.attach, self._hooks.detach, self._hooks.drop
        self.ignore, self.passes_waiting = self._hooks.ignore, self._hooks.passes_waiting
        self.attach()

    def __deepcopy__(self, memo: dict[int, Any]) -> FuncSource:
        """It watches one model, whatever is copied."""
        return self

    def forward_began(self, record: Pass, inputs: Any) -> None:
        """Nothing: each example is run alone in any case."""
        record.due = self._checks.due()

    def forward_ended(self, record: Pass, output: Any, outputs: list[tuple[Any, int]]) -> None:
        """Now and then, have the gradient of some examples alone sent down the graph."""
        if outputs and record.size and record.due:
            self._hooks.ask()
            sinks = {get_gradient_edge(p).node: p for p in self._offsets if p.requires_grad}
            graph = Graph([node for node, _ in outputs], sinks)
            if any(map(unpacks_only_once, graph.above_sinks())):
                return
            record.inspection = Inspection(
                graph,
                outputs,
                size=record.size,
                batch_dim=self._batch_dim,
                chosen=self._checks.examples(record.size, device=self.like.device, all_apart=False),
                counts=self._hooks.counts,
                divert=self._hooks.divert,
                again=partial(untouched, self._model),
            )
            graph.release()

    def backward_ended(self, record: Pass) -> None:
        """Run the model again now: the optimizer may change the weights before step()."""
        if record.inspection is not None:
            record.inspection.finish(complete=True)
        try:
            with undisturbed(), own_run():
                record.result = shrinking(partial(self._gradients, record))
        except Exception as error:  # to be raised by step(), not out of the backward
            record.result = error

    def collect(self) -> list[Collected]:
        passes, arrived = self._hooks.take()
        batches: list[Dense] = [record.result for record in passes]
        for record, batch in zip(passes, batches, strict=True):
            if record.inspection is not None and not record.inspection.failed and record.inspection.found[0]:
                self._compare([batch], record.inspection.chosen, record.inspection.found[0])
            record.forget()
        if arrived and batches:
            self._compare(
                batches, [torch.ones(one.size, dtype=torch.bool, device=one.device) for one in batches], arrived
            )
        return [Collected(batch, batch.size) for batch in batches]

    def _compare(self, batches: Sequence[Dense], chosen: Sequence[Tensor], wanted: Mapping[Tensor, Tensor]) -> None:
        wrong = differing(batches, chosen, wanted, self._offsets, mean=self._mean, coarse=self._hooks.coarse)
        for p in wrong:
            raise UnsupportedModuleError(
                f"parameter {self._offsets[p][1]!r} with a gradient that differs from the sum over single examples",
                expected="a model that processes each example independently, and a loss computed from its outputs only",
                remedy="Look for what mixes the examples of a batch (statistics over it, a permutation of it) or for a "
                "penalty on the weights in the loss; run forwards that should not count inside order.ignore(); or "
                "order whole batches with group=batch_size and gradients='microbatch'.",
            )

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
                remedy="Return one row per example from the model and take the loss outside it.",
            )
        trained = {name: self._model.get_parameter(name).detach() for name in self._names}
        chunk_size = few_examples(size) or self._chunk_size
        try:
            with untouched(self._model):
                grads = _vmapped_vjp(self._model, trained, use, in_axes, out_axes, chunk_size=chunk_size)
        except (RuntimeError, ValueError) as error:
            if out_of_memory(error):
                raise
            came = f"a model that torch.func cannot vmap ({str(error).strip().splitlines()[0]})"
            if "randomness" in str(error):
                came = "a model that draws random numbers in training (dropout)"
            raise UnsupportedModuleError(
                came,
                expected="a forward that torch.func can run for one example at a time",
                remedy="Leave gradients= out, which needs no vmap; or order whole batches: "
                "GraB(model, n, group=batch_size, gradients='microbatch').",
            ) from error
        scale = float(size) if self._mean else 1.0
        blocks = [grads[name].reshape(size, -1) for name in self._names]
        return Dense([block.to(self.like.dtype) * scale for block in blocks])


def _vmapped_vjp(
    module: nn.Module,
    params: Mapping[str, Tensor],
    use: Use,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int] | None,
    *,
    chunk_size: int | None = None,
) -> dict[str, Tensor]:
    """``[B, *shape]`` for each of ``params``: the gradients that ``use.grads`` bring to it, by example.

    Args:
        module: is run again.
        params: trained parameters by name, detached.
        use: the inputs and output gradients.
        in_axes: the batch dimension of each input leaf; None for one that all examples share.
        out_axes: the batch dimension of each output gradient; None: run as one example, which gives ``[*shape]``.
        chunk_size: examples at a time; all by default.
    """
    flat, spec = tree_flatten((use.args, use.kwargs))

    def gradient(batched: list[Tensor], cotangents: list[Tensor]) -> dict[str, Tensor]:
        rows = iter(batched)
        leaves = [x if axis is None else next(rows).unsqueeze(axis) for x, axis in zip(flat, in_axes, strict=True)]
        args, kwargs = tree_unflatten(leaves, spec)

        def outputs(weights: dict[str, Tensor]) -> list[Tensor]:
            out: list[Any] = tree_leaves(functional_call(module, weights, args, kwargs))
            return [out[i] for i in use.grads]

        if out_axes is not None:
            cotangents = [grad.unsqueeze(axis) for grad, axis in zip(cotangents, out_axes, strict=True)]
        grads: dict[str, Tensor] = vjp(outputs, dict(params))[1](cotangents)[0]
        return grads

    tensors = [x for x, axis in zip(flat, in_axes, strict=True) if axis is not None]
    cotangents = list(use.grads.values())
    # Without gradient: other parameters of the module would keep a graph. Attention as plain products: its fused
    # kernels cannot be vmapped, only looped over.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        if out_axes is None:
            return gradient(tensors, cotangents)
        in_dims = [axis for axis in in_axes if axis is not None], list(out_axes)
        grads: dict[str, Tensor] = vmap(gradient, in_dims=in_dims, chunk_size=chunk_size)(tensors, cotangents)
        return grads
