"""Strict reading of JSON files that may have been damaged or edited."""

from __future__ import annotations

import json
import lzma
import math
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ordain.errors import InputError

_DIGITS = 19  # at most, in an integer: what fits in 64 bits
_MOST_BYTES = 1 << 28
_MOST_ITEMS = 1000
REMEDY = "Delete or repair the file, and run again."
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def read_bytes(path: Path) -> bytes:
    """Read a file, decompressing ``.xz``; raises ValueError if it is too large or damaged."""
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            content: bytes = file.read(_MOST_BYTES + 1)
    except (EOFError, lzma.LZMAError) as error:
        raise ValueError(f"not a complete xz file ({error})") from error
    if len(content) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES:,} bytes")
    return content


def validated(kind: Any, content: bytes, where: str, *, remedy: str = REMEDY) -> Any:
    """Parse JSON and validate it as the pydantic type ``kind``; ``where`` names the source in errors."""
    try:
        return _adapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        raise InputError(f"{where}, which is not JSON", expected="one JSON object", remedy=remedy)
    name = ".".join(str(part) for part in first["loc"] if part not in ("start", "epoch", "end"))
    if first["type"] in ("missing", "missing_argument"):
        raise InputError(f"no {first['loc'][-1]!r} at {where}", expected=f"a field {name!r}", remedy=remedy)
    shown = repr(first["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    expected = first["msg"].removeprefix("Input should be ")
    raise InputError(f"{name + ' = ' if name else ''}{shown} at {where}", expected=expected, remedy=remedy)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def loads(text: str) -> Any:
    """Parse JSON; raises ValueError for NaN, infinities, very long integers, and very deep nesting."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise ValueError("nesting that is too deep") from None


def alike(value: Any, model: Any) -> bool:
    """Whether ``value`` has the same structure as ``model``: the same keys, types and kinds of list items."""
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
    raise ValueError(f"{text[:20]}, which is not a number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _whole(text: str) -> int:
    return int(text) if len(text.lstrip("-")) <= _DIGITS else _refuse(text)
