"""Gradients multiplied elementwise by one vector, the same for all examples: a diagonal preconditioner."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ordain.gradients.combined import RowRange, Sum
from ordain.gradients.dense import Dense
from ordain.gradients.factored import Factored, apart
from ordain.gradients.memory import scratch
from ordain.gradients.param_grads import ParamGrads
from ordain.gradients.protocol import Gradients
from ordain.gradients.sparse_rows import SparseRows


class Scaled(ParamGrads):
    """D * G_i for gradients G_i of a single parameter and D ``[rows, cols]``.

    <V, D G> is <D V, G>, and a weighted sum is scaled once it is summed. The Gram matrix does not follow from that of
    the G_i: for it, a chunk of rows is materialised at a time.
    """

    def __init__(self, inner: ParamGrads, diagonal: Tensor) -> None:
        super().__init__(inner.size, inner.rows, inner.cols)
        self._inner, self._diagonal = inner, diagonal

    def materialize(self, lo: int, hi: int) -> Tensor:
        return self._inner.materialize(lo, hi) * self._diagonal[lo:hi]

    def in_scratch(self, lo: int, hi: int) -> Tensor:
        out = scratch(self.size, hi - lo, self.cols, like=self._diagonal, name="scaled")
        return torch.mul(self._inner.in_scratch(lo, hi), self._diagonal[lo:hi], out=out)

    def chunks(self) -> Iterator[tuple[int, int]]:
        return self._inner.chunks()

    def dot(self, vectors: Tensor) -> Tensor:
        return self._inner.dot(vectors * self._diagonal.flatten())

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        sums = torch.zeros_like(out)
        self._inner.add_weighted(weights, sums)
        out.addcmul_(sums, self._diagonal.flatten())

    def add_signed(self, each: Tensor, scale: float, out: Tensor) -> None:
        sums = torch.zeros_like(out)
        self._inner.add_signed(each, scale, sums)
        out.addcmul_(sums, self._diagonal.flatten())

    def fill(self, out: Tensor) -> None:
        self._inner.fill(out)
        out.mul_(self._diagonal.flatten())

    def select(self, rows: Tensor) -> Scaled:
        return Scaled(self._inner.select(rows), self._diagonal)

    def paired(self) -> Scaled | None:
        inner = self._inner.paired()
        return None if inner is None else Scaled(inner, self._diagonal)

    def double(self) -> Scaled:
        return Scaled(self._inner.double(), self._diagonal.double())


def times(grads: ParamGrads, diagonal: Tensor) -> ParamGrads:
    """The gradients of a single parameter times ``diagonal``, ``[numel]``."""
    matrix = diagonal.view(grads.rows, grads.cols)
    if isinstance(grads, SparseRows):
        examples, ids, b = grads.tensors()
        return SparseRows(examples, ids, b * matrix[ids], **grads.settings())
    if isinstance(grads, Sum):
        return type(grads)(*(times(part, diagonal) for part in grads.parts()))
    if isinstance(grads, RowRange):
        (inner,), start = grads.parts(), grads.settings()["start"]
        return RowRange(times(inner, matrix[start : start + inner.rows].flatten()), **grads.settings())
    return Scaled(grads, matrix)


def preconditioned(batch: Gradients, diagonal: Tensor) -> Gradients:
    """Each gradient of the batch times ``diagonal``, ``[d]``, of the batch's dtype and device."""
    if (row := batch.one_row()) is not None:
        parts = zip(row, diagonal.split_with_sizes([len(part) for part in row]), strict=True)
        return Dense([(part * own).unsqueeze(0) for part, own in parts])
    placed, scale = batch.by_parameter()
    scaled = [(offset, times(one, diagonal[offset : offset + one.numel])) for offset, one in apart(placed)]
    return Factored(scaled, dim=batch.dim, size=batch.size, scale=scale, like=diagonal)
