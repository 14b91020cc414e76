"""Per-example gradients of one parameter, in whatever form they need not all be held at once.

A parameter is seen as a matrix ``[rows, cols]`` whose row-major order is its own. A form can *make*
the gradients of a few rows for all examples, ``[B, few, cols]``; from that alone everything follows,
a chunk of rows at a time. Forms that know better ways override.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

CHUNK_NUMBERS = 2**22  # 16 MB of float32: the most that is made at a time


class Form(ABC):
    """Per-example gradients G_1 .. G_B, each ``[rows, cols]``."""

    size: int
    rows: int
    cols: int

    @abstractmethod
    def make(self, lo: int, hi: int) -> Tensor:
        """``[B, hi - lo, cols]``: rows lo .. hi of every example's gradient."""

    @abstractmethod
    def dot(self, vectors: Tensor) -> Tensor:
        """``[k, rows, cols]`` to ``[k, B]``: <V_k, G_i>."""

    @abstractmethod
    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """out[k] += sum_i weights[k, i] G_i, for ``[k, B]`` and ``[k, rows, cols]``."""

    @abstractmethod
    def select(self, rows: Tensor) -> Form:
        """The gradients of these examples only."""

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, B]`` of <G_i, G_j> and ``[k, B]`` of <V_k, G_i>; a chunk of rows at a time."""
        gram = dots = torch.empty(0)
        for number, (lo, hi) in enumerate(self.chunks()):
            made = self.make(lo, hi).flatten(1)
            part = vectors[:, lo:hi].flatten(1)
            if number == 0:
                gram, dots = made @ made.T, part @ made.T
            else:
                gram.addmm_(made, made.T)
                dots.addmm_(part, made.T)
        return gram, dots

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows small enough to make."""
        step = max(1, CHUNK_NUMBERS // (self.size * self.cols))
        for lo in range(0, self.rows, step):
            yield lo, min(lo + step, self.rows)


class Made(Form):
    """Gradients that are there: biases, norms, and what a fallback gives. ``[B, rows, cols]``."""

    def __init__(self, made: Tensor) -> None:
        self._made = made
        self.size, self.rows, self.cols = made.shape

    @classmethod
    def flat(cls, made: Tensor) -> Made:
        """From ``[B, *shape]``, as one row."""
        return cls(made.reshape(made.shape[0], 1, -1))

    def make(self, lo: int, hi: int) -> Tensor:
        return self._made[:, lo:hi]

    def dot(self, vectors: Tensor) -> Tensor:
        return vectors.flatten(1) @ self._made.flatten(1).T

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        out.view(len(weights), -1).addmm_(weights, self._made.flatten(1))

    def select(self, rows: Tensor) -> Made:
        return Made(self._made[rows])


class Outer(Form):
    """G_i = sum_t b_it a_it' for layer inputs a ``[B, T, cols]`` and output gradients b ``[B, T, rows]``."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self._a, self._b = a, b
        self.size, steps, self.cols = a.shape
        self.rows = b.shape[2]
        # Gram of factors: T^2 (rows + cols) a pair of examples. Making: T rows cols an example, and then
        # rows cols a pair. Whichever multiplies less.
        factored = self.size * steps * steps * (self.rows + self.cols)
        made = (self.size + steps) * self.rows * self.cols
        self._factored = steps == 1 or factored < made

    def make(self, lo: int, hi: int) -> Tensor:
        return torch.bmm(self._b[:, :, lo:hi].mT, self._a)

    def dot(self, vectors: Tensor) -> Tensor:
        a, b = self._flat()
        dots = a.new_empty(len(vectors), len(a))
        for vector, row in zip(vectors, dots, strict=True):
            torch.linalg.vecdot(b @ vector, a, out=row)
        return dots.view(len(vectors), *self._a.shape[:2]).sum(dim=2) if self._a.shape[1] > 1 else dots

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        a, b = self._flat()
        for weight, target in zip(weights, out, strict=True):
            each = weight if self._a.shape[1] == 1 else weight.repeat_interleave(self._a.shape[1])
            target.addmm_((b * each[:, None]).T, a)

    def select(self, rows: Tensor) -> Outer:
        return Outer(self._a[rows], self._b[rows])

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        if not self._factored:
            return super().products(vectors)
        a, b = self._flat()
        gram = (a @ a.T).mul_(b @ b.T)
        if self._a.shape[1] > 1:
            steps = self._a.shape[1]
            gram = gram.view(self.size, steps, self.size, steps).sum(dim=(1, 3))
        return gram, self.dot(vectors)

    def _flat(self) -> tuple[Tensor, Tensor]:
        return self._a.reshape(-1, self.cols), self._b.reshape(-1, self.rows)


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

    def select(self, rows: Tensor) -> Shifted:
        return Shifted(self._form.select(rows), self._start, self.rows)

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return self._form.products(vectors[:, self._start : self._start + self._form.rows])


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

    def select(self, rows: Tensor) -> Total:
        return Total([form.select(rows) for form in self._forms])


class Stacked(Total):
    """Forms of disjoint rows of one parameter: not even the Gram matrix has cross terms."""

    def select(self, rows: Tensor) -> Stacked:
        return Stacked([form.select(rows) for form in self._forms])

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        first, *rest = [form.products(vectors) for form in self._forms]
        return sum((gram for gram, _ in rest), first[0]), sum((dots for _, dots in rest), first[1])


def total(forms: Sequence[Form]) -> Form:
    """One form for all uses of a parameter."""
    return forms[0] if len(forms) == 1 else Total(forms)
