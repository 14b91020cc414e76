"""Formatting of numbers and names."""

from __future__ import annotations

import math
from collections.abc import Sequence

NOTHING = "-"
_LONGEST = 40


def places(values: Sequence[float], *, digits: int = 4) -> int:
    """Number of decimals that shows ``digits`` significant digits of the smallest value.

    >>> places([0.2658, 12.3]), places([3.1]), places([])
    (4, 3, 4)
    """
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    return min(10, max(0, digits - 1 - math.floor(math.log10(min(sizes))))) if sizes else digits


def number(value: float | None, decimals: int) -> str:
    """Format with a number of decimals; a dash for None."""
    return NOTHING if value is None else f"{value:,.{decimals}f}"


def spread(mean: float | None, sd: float | None, decimals: int) -> str:
    """Mean ± standard deviation."""
    return number(mean, decimals) if sd is None else f"{number(mean, decimals)} ± {sd:.{decimals}f}"


def p_text(p: float | None) -> str:
    """Format a p-value with two significant digits.

    >>> p_text(0.0123), p_text(0.0), p_text(None)
    ('0.012', '< 1e-16', '-')
    """
    if p is None:
        return NOTHING
    return "< 1e-16" if p < 1e-16 else f"{p:.2g}"


def p_equals(p: float | None, name: str = "p") -> str:
    """Format a p-value with its name, for use in a sentence.

    >>> p_equals(0.0123), p_equals(0.0, "Holm p")
    ('p = 0.012', 'Holm p < 1e-16')
    """
    text = p_text(p)
    return f"{name} {text}" if text.startswith("<") else f"{name} = {text}"


def counted(count: object, what: str) -> str:
    """A count with a noun in singular or plural.

    >>> counted(1, "seed"), counted(5, "seed")
    ('1 seed', '5 seeds')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def bytes_text(size: float | None) -> str:
    """Format a number of bytes in the largest unit that gives a value of at least one.

    >>> bytes_text(0), bytes_text(94_200), bytes_text(5 << 30)
    ('0 B', '92.0 KiB', '5.0 GiB')
    """
    if size is None:
        return NOTHING
    power = min(4, max(0, (int(size).bit_length() - 1) // 10))
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{size:,.0f} B" if not power else f"{size / 1024**power:,.1f} {unit}"


def seconds_text(seconds: float | None) -> str:
    """Format a duration in seconds, minutes or hours.

    >>> seconds_text(0.25), seconds_text(75), seconds_text(7200)
    ('0.25 s', '75 s', '120 min')
    """
    if seconds is None:
        return NOTHING
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 4 * 3600 else f"{seconds / 3600:.3g} h"


def plain(label: str) -> str:
    """Make a label safe for matplotlib: no math mode, no control characters, limited length."""
    shown = "".join(letter for letter in label if letter.isprintable())
    shown = shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + "..."
    shown = f" {shown}" if shown.startswith("_") else shown  # matplotlib hides labels that start with _
    return shown.replace("$", r"\$")


def capital(text: str) -> str:
    """Capitalize the first letter only."""
    return text[:1].upper() + text[1:]
