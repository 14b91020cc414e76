"""Where per-example gradients come from: an ordinary backward, torch.func, or micro-batches."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ordain.errors import InputError, OrdainWarning
from ordain.gradients.protocol import Source
from ordain.gradients.sources.exact import ExactSource
from ordain.gradients.sources.microbatch import MicrobatchSource
from ordain.gradients.sources.model_checks import problems
from ordain.gradients.sources.selection import is_head, selection
from ordain.gradients.sources.vmap import FuncSource

__all__ = [
    "SOURCES",
    "Claim",
    "ExactSource",
    "FuncSource",
    "MicrobatchSource",
    "claim",
    "is_head",
    "source_for",
    "source_name",
]

SOURCES: dict[str, Callable[..., Source]] = {
    "exact": ExactSource,
    "func": FuncSource,
    "microbatch": MicrobatchSource,
}


def source_for(
    model: nn.Module,
    gradients: str | Callable[..., Source],
    *,
    params: Any = None,
    **options: Any,
) -> Source:
    """The source that ``gradients=`` names, or builds: ``gradients(model, **options)``."""
    name, params = source_name(gradients), selection(model, params)
    if is_head(params) and name != "exact":
        raise InputError(
            f"params='head' with gradients={gradients!r}",
            expected="gradients='exact', which sees which layers are called",
            remedy="Name the layer instead: params='fc', for example.",
        )
    for _, error, certain in problems(model, name, params):
        if certain:
            raise error
        warnings.warn(f"{error} Training will stop there unless this changes first.", OrdainWarning, stacklevel=4)
        break  # the others are of the same kind
    build = gradients if callable(gradients) else SOURCES[name]
    return build(model, params=params, **options)


def source_name(gradients: str | Callable[..., Source]) -> str:
    """The name of a source of ours; empty for a function that builds one."""
    if callable(gradients):
        return ""
    if gradients not in SOURCES:
        raise InputError(
            f"gradients={gradients!r}",
            expected=" or ".join(repr(name) for name in SOURCES) + ", or a function that builds a Source",
            remedy="Leave it out for 'exact', or pass model=None and call observe().",
        )
    return gradients


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
            "this model was watched by another order, which is now detached: a model can have one order at a time. "
            "Call detach() on an order before creating the next.",
            OrdainWarning,
            stacklevel=6,  # the line that creates the order
        )
    return _CLAIMS[model]
