"""Tensors that a node of the graph saved and that must be computed again to be had (``torch.utils.checkpoint``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

COMPILED = "CompiledFunctionBackward"  # the node of any compiled code
_attributes: dict[str, list[str]] = {}  # under which each kind of node keeps them


def has_unpack_hooks(node: Any) -> bool:
    """Must a function be called to get a tensor that ``node`` saved? Compiled code drops its own after one backward."""
    return node.name() == COMPILED or any(hook is not None for hook in _hooks(node))


def unpacks_only_once(node: Any) -> bool:
    """Did ``node`` save a tensor in a checkpoint that recomputes a part of it, which only one backward may do?"""
    for hook in _hooks(node):
        for frame in _enclosed(hook):
            for context in _enclosed(getattr(frame, "recompute_fn", None)):
                if type(context).__name__ == "_CachedTorchDispatchMode":
                    return True
    return False


def _hooks(node: Any) -> Iterator[Any]:
    """For each tensor that ``node`` saved, what unpacks it, or None."""
    names = _attributes.get(node.name())
    if names is None:
        names = _attributes[node.name()] = [name for name in dir(node) if name.startswith("_raw_saved_")]
    for name in names:
        try:
            saved = getattr(node, name)
        except RuntimeError:  # a compiled function keeps what it saved elsewhere
            continue
        for one in saved if isinstance(saved, (list, tuple)) else (saved,):
            yield getattr(one, "unpack_hook", one)  # torch before 2.8 does not tell: there may be one


def _enclosed(function: Any) -> list[Any]:
    """What a function uses of those around it."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # nothing is in it yet
            found.append(cell.cell_contents)
    return found


def in_own_backward(function: Callable[[], Any]) -> Any:
    """``function()`` in a backward of its own: checkpoints compute what it unpacks again, compiled code keeps it."""
    found: list[Any] = []
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        end = _Calling.apply(start, lambda: found.append(function()))  # type: ignore[no-untyped-call]
    # For all inputs: asked for some only, a node leaves out what these do not need.
    torch.autograd.backward(end, retain_graph=True)
    return found[0]


class _Calling(torch.autograd.Function):
    """Calls a function when a backward comes by."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        ctx.function()
        return None, None
