"""Does the model treat each example by itself? Some of a batch are run through it alone, and their outputs compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ordain.errors import UnsupportedModuleError


def outputs_of_some(model: nn.Module, inputs: Any, chosen: Tensor, batch_dim: int) -> list[Any] | None:
    """The output leaves for the chosen examples ``[B]`` alone; None if that says nothing (random numbers, an error)."""
    places, size = chosen.nonzero()[:, 0], len(chosen)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return [leaf[i] for i in places.tolist()]
        counts = isinstance(leaf, Tensor) and leaf.ndim > batch_dim and leaf.shape[batch_dim] == size
        return leaf.index_select(batch_dim, places.to(leaf.device)) if counts else leaf

    leaves, spec = tree_flatten(inputs, is_leaf=lambda leaf: isinstance(leaf, list) and len(leaf) == size)
    args, kwargs = tree_unflatten([cut(leaf) for leaf in leaves], spec)
    try:
        with torch.no_grad(), untouched(model) as drawn:
            found = tree_leaves(model(*args, **kwargs))
            return None if drawn() else found
    except Exception:  # a model that takes batches of one size only
        return None


def refuse_mixed(output: Any, alone: list[Any], chosen: Tensor) -> None:
    """Raise if outputs of the chosen examples are not what they are ``alone``."""
    size, some = len(chosen), int(chosen.sum())
    for one, other in zip(tree_leaves(output), alone, strict=False):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.is_floating_point()):
            continue
        axes = [
            axis for axis, lengths in enumerate(zip(one.shape, other.shape, strict=False)) if lengths == (size, some)
        ]
        if one.ndim != other.ndim or len(axes) != 1:
            continue
        same = one.detach().index_select(axes[0], chosen.nonzero()[:, 0].to(one.device))
        if same.shape != other.shape or not other.numel():
            continue
        coarse = one.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(one.device.type)
        if float((same - other).abs().max()) > (3e-2 if coarse else 1e-3) * float(same.abs().max()):
            raise UnsupportedModuleError(
                "a model whose output for an example depends on the other examples of the batch",
                expected="a model that treats each example by itself",
                remedy="Look for statistics over the batch (F.batch_norm, x.mean(0)) or a permutation of it in its "
                "forward, or for a layer that takes another dimension for the batch (batch_first=, batch_dim=); or "
                "order whole batches with group=batch_size and gradients='microbatch'.",
            )


@contextmanager
def untouched(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Run a model and leave no trace of it: parameters, buffers, attributes and random generators are put back.

    Gives a function that says whether random numbers were drawn.
    """
    tensors = [(one, one._version, one.detach().clone()) for one in (*model.buffers(), *model.parameters())]
    attributes = [(module, dict(module.__dict__)) for module in model.modules()]
    devices = sorted({p.get_device() for p in model.parameters() if p.is_cuda})
    python, legacy, before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002

    def drawn() -> bool:
        return not torch.equal(before, torch.get_rng_state()) or random.getstate() != python

    try:
        with torch.random.fork_rng(devices):
            yield drawn
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        for module, entries in attributes:
            module.__dict__.update(entries)  # first: an interrupt may leave more behind, but nothing out
            for name in module.__dict__.keys() - entries.keys():
                del module.__dict__[name]
        with torch.no_grad():
            for one, version, value in tensors:
                if one._version != version:
                    one.copy_(value)
