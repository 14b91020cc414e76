"""Options that an order does not have: said with the name of the order, and of the option that was meant."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ordain.errors import ArgumentError, did_you_mean


def keywords(*builders: Any, without: Iterable[str] = ()) -> list[str]:
    """The names of the keyword-only options of these functions."""
    found = [p for build in builders for p in inspect.signature(build).parameters.values()]
    return sorted({p.name for p in found if p.kind is p.KEYWORD_ONLY} - set(without))


def refuse_unknown(order: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise for the first of ``options`` that is not one of those ``known``."""
    names = list(known)
    for name in options:
        if name not in names:
            raise ArgumentError(
                f"{order}({name}=...)",
                expected=f"one of {', '.join(f'{one}=' for one in names)}",
                remedy=did_you_mean(name, names, otherwise="See help(ordain.Order)."),
            )
