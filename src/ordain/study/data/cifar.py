"""CIFAR-10's binary files: a label and 3 x 32 x 32 bytes a record."""

from __future__ import annotations

import numpy as np

from ordain.study.data.content import Content, Shelf
from ordain.study.data.kinds import Labelled, Splits

__all__ = ["read_cifar10", "read_records"]

_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
_CLASSES = 10


def read_records(content: Content) -> Labelled:
    """Images uint8 ``[n, 3, 32, 32]``, labels in 0..9."""
    size = len(content.data)
    if size == 0 or size % _RECORD:
        raise content.wrong(f"{size:,} bytes", expected=f"a multiple of {_RECORD:,}, the size of a record")
    records = np.frombuffer(content.data, np.uint8).reshape(-1, _RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= _CLASSES:
        row = int(labels.argmax())
        raise content.wrong(f"label {labels[row]} in record {row + 1}", expected="labels in 0..9")
    content.count(len(records))
    return Labelled(records[:, 1:].reshape(-1, *_SHAPE).copy(), labels)  # writable


def read_cifar10(shelf: Shelf) -> Splits:
    """CIFAR-10: the five training files one after the other."""
    parts = [read_records(shelf.read(f"data_batch_{k}")) for k in range(1, 6)]
    train = Labelled(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
    return Splits(train=train, test=read_records(shelf.read("test_batch")))
