"""MNIST's idx files: a magic number, the sizes, the bytes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ordain.study.data.content import Content, Shelf
from ordain.study.data.kinds import Labelled, Splits

__all__ = ["read_idx", "read_mnist"]

_CLASSES = 10
_UINT8 = 8  # idx's code of the type


def read_idx(content: Content, *, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """``[n, *shape]``: the array of an idx file of unsigned bytes."""
    data, dims = content.data, 1 + len(shape)
    start = 4 + 4 * dims
    magic = bytes((0, 0, _UINT8, dims))
    if data[:4] != magic or len(data) < start:
        raise content.wrong(f"a start of {data[:4]!r}", expected=f"an idx file of bytes, {magic!r} and {dims} sizes")
    sizes = tuple(int(size) for size in np.frombuffer(data, ">u4", dims, offset=4))
    if sizes[1:] != shape or sizes[0] == 0:
        raise content.wrong(f"sizes {sizes}", expected=f"(n, {', '.join(map(str, shape))})" if shape else "(n)")
    if len(data) - start != math.prod(sizes):  # Python's integers: no product is too large
        raise content.wrong(
            f"{len(data) - start:,} bytes of data", expected=f"{math.prod(sizes):,} by its sizes {sizes}"
        )
    content.count(sizes[0])
    array: NDArray[np.uint8] = np.frombuffer(data, np.uint8, offset=start).reshape(sizes).copy()  # writable
    return array


def read_mnist(shelf: Shelf) -> Splits:
    """MNIST, and what has its format: x uint8 ``[n, 28, 28]``, y in 0..9."""
    return Splits(train=_part(shelf, "train"), test=_part(shelf, "t10k"))


def _part(shelf: Shelf, name: str) -> Labelled:
    images = read_idx(shelf.read(f"{name}-images"), shape=(28, 28))
    content = shelf.read(f"{name}-labels")
    labels = read_idx(content, shape=())
    if len(labels) != len(images):
        raise content.wrong(f"{len(labels):,} labels", expected=f"{len(images):,}, one an image")
    if labels.max() >= _CLASSES:
        raise content.wrong(f"label {labels.max()}", expected="labels in 0..9")
    return Labelled(images, labels.astype(np.int64))
