"""Covertype: whole numbers apart by commas, 54 measurements and a class from 1 to 7 a line."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ordain.study.data.content import Content, Shelf, shown
from ordain.study.data.kinds import Labelled, Splits

__all__ = ["read_covtype", "read_table"]

_COLUMNS = 55
_CLASSES = 7
_BLOCK = 1 << 22  # bytes of text parsed at a time: what that takes in memory stays near the processor
_DIGITS = 6  # float32 holds every whole number of so many


def read_table(content: Content) -> Labelled:
    """Rows float32 ``[n, 54]`` as in the file, labels the class less one, in 0..6. A header line is skipped."""
    data = content.data.replace(b"\r\n", b"\n").rstrip(b"\n") + b"\n"
    start, line = 0, 1
    if data[:1].isalpha() or data[:1] == b'"':
        start, line = data.index(b"\n") + 1, 2
    parts: list[NDArray[np.float32]] = []
    while start < len(data):
        end = data.rfind(b"\n", start, start + _BLOCK) + 1
        if not end:  # no line is that long
            raise content.wrong(f"{_BLOCK:,} bytes without a new line from line {line:,}", expected=_expected())
        part = _whole_numbers(content, data[start:end], line)
        parts.append(part)
        start, line = end, line + len(part)
    if not parts:
        raise content.wrong("no rows", expected=_expected())
    table = np.concatenate(parts)
    y = table[:, -1].astype(np.int64)
    bad = (y < 1) | (y > _CLASSES)
    if bad.any():
        row = int(bad.argmax())
        raise content.wrong(f"class {y[row]} in data row {row + 1:,}", expected=f"1..{_CLASSES}")
    content.count(len(table))
    return Labelled(np.ascontiguousarray(table[:, :-1]), y - 1)


def _expected() -> str:
    return f"{_COLUMNS} whole numbers of at most {_DIGITS} digits a line, apart by commas"


def _whole_numbers(content: Content, block: bytes, line: int) -> NDArray[np.float32]:
    """``[rows, 55]``: the numbers of whole lines, all at once: where they end, how long they are, digit by digit."""
    text = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero((text == ord(",")) | (text == ord("\n")))
    lengths = np.diff(ends, prepend=-1) - 1
    negative = text[ends - lengths] == ord("-")  # of an empty number, its own end
    digits = text - np.uint8(ord("0"))  # wraps: anything but a digit is 10 or more
    marks = len(ends) + int(negative.sum())
    rows = block.count(b"\n")
    regular = len(ends) == rows * _COLUMNS and bool((text[ends[_COLUMNS - 1 :: _COLUMNS]] == ord("\n")).all())
    lengths -= negative
    if not regular or int((digits > 9).sum()) != marks or lengths.min() < 1 or lengths.max() > _DIGITS:
        raise _malformed(content, block, line)
    numbers = digits[ends - 1].astype(np.float32)
    power = np.float32(1)
    longer = np.arange(len(ends))
    for k in range(2, _DIGITS + 1):
        longer = longer[lengths[longer] >= k]
        if not len(longer):
            break
        power *= np.float32(10)
        numbers[longer] += power * digits[ends[longer] - k]
    numbers[negative] *= -1
    table: NDArray[np.float32] = numbers.reshape(rows, _COLUMNS)
    return table


def _malformed(content: Content, block: bytes, line: int) -> Exception:
    """The same rules, a line at a time, to say which breaks them."""
    for number, row in enumerate(block[:-1].split(b"\n"), line):
        fields = row.split(b",")
        if len(fields) != _COLUMNS:
            return content.wrong(f"{len(fields)} columns in line {number:,}", expected=_expected())
        for field in fields:
            plain = field.removeprefix(b"-")
            if not plain.isdigit() or len(plain) > _DIGITS:
                return content.wrong(f"{shown(field)} in line {number:,}", expected=_expected())
    raise AssertionError("a block that both is and is not well formed")  # pragma: no cover


def read_covtype(shelf: Shelf) -> Splits:
    """Covertype: all rows as train; the publisher's division in three is for another task."""
    return Splits(train=read_table(shelf.read("data")), notes=("Columns are as in the file, unscaled.",))
