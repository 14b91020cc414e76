"""JSON that somebody else may have written: only what our own writers could have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["alike", "loads", "read_text"]

_DIGITS = 19  # of a whole number: what fits 64 bits
_MOST_BYTES = 1 << 28
_MOST_ITEMS = 1000


def read_text(path: Path) -> str:
    """The text of a file; ValueError if it is too large to be one of ours, or no UTF-8."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES:,} bytes")
    return path.read_text(encoding="utf-8")


def loads(text: str) -> Any:
    """The value; ValueError for NaN, infinities, numbers without end, nesting without end, and what is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise ValueError("nesting without end") from None


def alike(value: Any, model: Any) -> bool:
    """Is ``value`` of the same shape as ``model``: the same keys and types, and lists of what the model's have?"""
    if isinstance(model, dict):
        same = isinstance(value, dict) and value.keys() == model.keys()
        return same and all(alike(value[key], model[key]) for key in model)
    if isinstance(model, list):
        listed = isinstance(value, list) and 0 < len(value) <= _MOST_ITEMS
        return listed and all(any(alike(one, other) for other in model) for one in value)
    if isinstance(model, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(model)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]}, which is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _whole(text: str) -> int:
    return int(text) if len(text.lstrip("-")) <= _DIGITS else _refuse(text)
