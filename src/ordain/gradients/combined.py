"""Gradients composed of others: part of a parameter, several uses of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ordain.gradients.hashing import Hashes
from ordain.gradients.param_grads import ParamGrads


class RowRange(ParamGrads):
    """Gradients of rows ``start .. start + inner.rows`` of a larger parameter; the other rows are zero."""

    kind = "row range"

    def __init__(self, inner: ParamGrads, *, start: int, rows: int) -> None:
        super().__init__(inner.size, rows, inner.cols, parts=(inner,), settings={"start": start, "rows": rows})
        self._inner, self._start = inner, start
        self._flat = slice(start * inner.cols, (start + inner.rows) * inner.cols)

    def materialize(self, lo: int, hi: int) -> Tensor:
        first, last = max(lo, self._start), min(hi, self._start + self._inner.rows)
        if first >= last:
            return self._inner.materialize(0, 1).new_zeros(self.size, hi - lo, self.cols)
        inner = self._inner.materialize(first - self._start, last - self._start)
        return torch.nn.functional.pad(inner, (0, 0, first - lo, hi - last))

    def dot(self, vectors: Tensor) -> Tensor:
        return self._inner.dot(vectors[:, self._flat])

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        self._inner.add_weighted(weights, out[:, self._flat])

    def paired(self) -> RowRange | None:
        inner = self._inner.paired()
        return None if inner is None else RowRange(inner, **self.settings())

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        self._inner.add_products(vectors[:, self._flat], gram, dots)

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        self._inner.add_hashed(hashes.of_rows(self._start, self._start + self._inner.rows), out)


class Sum(ParamGrads):
    """A parameter used several times: its gradient is the sum, and only the Gram matrix has cross terms."""

    kind = "sum"

    def __init__(self, *terms: ParamGrads) -> None:
        super().__init__(terms[0].size, terms[0].rows, terms[0].cols, parts=terms)
        self._terms = terms

    def materialize(self, lo: int, hi: int) -> Tensor:
        grads = self._terms[0].materialize(lo, hi)
        for term in self._terms[1:]:
            grads = grads + term.materialize(lo, hi)
        return grads

    def dot(self, vectors: Tensor) -> Tensor:
        return torch.stack([term.dot(vectors) for term in self._terms]).sum(dim=0)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        for term in self._terms:
            term.add_weighted(weights, out)

    def paired(self) -> Sum | None:
        pairs = [pair for pair in (term.paired() for term in self._terms) if pair is not None]
        return type(self)(*pairs) if len(pairs) == len(self._terms) else None

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        for term in self._terms:
            term.add_hashed(hashes, out)


class Stacked(Sum):
    """Gradients of disjoint rows of one parameter: not even the Gram matrix has cross terms."""

    kind = "stacked"

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        for term in self._terms:
            term.add_products(vectors, gram, dots)


def total(several: Sequence[ParamGrads]) -> ParamGrads:
    """The gradients of all uses of a parameter together."""
    return several[0] if len(several) == 1 else Sum(*several)
