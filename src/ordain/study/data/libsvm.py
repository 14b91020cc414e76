"""LIBSVM's text files: a label, then index:value pairs with ascending indices from 1."""

from __future__ import annotations

import re

import numpy as np

from ordain.study.data.content import Content, Shelf, shown
from ordain.study.data.kinds import Labelled, Splits

__all__ = ["read_binary", "read_libsvm"]

_NUMBER = rb"[+-]?(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][+-]?\d{1,4})?"
_LABEL = re.compile(_NUMBER)
_PAIR = re.compile(rb"\d{1,9}:" + _NUMBER)
_ROW = re.compile(_NUMBER + rb"(?:[ \t]+\d{1,9}:" + _NUMBER + rb")*[ \t\r]*")


def read_libsvm(content: Content, *, features: int, labels: tuple[float, float]) -> Labelled:
    """Rows float32 ``[n, features]``, dense; labels 0 for the first of ``labels`` and 1 for the second.

    Lines are matched one at a time; what their numbers mean is checked on all at once.
    """
    names: list[bytes] = []
    flat: list[bytes] = []  # index, value, index, value, ... over the whole file
    pairs: list[int] = []
    lines: list[int] = []
    for number, line in enumerate(content.data.split(b"\n"), 1):
        if not line.strip():
            continue
        if not _ROW.fullmatch(line):
            raise _malformed(content, line, number)
        label, *row = line.replace(b":", b" ").split()
        names.append(label)
        flat.extend(row)
        pairs.append(len(row) // 2)
        lines.append(number)
    if not lines:
        raise content.wrong("no rows", expected="a label and index:value pairs a line")
    content.count(len(lines))
    values = np.fromiter(map(float, flat[1::2]), np.float64, len(flat) // 2)
    columns = np.fromiter(map(int, flat[::2]), np.int64, len(flat) // 2)
    rows = np.repeat(np.arange(len(lines)), pairs)
    y = np.fromiter(map(float, names), np.float64, len(names))

    def refuse_first(bad: np.ndarray, row_of: np.ndarray, what: str, expected: str) -> None:
        if bad.any():
            line = lines[int(row_of[bad.argmax()])]
            raise content.wrong(f"{what} in line {line:,}", expected=expected)

    refuse_first(~np.isin(y, labels), np.arange(len(y)), "another label", f"labels {labels[0]:g} and {labels[1]:g}")
    refuse_first((columns < 1) | (columns > features), rows, "an index out of range", f"indices in 1..{features}")
    behind = (np.diff(columns) <= 0) & (np.diff(rows) == 0)
    refuse_first(behind, rows[1:], "indices that do not ascend", "ascending indices")
    with np.errstate(over="ignore"):
        small = values.astype(np.float32)
    refuse_first(~np.isfinite(small), rows, "a value beyond float32", "finite values")
    x = np.zeros((len(lines), features), np.float32)
    x[rows, columns - 1] = small
    return Labelled(x, (y == labels[1]).astype(np.int64))


def _malformed(content: Content, line: bytes, number: int) -> Exception:
    label, *row = line.split()
    if not _LABEL.fullmatch(label):
        return content.wrong(f"label {shown(label)} in line {number:,}", expected="a number")
    piece = next((piece for piece in row if not _PAIR.fullmatch(piece)), line)
    return content.wrong(f"{shown(piece)} in line {number:,}", expected="index:value with finite numbers")


def read_binary(shelf: Shelf, *, features: int, labels: tuple[float, float] = (-1, 1)) -> Splits:
    """A problem of two classes, with its test file where it is there."""
    train = read_libsvm(shelf.read("train"), features=features, labels=labels)
    note = f"Labels {labels[0]:g} and {labels[1]:g} are 0 and 1."
    if "test" in shelf:
        test = read_libsvm(shelf.read("test"), features=features, labels=labels)
        return Splits(train=train, test=test, notes=(note,))
    absent = tuple(f"{file.names[0]} is not there: no test set." for file in shelf.dataset.files if file.key == "test")
    return Splits(train=train, notes=(note, *absent))
