"""Where per-example gradients come from: an ordinary backward, torch.func, or micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ordain.errors import InputError
from ordain.gradients.protocol import Source
from ordain.gradients.sources.exact import ExactSource
from ordain.gradients.sources.microbatch import MicrobatchSource
from ordain.gradients.sources.sharded import refuse_sharded, refuse_wrapped
from ordain.gradients.sources.vmap import FuncSource

__all__ = ["SOURCES", "ExactSource", "FuncSource", "MicrobatchSource", "source_for"]

SOURCES: dict[str, Callable[..., Source]] = {
    "exact": ExactSource,
    "func": FuncSource,
    "microbatch": MicrobatchSource,
}


def source_for(model: nn.Module, gradients: str | Callable[..., Source], **options: Any) -> Source:
    """The source that ``gradients=`` names, or builds: ``gradients(model, **options)``."""
    refuse_wrapped(model)
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
