"""Gradients composed of others: part of a parameter, several uses of one, a weight with its bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ordain.gradients.hashing import Hashes
from ordain.gradients.param_grads import ParamGrads


class RowRange(ParamGrads):
    """Gradients of rows ``start .. start + inner.rows`` of a larger parameter; the other rows are zero."""

    kind = "row range"

    def __init__(self, inner: ParamGrads, *, start: int, rows: int) -> None:
        self._inner, self._start = inner, start
        self._range = slice(start, start + inner.rows)
        self.size, self.rows, self.cols = inner.size, rows, inner.cols

    def materialize(self, lo: int, hi: int) -> Tensor:
        first, last = max(lo, self._range.start), min(hi, self._range.stop)
        if first >= last:
            return self._inner.materialize(0, 1).new_zeros(self.size, hi - lo, self.cols)
        inner = self._inner.materialize(first - self._start, last - self._start)
        return torch.nn.functional.pad(inner, (0, 0, first - lo, hi - last))

    def dot(self, vectors: Tensor) -> Tensor:
        return self._inner.dot(vectors[:, self._range])

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        self._inner.add_weighted(weights, out[:, self._range])

    def select(self, rows: Tensor) -> RowRange:
        return RowRange(self._inner.select(rows), **self.settings())

    def paired(self) -> RowRange | None:
        inner = self._inner.paired()
        return None if inner is None else RowRange(inner, **self.settings())

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        self._inner.add_products(vectors[:, self._range], gram, dots)

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        self._inner.add_hashed(hashes.of_rows(self._range.start, self._range.stop), out)

    def parts(self) -> tuple[ParamGrads, ...]:
        return (self._inner,)

    def settings(self) -> dict[str, Any]:
        return {"start": self._start, "rows": self.rows}


class Sum(ParamGrads):
    """A parameter used several times: its gradient is the sum, and only the Gram matrix has cross terms."""

    kind = "sum"

    def __init__(self, *terms: ParamGrads) -> None:
        self._terms = terms
        self.size, self.rows, self.cols = terms[0].size, terms[0].rows, terms[0].cols

    def materialize(self, lo: int, hi: int) -> Tensor:
        first, *rest = self._terms
        grads = first.materialize(lo, hi)
        for term in rest:
            grads = grads + term.materialize(lo, hi)
        return grads

    def dot(self, vectors: Tensor) -> Tensor:
        return torch.stack([term.dot(vectors) for term in self._terms]).sum(dim=0)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        for term in self._terms:
            term.add_weighted(weights, out)

    def select(self, rows: Tensor) -> Sum:
        return type(self)(*(term.select(rows) for term in self._terms))

    def paired(self) -> Sum | None:
        pairs = [pair for pair in (term.paired() for term in self._terms) if pair is not None]
        return type(self)(*pairs) if len(pairs) == len(self._terms) else None

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        for term in self._terms:
            term.add_hashed(hashes, out)

    def parts(self) -> tuple[ParamGrads, ...]:
        return self._terms


class Stacked(Sum):
    """Gradients of disjoint rows of one parameter: not even the Gram matrix has cross terms."""

    kind = "stacked"

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        for term in self._terms:
            term.add_products(vectors, gram, dots)


def total(several: Sequence[ParamGrads]) -> ParamGrads:
    """The gradients of all uses of a parameter together."""
    return several[0] if len(several) == 1 else Sum(*several)


def join_biases(placed: list[tuple[int, ParamGrads]]) -> list[tuple[int, ParamGrads]]:
    """Join the gradients of each weight with those of the bias right after it, where that saves work."""
    joined: list[tuple[int, ParamGrads]] = []
    for offset, grads in sorted(placed, key=lambda one: one[0]):
        if joined and joined[-1][0] + joined[-1][1].numel == offset:
            both = joined[-1][1].with_bias(grads)
            if both is not None:
                joined[-1] = (joined[-1][0], both)
                continue
        joined.append((offset, grads))
    return joined
