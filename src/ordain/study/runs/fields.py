"""Typed fields of JSON that somebody else may have written: each is what it should be, or an error names it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ordain.errors import InputError

__all__ = ["Fields", "read_object"]

T = TypeVar("T")
_REMEDY = "Delete or mend the file, and run again."


def read_object(content: bytes, where: str) -> dict[str, Any]:
    """One JSON object; NaN and Infinity, which JSON does not have, are refused."""
    try:
        found = json.loads(content, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # not UTF-8 and not JSON are ValueErrors too
        raise InputError(f"{where}, which is not JSON", expected="one JSON object", remedy=_REMEDY) from error
    if not isinstance(found, dict):
        raise InputError(f"a {type(found).__name__} at {where}", expected="one JSON object", remedy=_REMEDY)
    return found


def _refuse(word: str) -> float:
    raise ValueError(word)


@dataclass(frozen=True)
class Fields:
    """The fields of one object; ``where`` is what errors call it. A ``maybe_`` field may be null or not there."""

    values: Mapping[str, Any]
    where: str

    def text(self, name: str) -> str:
        """A string."""
        found = self._get(name)
        if not isinstance(found, str):
            raise self._wrong(name, "text")
        return found

    def choice(self, name: str, among: Sequence[str]) -> str:
        """One of a few words."""
        found = self.text(name)
        if found not in among:
            raise self._wrong(name, " or ".join(repr(word) for word in among))
        return found

    def mapping(self, name: str) -> dict[str, Any]:
        """An object."""
        found = self._get(name)
        if not isinstance(found, dict):
            raise self._wrong(name, "an object")
        return found

    def texts(self, name: str) -> list[str]:
        """A list of strings."""
        found = self._get(name)
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self._wrong(name, "a list of texts")
        return found

    def number(self, name: str) -> float:
        """A finite number."""
        found = self._get(name)
        if not _is_finite(found):
            raise self._wrong(name, "a finite number")
        return float(found)

    def count(self, name: str) -> float:
        """A finite number, not below zero."""
        found = self.number(name)
        if found < 0:
            raise self._wrong(name, "a number, not below zero")
        return found

    def integer(self, name: str) -> int:
        """A whole number, not below zero."""
        found = self._get(name)
        if isinstance(found, bool) or not isinstance(found, int) or found < 0 or not _is_finite(found):
            raise self._wrong(name, "a whole number, not below zero")
        return found

    def maybe_text(self, name: str) -> str | None:
        """A string or nothing."""
        return self._maybe(name, self.text)

    def maybe_number(self, name: str) -> float | None:
        """A finite number or nothing."""
        return self._maybe(name, self.number)

    def maybe_integer(self, name: str) -> int | None:
        """A whole number or nothing."""
        return self._maybe(name, self.integer)

    def maybe_mapping(self, name: str) -> dict[str, Any] | None:
        """An object or nothing."""
        return self._maybe(name, self.mapping)

    def maybe_share(self, name: str) -> float | None:
        """A number in [0, 1] or nothing."""
        found = self.maybe_number(name)
        if found is not None and not 0 <= found <= 1:
            raise self._wrong(name, "a number from 0 to 1")
        return found

    def _maybe(self, name: str, read: Callable[[str], T]) -> T | None:
        return None if self.values.get(name) is None else read(name)

    def _get(self, name: str) -> Any:
        if name not in self.values:
            raise InputError(f"no {name!r} at {self.where}", expected=f"a field {name!r}", remedy=_REMEDY)
        return self.values[name]

    def _wrong(self, name: str, expected: str) -> InputError:
        shown = repr(self.values[name])
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return InputError(f"{name} = {shown} at {self.where}", expected=expected, remedy=_REMEDY)


def _is_finite(found: Any) -> bool:
    if isinstance(found, bool) or not isinstance(found, int | float):
        return False
    try:
        return math.isfinite(float(found))
    except OverflowError:
        return False
