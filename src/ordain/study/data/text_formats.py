"""Read texts: GLUE's tab-separated files, WikiText, and BERT's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from ordain.study.data.data_files import FileContent, FoundFiles, Labelled, Splits, brief

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_tsv(content: FileContent, *, texts: Sequence[str], labels: Sequence[str]) -> Labelled:
    """The columns ``texts`` as tuples, and the index in ``labels`` of the column "label".

    Quotes are ordinary characters in these files. Parsers that treat a lone carriage return as the end of a line
    (pandas, Python's csv) misread them.
    """
    header, *rows = (line.split("\t") for line in content.lines())
    wanted = (*texts, "label")
    if any(header.count(name) != 1 for name in wanted):
        raise content.wrong(f"the header {brief(chr(9).join(header))}", expected=f"columns {', '.join(wanted)}")
    columns = [header.index(name) for name in wanted]
    x: list[tuple[str, ...]] = []
    y: list[int] = []
    for line, fields in enumerate(rows, 2):
        if len(fields) != len(header):
            raise content.wrong(f"{len(fields)} columns in line {line:,}", expected=f"{len(header)}, as in the header")
        *words, label = (fields[column] for column in columns)
        if label not in labels:
            raise content.wrong(f"label {brief(label)} in line {line:,}", expected=f"one of {', '.join(labels)}")
        x.append(tuple(words))
        y.append(labels.index(label))
    if not x:
        raise content.wrong("only a header", expected="rows")
    content.count(len(x))
    return Labelled(x, np.array(y, np.int64))


def read_glue(files: FoundFiles, *, texts: Sequence[str], labels: Sequence[str]) -> Splits:
    """Without a test set: GLUE does not publish its test labels."""
    dev = read_tsv(files.read("dev"), texts=texts, labels=labels)
    if "train" in files:
        return Splits(train=read_tsv(files.read("train"), texts=texts, labels=labels), valid=dev)
    note = f"train.tsv is not there: what is called train are the {len(dev.y):,} rows of dev.tsv."
    return Splits(train=dev, notes=(note,))


def read_words(content: FileContent) -> list[str]:
    """The words of a file, with ``<eos>`` after each line."""
    lines = content.lines() if content.data else []
    words = list(chain.from_iterable((*line.split(), "<eos>") for line in lines))
    if len(words) == len(lines):
        raise content.wrong("no words", expected="text")
    content.count(len(words))
    return words


def read_wikitext(files: FoundFiles) -> Splits:
    """Word ids int64 ``[words]``, numbered by first appearance over all splits (as Corpus in pytorch/examples)."""
    ids: dict[str, int] = {}
    parts = {}
    for name in ("train", "valid", "test"):
        words = read_words(files.read(name))
        numbers = np.fromiter((ids.setdefault(word, len(ids)) for word in words), np.int64, len(words))
        parts[name] = Labelled(numbers, numbers)
    note = f"A vocabulary of {len(ids):,} words, numbered in order of first appearance over train, valid and test."
    return Splits(**parts, notes=(note,), vocabulary=tuple(ids))


def read_vocabulary(content: FileContent) -> tuple[str, ...]:
    """BERT's word pieces: one per line, numbered by line."""
    words = tuple(content.lines())
    if len(set(words)) < len(words):
        raise content.wrong("a word piece twice, or an empty line", expected="each once")
    missing = [word for word in _SPECIAL if word not in words]
    if missing:
        raise content.wrong(f"no {', '.join(missing)}", expected="a line for each of BERT's special word pieces")
    content.count(len(words))
    return words
