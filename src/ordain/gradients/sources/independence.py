"""Does the model treat each example by itself? Some of a batch are run through it alone, and their outputs compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ordain.errors import UnsupportedModuleError
from ordain.gradients.layout import layouts, tensors_in
from ordain.gradients.sources.graph import Graph

_BAGS = (
    "If the model takes the offsets of an EmbeddingBag, which count ids of the whole batch, pass the ids as one tensor "
    "[B, N] without offsets instead (padding_idx= fills up shorter bags). "
)


class Alone(NamedTuple):
    """What a model made of some examples alone.

    Attributes:
        chosen: ``[B]``, which.
        outputs: its output leaves, detached; None if random numbers were drawn, so that they say nothing.
        names: of the nodes of its graph.
        shapes: of the outputs of each node.
    """

    chosen: Tensor
    outputs: list[Any] | None
    names: tuple[str, ...]
    shapes: list[list[tuple[int, ...]]]


def run_alone(model: nn.Module, inputs: Any, chosen: Tensor, batch_dim: int) -> Alone | None:
    """Run the chosen examples ``[B]`` alone; None if the model does not take them."""
    places, size = chosen.nonzero()[:, 0], len(chosen)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return [leaf[i] for i in places.tolist()]
        counts = isinstance(leaf, Tensor) and leaf.ndim > batch_dim and leaf.shape[batch_dim] == size
        return leaf.index_select(batch_dim, places.to(leaf.device)) if counts else leaf

    leaves, spec = tree_flatten(inputs, is_leaf=lambda leaf: isinstance(leaf, list) and len(leaf) == size)
    args, kwargs = tree_unflatten([cut(leaf) for leaf in leaves], spec)
    try:
        with untouched(model) as drawn:
            found = tensors_in(model(*args, **kwargs))
            graph = Graph([leaf.grad_fn for leaf in found if leaf.grad_fn is not None], {})
            outputs = None if drawn() else [leaf.detach() for leaf in found]
            return Alone(chosen, outputs, graph.names, graph.shapes())
    except Exception:  # a model that takes batches of one size only
        return None


def refuse_mixed(model: nn.Module, output: Any, alone: Alone) -> None:
    """Raise if outputs of the chosen examples are not what they are ``alone``."""
    chosen = alone.chosen
    for one, other in zip(tensors_in(output), alone.outputs or (), strict=False):
        if not one.is_floating_point() or not other.numel():
            continue
        apart = []
        for way in layouts(one.shape, len(chosen), 0):
            rows = way.rows(chosen, one.shape[way.axis]).nonzero()[:, 0].to(one.device)
            if other.shape == (*one.shape[: way.axis], len(rows), *one.shape[way.axis + 1 :]):
                apart.append(float((one.detach().index_select(way.axis, rows) - other).abs().max()))
        coarse = one.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(one.device.type)
        if apart and min(apart) > (3e-2 if coarse else 1e-3) * float(other.abs().max()):
            raise UnsupportedModuleError(
                "a model whose output for an example depends on the other examples of the batch",
                expected="a model that processes each example independently",
                remedy=(_BAGS if any(isinstance(module, nn.EmbeddingBag) for module in model.modules()) else "")
                + "Look for statistics over the batch (F.batch_norm, x.mean(0)) or a permutation of it in its "
                "forward, or for a layer that uses another dimension as the batch (batch_first=, batch_dim=); "
                "or order whole batches with group=batch_size and gradients='microbatch'.",
            )


@contextmanager
def untouched(model: nn.Module, *, parameters: bool = True) -> Iterator[Callable[[], bool]]:
    """Run a model and leave no trace of it: parameters, buffers, attributes and random generators are put back.

    Attributes that are lists, dicts and sets get their items back. Gives a function that says whether random numbers
    were drawn. Without ``parameters``, these are taken not to change.
    """
    changing = (*model.buffers(), *(model.parameters() if parameters else ()))
    tensors = [(one, one.data, one.detach().clone()) for one in changing]
    attributes = [(module, dict(module.__dict__)) for module in model.modules()]
    values = [value for _, entries in attributes for value in entries.values()]
    containers = [(value, value.copy()) for value in values if isinstance(value, list | dict | set)]
    generators = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
    arrays = [
        (value.bit_generator, value.bit_generator.state) for value in values if isinstance(value, np.random.Generator)
    ]
    devices = sorted({p.get_device() for p in model.parameters() if p.is_cuda})
    python, legacy, before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002

    def drawn() -> bool:
        return (
            not torch.equal(before, torch.get_rng_state())
            or random.getstate() != python
            or not all(np.array_equal(a, b) for a, b in zip(legacy, np.random.get_state(), strict=True))  # noqa: NPY002
            or any(not torch.equal(state, one.get_state()) for one, state in generators)
            or any(str(bits.state) != str(state) for bits, state in arrays)
        )

    try:
        with torch.random.fork_rng(devices):
            yield drawn
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        for one, state in generators:
            one.set_state(state)
        for bits, numbers in arrays:
            bits.state = numbers
        for module, entries in attributes:
            _refill(module.__dict__, entries)
        for container, items in containers:
            _refill(container, items)
        with torch.no_grad():
            for tensor, data, value in tensors:
                if tensor.data_ptr() != data.data_ptr():
                    tensor.data = data
                if not torch.equal(data, value):
                    data.copy_(value)


def _refill(container: Any, items: Any) -> None:
    """An interrupt may leave more in it than there was, but nothing out."""
    if isinstance(container, list):
        container[:] = items
        return
    container.update(items)
    for name in list(container):
        if name not in items:
            container.pop(name) if isinstance(container, dict) else container.discard(name)
