"""Where per-example gradients come from: an ordinary backward, torch.func, or micro-batches."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ordain.errors import InputError, OrdainWarning, UnsupportedModuleError
from ordain.gradients.protocol import Source
from ordain.gradients.sources.exact import ExactSource
from ordain.gradients.sources.microbatch import MicrobatchSource
from ordain.gradients.sources.sharded import refuse_sharded, refuse_wrapped
from ordain.gradients.sources.vmap import FuncSource

__all__ = ["SOURCES", "Claim", "ExactSource", "FuncSource", "MicrobatchSource", "claim", "source_for"]

SOURCES: dict[str, Callable[..., Source]] = {
    "exact": ExactSource,
    "func": FuncSource,
    "microbatch": MicrobatchSource,
}


def source_for(model: nn.Module, gradients: str | Callable[..., Source], **options: Any) -> Source:
    """The source that ``gradients=`` names, or builds: ``gradients(model, **options)``."""
    refuse_wrapped(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModuleError(
            f"{type(model).__name__}, a model compiled by torch.jit",
            expected="a model whose layers run in Python, which hooks can see",
            remedy="Write order = GraB(eager_model, n): order by the eager model, and script it once it is trained.",
        )
    if callable(gradients):
        return gradients(model, **options)
    if gradients not in SOURCES:
        raise InputError(
            f"gradients={gradients!r}",
            expected=" or ".join(repr(name) for name in SOURCES) + ", or a function that builds a Source",
            remedy="Leave it out for 'exact', or pass model=None and call observe().",
        )
    if gradients != "exact":
        refuse_sharded(model, gradients)
    return SOURCES[gradients](model, **options)


class Claim:
    """An order's hold on the model that it watches. The hooks keep the source alive, even without the order.

    Attributes:
        live: until the order is detached, or another order claims the model.
    """

    def __init__(self, source: Source) -> None:
        self._source = weakref.ref(source)
        self.live = True

    def give_up(self) -> bool:
        """Stop watching, for good. Was it watching?"""
        source, was_live = self._source(), self.live
        self.live = False
        if source is not None and was_live:
            source.detach()
        return source is not None and was_live


_CLAIMS: weakref.WeakKeyDictionary[nn.Module, Claim] = weakref.WeakKeyDictionary()


def claim(model: nn.Module, source: Source) -> Claim:
    """``source`` alone watches ``model`` for an order from now on: an earlier one (a cell run twice) gives up."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    before, _CLAIMS[model] = _CLAIMS.get(model), Claim(source)
    if before is not None and before.give_up():
        warnings.warn(
            "this model was watched by another order, which is detached from it now: a model has one order at a time. "
            "Call detach() on an order before making the next.",
            OrdainWarning,
            stacklevel=4,
        )
    return _CLAIMS[model]
