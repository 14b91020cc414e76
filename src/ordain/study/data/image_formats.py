"""Read images: MNIST's idx files and CIFAR-10's binary records."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ordain.study.data.data_files import FileContent, FoundFiles, Labelled, Splits

_CLASSES = 10
_UINT8 = 8  # the code of the type in an idx file
_CIFAR_SHAPE = (3, 32, 32)
_RECORD = 1 + math.prod(_CIFAR_SHAPE)  # bytes: a label, then the pixels


def read_idx(content: FileContent, *, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """``[n, *shape]``: the array of an idx file of unsigned bytes (a magic number, the sizes, the bytes)."""
    data, dims = content.data, 1 + len(shape)
    start, magic = 4 + 4 * dims, bytes((0, 0, _UINT8, dims))
    if data[:4] != magic or len(data) < start:
        raise content.wrong(f"a start of {data[:4]!r}", expected=f"an idx file of bytes, {magic!r} and {dims} sizes")
    sizes = tuple(int(size) for size in np.frombuffer(data, ">u4", dims, offset=4))
    if sizes[1:] != shape or sizes[0] == 0:
        raise content.wrong(f"sizes {sizes}", expected=f"(n, {', '.join(map(str, shape))})" if shape else "(n)")
    size, expected = len(data) - start, math.prod(sizes)  # Python's integers: the product cannot overflow
    if size != expected:
        raise content.wrong(f"{size:,} bytes of data", expected=f"{expected:,} for sizes {sizes}")
    content.count(sizes[0])
    array: NDArray[np.uint8] = np.frombuffer(data, np.uint8, offset=start).reshape(sizes).copy()  # writable
    return array


def read_mnist(files: FoundFiles) -> Splits:
    """MNIST and data sets in its format: x uint8 ``[n, 28, 28]``, y in 0..9."""
    return Splits(train=_idx_pair(files, "train"), test=_idx_pair(files, "t10k"))


def _idx_pair(files: FoundFiles, name: str) -> Labelled:
    images = read_idx(files.read(f"{name}-images"), shape=(28, 28))
    content = files.read(f"{name}-labels")
    labels = read_idx(content, shape=())
    if len(labels) != len(images):
        raise content.wrong(f"{len(labels):,} labels", expected=f"{len(images):,}, one per image")
    if labels.max() >= _CLASSES:
        raise content.wrong(f"label {labels.max()}", expected="labels in 0..9")
    return Labelled(images, labels.astype(np.int64))


def read_records(content: FileContent) -> Labelled:
    """One file of CIFAR-10: images uint8 ``[n, 3, 32, 32]``, labels in 0..9."""
    size = len(content.data)
    if size == 0 or size % _RECORD:
        raise content.wrong(f"{size:,} bytes", expected=f"a multiple of {_RECORD:,}, the size of a record")
    records = np.frombuffer(content.data, np.uint8).reshape(-1, _RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= _CLASSES:
        row = int(labels.argmax())
        raise content.wrong(f"label {labels[row]} in record {row + 1}", expected="labels in 0..9")
    content.count(len(records))
    return Labelled(records[:, 1:].reshape(-1, *_CIFAR_SHAPE).copy(), labels)  # writable


def read_cifar10(files: FoundFiles) -> Splits:
    """CIFAR-10, with the five training files concatenated."""
    parts = [read_records(files.read(f"data_batch_{k}")) for k in range(1, 6)]
    train = Labelled(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
    return Splits(train=train, test=read_records(files.read("test_batch")))
