"""GLUE's tab-separated files. Quotes mean nothing in them, so Python's csv would misread them."""

from __future__ import annotations

import numpy as np

from ordain.study.data.content import Content, Shelf, shown
from ordain.study.data.kinds import Labelled, Splits

__all__ = ["read_qnli", "read_sst2", "read_tsv"]


def read_tsv(content: Content, *, texts: tuple[str, ...], labels: tuple[str, ...]) -> Labelled:
    """The columns ``texts`` as tuples, and the place in ``labels`` of the column "label"."""
    try:
        lines = content.data.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        line = content.data.count(b"\n", 0, error.start) + 1
        piece = shown(content.data[error.start : error.start + 8])
        raise content.wrong(f"bytes {piece} in line {line:,}", expected="text in UTF-8") from None
    header = lines[0].removesuffix("\r").split("\t")
    wanted = (*texts, "label")
    if any(header.count(name) != 1 for name in wanted):
        raise content.wrong(f"the header {shown(lines[0])}", expected=f"columns {', '.join(wanted)}")
    places = [header.index(name) for name in wanted]
    numbers = {label: number for number, label in enumerate(labels)}
    x: list[tuple[str, ...]] = []
    y: list[int] = []
    for line, row in enumerate(lines[1:], 2):
        fields = row.removesuffix("\r").split("\t")
        if len(fields) != len(header):
            raise content.wrong(f"{len(fields)} columns in line {line:,}", expected=f"{len(header)}, as in the header")
        *words, label = (fields[place] for place in places)
        if label not in numbers:
            raise content.wrong(f"label {shown(label)} in line {line:,}", expected=f"one of {', '.join(labels)}")
        x.append(tuple(words))
        y.append(numbers[label])
    if not x:
        raise content.wrong("a header alone", expected="rows")
    content.count(len(x))
    return Labelled(x, np.array(y, np.int64))


def read_sst2(shelf: Shelf) -> Splits:
    """SST-2: one sentence, 1 if it is positive."""
    return _read(shelf, texts=("sentence",), labels=("0", "1"))


def read_qnli(shelf: Shelf) -> Splits:
    """QNLI: a question and a sentence, 0 if the sentence answers it (entailment)."""
    return _read(shelf, texts=("question", "sentence"), labels=("entailment", "not_entailment"))


def _read(shelf: Shelf, *, texts: tuple[str, ...], labels: tuple[str, ...]) -> Splits:
    """GLUE keeps the labels of its test sets, so there is none here."""
    dev = read_tsv(shelf.read("dev"), texts=texts, labels=labels)
    if "train" in shelf:
        return Splits(train=read_tsv(shelf.read("train"), texts=texts, labels=labels), valid=dev)
    note = f"train.tsv is not there: what is called train are the {len(dev.y):,} rows of dev.tsv."
    return Splits(train=dev, notes=(note,))
