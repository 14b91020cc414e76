"""WikiText: running text, a paragraph a line, words apart by spaces."""

from __future__ import annotations

from itertools import chain

import numpy as np

from ordain.study.data.content import Content, Shelf, shown
from ordain.study.data.kinds import Labelled, Splits

__all__ = ["read_wikitext", "read_words"]

_END = "<eos>"
_PARTS = ("train", "valid", "test")


def read_words(content: Content) -> list[str]:
    """The words of a file, with ``<eos>`` after each line."""
    try:
        text = content.data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.data.count(b"\n", 0, error.start) + 1
        piece = shown(content.data[error.start : error.start + 8])
        raise content.wrong(f"bytes {piece} in line {line:,}", expected="text in UTF-8") from None
    lines = text.removesuffix("\n").split("\n") if text else []  # as Python's open() gives them to pytorch/examples
    words = list(chain.from_iterable((*line.split(), _END) for line in lines))
    if len(words) == len(lines):
        raise content.wrong("no words", expected="text")
    content.count(len(words))
    return words


def read_wikitext(shelf: Shelf) -> Splits:
    """Word ids int64 ``[words]``, in order of first appearance over all parts (pytorch/examples' Corpus)."""
    ids: dict[str, int] = {}
    parts = {}
    for name in _PARTS:
        words = read_words(shelf.read(name))
        numbers = np.fromiter((ids.setdefault(word, len(ids)) for word in words), np.int64, len(words))
        parts[name] = Labelled(numbers, numbers)
    note = f"A vocabulary of {len(ids):,} words, numbered in order of first appearance over train, valid and test."
    return Splits(**parts, notes=(note,), vocabulary=tuple(ids))
