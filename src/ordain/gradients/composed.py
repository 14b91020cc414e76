"""Forms made of other forms: part of a parameter, several uses of one, a weight with its bias."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ordain.gradients.forms import Biased, Form
from ordain.gradients.hashing import Hashes


class Shifted(Form):
    """A form of rows ``start .. start + form.rows`` of a larger parameter; the other rows are zero."""

    def __init__(self, form: Form, start: int, rows: int) -> None:
        self._form, self._start = form, start
        self.size, self.rows, self.cols = form.size, rows, form.cols

    def make(self, lo: int, hi: int) -> Tensor:
        first, last = max(lo, self._start), min(hi, self._start + self._form.rows)
        if first >= last:
            inner = self._form.make(0, 1)
            return inner.new_zeros(self.size, hi - lo, self.cols)
        inner = self._form.make(first - self._start, last - self._start)
        return torch.nn.functional.pad(inner, (0, 0, first - lo, hi - last))

    def dot(self, vectors: Tensor) -> Tensor:
        return self._form.dot(vectors[:, self._start : self._start + self._form.rows])

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        self._form.add_weighted(weights, out[:, self._start : self._start + self._form.rows])

    def select(self, rows: Tensor | slice) -> Shifted:
        return Shifted(self._form.select(rows), self._start, self.rows)

    def paired(self) -> Shifted | None:
        form = self._form.paired()
        return None if form is None else Shifted(form, self._start, self.rows)

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        self._form.add_products(vectors[:, self._start : self._start + self._form.rows], gram, dots)

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        self._form.add_hashed(hashes.of_rows(self._start, self._start + self._form.rows), out)


class Total(Form):
    """A parameter used several times: its gradient is the sum, and only the Gram matrix has cross terms."""

    def __init__(self, forms: Sequence[Form]) -> None:
        self._forms = list(forms)
        self.size, self.rows, self.cols = forms[0].size, forms[0].rows, forms[0].cols

    def make(self, lo: int, hi: int) -> Tensor:
        first, *rest = self._forms
        made = first.make(lo, hi)
        for form in rest:
            made = made + form.make(lo, hi)
        return made

    def dot(self, vectors: Tensor) -> Tensor:
        return torch.stack([form.dot(vectors) for form in self._forms]).sum(dim=0)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        for form in self._forms:
            form.add_weighted(weights, out)

    def select(self, rows: Tensor | slice) -> Total:
        return type(self)([form.select(rows) for form in self._forms])

    def paired(self) -> Total | None:
        forms = [form.paired() for form in self._forms]
        return None if None in forms else type(self)([form for form in forms if form is not None])

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        for form in self._forms:
            form.add_hashed(hashes, out)


class Stacked(Total):
    """Forms of disjoint rows of one parameter: not even the Gram matrix has cross terms."""

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        for form in self._forms:
            form.add_products(vectors, gram, dots)


def total(forms: Sequence[Form]) -> Form:
    """One form for all uses of a parameter."""
    return forms[0] if len(forms) == 1 else Total(forms)


def join_biases(placed: list[tuple[int, Form]]) -> list[tuple[int, Form]]:
    """Join each weight's form with that of the bias right behind it, where that saves work."""
    joined: list[tuple[int, Form]] = []
    for offset, form in sorted(placed, key=lambda one: one[0]):
        if joined and joined[-1][0] + joined[-1][1].numel == offset:
            both = Biased.join(joined[-1][1], form)
            if both is not None:
                joined[-1] = (joined[-1][0], both)
                continue
        joined.append((offset, form))
    return joined
