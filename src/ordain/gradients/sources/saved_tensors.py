"""Tensors that a node of the graph saved and that must be computed again to be had (``torch.utils.checkpoint``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_attributes: dict[str, list[str]] = {}  # under which each kind of node keeps them


def has_unpack_hooks(node: Any) -> bool:
    """Does a function have to be called to get any of the tensors that ``node`` saved?"""
    names = _attributes.get(node.name())
    if names is None:
        names = _attributes[node.name()] = [name for name in dir(node) if name.startswith("_raw_saved_")]
    for name in names:
        saved = getattr(node, name)
        for one in saved if isinstance(saved, (list, tuple)) else (saved,):
            if getattr(one, "unpack_hook", one) is not None:  # torch before 2.8 does not tell
                return True
    return False


def in_own_backward(function: Callable[[], Any]) -> Any:
    """``function()`` inside a backward of its own: checkpoints compute again what it unpacks."""
    found: list[Any] = []
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        end = _Calling.apply(start, lambda: found.append(function()))  # type: ignore[no-untyped-call]
    # For all inputs: asked for some only, a node leaves out what these do not need.
    torch.autograd.backward(end)
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
