"""Per-example gradients of one parameter, in whatever form they need not all be held at once.

A parameter is seen as a matrix ``[rows, cols]`` whose row-major order is its own. A form can *make*
the gradients of a few rows for all examples, ``[B, few, cols]``; from that alone everything follows,
a chunk of rows at a time. Forms that know better ways override.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain.gradients.memory import chunk_numbers, in_pieces, out_of_memory, scratch
from ordain.gradients.small import FEW_EXAMPLES, FEW_ROWS, add_products, compiled, on_cpu, row_dots

if TYPE_CHECKING:
    from ordain.gradients.hashing import Hashes
    from ordain.gradients.sketch import Sketch

_CACHED = 2**18  # numbers: 1 MB of float32


class Form(ABC):
    """Per-example gradients G_1 .. G_B, each ``[rows, cols]``."""

    size: int
    rows: int
    cols: int
    sparse = False  # does an example touch a few rows only, so that adding them up beats adding the whole?
    made_once = True  # is it less work to make them for products and keep them for sums, than not to?
    keeps = False  # is there room to keep what add_products makes?
    kept: Tensor | None = None  # ``[B, numel]``, once it has made and kept them

    @property
    def numel(self) -> int:
        """How many numbers the parameter has."""
        return self.rows * self.cols

    def view(self, flat: Tensor) -> Tensor:
        """``[k, numel]`` as the ``[k, rows, cols]`` that the other methods take, without a copy."""
        return flat.view(len(flat), self.rows, self.cols)

    @abstractmethod
    def make(self, lo: int, hi: int) -> Tensor:
        """``[B, hi - lo, cols]``: rows lo .. hi of every example's gradient."""

    def _make_once(self, lo: int, hi: int) -> Tensor:
        """The same, good until the next of these is made."""
        return self.make(lo, hi)

    def fill(self, out: Tensor) -> None:
        """All of every example's gradient, into ``[B, numel]``; a chunk of rows at a time."""
        whole = out.view(self.size, self.rows, self.cols)
        for lo, hi in self.chunks():
            whole[:, lo:hi].copy_(self._make_once(lo, hi))

    @abstractmethod
    def dot(self, vectors: Tensor) -> Tensor:
        """``[k, rows, cols]`` to ``[k, B]``: <V_k, G_i>."""

    @abstractmethod
    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """out[k] += sum_i weights[k, i] G_i, for ``[k, B]`` and ``[k, rows, cols]``."""

    def add_signed(self, each: Tensor, scale: float, signed: Tensor, total: Tensor) -> None:
        """Signed[0] += sum_i each_i G_i and total[0] += sum_i scale G_i, for ``[B]`` of +scale or -scale."""
        self.add_weighted(each.unsqueeze(0), signed)
        self.add_weighted(torch.full_like(each, scale).unsqueeze(0), total)

    @abstractmethod
    def select(self, rows: Tensor | slice) -> Form:
        """The gradients of these examples only."""

    def parts(self) -> tuple[Tensor, ...] | None:
        """The tensors ``[B, ...]`` that it is made of, if several batches' one behind another make such a form too."""
        return None

    def paired(self) -> Form | None:
        """The differences G_1 - G_2, G_3 - G_4, ..., for an even B; None where that saves nothing.

        Half as many to make, and a quarter of the Gram matrix.
        """
        return None

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        """Gram += <G_i, G_j> where j >= i (at least) and dots += <V_k, G_i>; a chunk of rows at a time."""
        for lo, hi in self.chunks():
            keeps = self.keeps and hi - lo == self.rows
            made = (self.make(lo, hi) if keeps else self._make_once(lo, hi)).flatten(1)
            add_products(made, vectors[:, lo:hi].flatten(1), gram, dots)
            if keeps:
                self.kept = made

    def add_sketch(self, sketch: Sketch, offset: int, out: Tensor) -> None:
        """out[i] += S G_i, for ``[B, k]`` and the parameter at ``offset`` of the flat gradient."""
        self.add_hashed(sketch.hashes(offset, self.rows, self.cols, out), out)

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        """The same with these hashes; a chunk of rows at a time."""
        for lo, hi in self.chunks():
            hashes.of_rows(lo, hi).add_made(self.make(lo, hi), out)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows small enough to make."""
        step = max(1, chunk_numbers() // (self.size * self.cols))
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

    def select(self, rows: Tensor | slice) -> Made:
        return Made(self._made[rows])

    def parts(self) -> tuple[Tensor, ...]:
        return (self._made,)

    def paired(self) -> Made:
        return Made(self._made[0::2] - self._made[1::2])


class Outer(Form):
    """G_i = sum_t b_it a_it' for layer inputs a ``[B, T, cols]`` and output gradients b ``[B, T, rows]``."""

    biased = False

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self._a, self._b = a, b
        self.size, self._steps, self.cols = a.shape
        self.rows = b.shape[2]
        # Gram of factors: T^2 (rows + cols) a pair of examples. Making: T rows cols an example, and then
        # rows cols a pair. Whichever multiplies less.
        factored = self.size * self._steps**2 * (self.rows + self.cols)
        made = (self.size + self._steps) * self.rows * self.cols
        self.made_once = self._steps > 1 and factored >= made

    def make(self, lo: int, hi: int) -> Tensor:
        return torch.bmm(self._b[:, :, lo:hi].mT, self._a)

    def _make_once(self, lo: int, hi: int) -> Tensor:
        out = scratch(self.size, hi - lo, self.cols, like=self._a)
        return torch.bmm(self._b[:, :, lo:hi].mT, self._a, out=out)

    def fill(self, out: Tensor) -> None:
        weight = out[:, : self.rows * self.cols].view(self.size, self.rows, self.cols)
        if out.dtype is self._a.dtype is self._b.dtype:
            torch.bmm(self._b.mT, self._a, out=weight)
        else:
            weight.copy_(self.make(0, self.rows))

    def dot(self, vectors: Tensor) -> Tensor:
        return self._dot(vectors, [None] * len(vectors))

    def _dot(self, vectors: Tensor, biases: Iterable[Tensor | None]) -> Tensor:
        a, b = self._flat()
        dots = a.new_empty(len(vectors), len(a))
        for vector, bias, row in zip(vectors, biases, dots, strict=True):
            # Multiplying the wider factor first leaves the smaller matrix to go over again.
            if self.rows < self.cols:
                row_dots(torch.nn.functional.linear(a, vector, bias), b, out=row)
            else:
                row_dots(b @ vector, a, out=row)
                if bias is not None:
                    row.addmv_(b, bias)
        return dots if self._steps == 1 else dots.view(len(vectors), self.size, self._steps).sum(dim=2)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        arrays = self._arrays
        if arrays and self.rows <= FEW_ROWS and out.dtype is self._a.dtype:
            from ordain import _products

            for weight, target in zip(weights.numpy(), out.flatten(1).numpy(), strict=True):
                _products.outer_add(*arrays, weight, self.biased, target)
            return
        a, b = self._flat()
        for weight, target in zip(weights, out, strict=True):
            each = weight if self._steps == 1 else weight.repeat_interleave(self._steps)

            def add(lo: int, hi: int, each: Tensor = each, target: Tensor = target) -> None:
                self._add_one(b[lo:hi] * each[lo:hi, None], a[lo:hi], target)

            in_pieces(len(a), add)

    def add_signed(self, each: Tensor, scale: float, signed: Tensor, total: Tensor) -> None:
        if self._steps > 1 or self.size <= FEW_EXAMPLES or not on_cpu(self._a, self._b, signed):
            super().add_signed(each, scale, signed, total)
            return
        try:
            self._add_apart(each, scale, signed.view(-1).numpy(), total.view(-1).numpy())
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            super().add_signed(each, scale, signed, total)

    def _add_apart(self, each: Tensor, scale: float, signed: NDArray[Any], total: NDArray[Any]) -> None:
        """The sums over either sign's examples are half the work each.

        A few rows of them at a time stay in the cache until they are added and subtracted. All room is made before
        anything is added.
        """
        from ordain import _products

        a, b = self._flat()
        sides = [(a[rows], b[rows]) for rows in (torch.nonzero(each > 0)[:, 0], torch.nonzero(each <= 0)[:, 0])]
        biases = [right.sum(dim=0).numpy() for _, right in sides] if self.biased else None
        step = max(1, _CACHED // self.cols)
        made = a.new_empty(2, min(step, self.rows), self.cols)
        for lo in range(0, self.rows, step):
            hi = min(lo + step, self.rows)
            one, other = (
                torch.mm(right[:, lo:hi].T, left, out=room[: hi - lo]).view(-1).numpy()
                for (left, right), room in zip(sides, made, strict=True)
            )
            part = slice(lo * self.cols, hi * self.cols)
            _products.add_apart(one, other, scale, signed[part], total[part])
        if biases is not None:
            part = slice(self.rows * self.cols, self.numel)
            _products.add_apart(biases[0], biases[1], scale, signed[part], total[part])

    def _add_one(self, scaled: Tensor, a: Tensor, target: Tensor) -> None:
        target.addmm_(scaled.T, a)

    def select(self, rows: Tensor | slice) -> Outer:
        return type(self)(self._a[rows], self._b[rows])

    def parts(self) -> tuple[Tensor, ...] | None:
        return (self._a, self._b) if self._steps == 1 else None

    def paired(self) -> Outer | None:
        if self._steps == 1:
            return None
        # The second of a pair is so many steps more, with one factor turned round: the narrower is copied sooner.
        a, b = (part.reshape(self.size // 2, 2 * self._steps, -1) for part in (self._a, self._b))
        turned = torch.ones(2 * self._steps, 1, dtype=b.dtype, device=b.device)
        turned[self._steps :] = -1.0
        return Outer(a, b * turned) if self.rows <= self.cols else Outer(a * turned, b)

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        if self.made_once:
            super().add_products(vectors, gram, dots)
            return
        if self._arrays and gram.dtype is self._a.dtype:
            self._add_compiled(*self._arrays, vectors, gram, dots)
            return
        a, b = self._flat()
        gram += (
            (a @ a.T).add_(1.0 if self.biased else 0.0).mul_(b @ b.T) if self._steps == 1 else self._gram_of_steps(a, b)
        )
        dots += self.dot(vectors)

    def _gram_of_steps(self, a: Tensor, b: Tensor) -> Tensor:
        """All pairs of steps are ``[B T, B T]`` numbers: a few examples' rows of them at a time."""
        each = max(1, chunk_numbers() // (self.size * self._steps**2)) * self._steps
        gram = []
        for lo in range(0, len(a), each):
            pairs = (a[lo : lo + each] @ a.T).mul_(b[lo : lo + each] @ b.T)
            gram.append(pairs.view(-1, self._steps, self.size, self._steps).sum(dim=(1, 3)))
        return torch.cat(gram)

    def _add_compiled(self, a: NDArray[Any], b: NDArray[Any], vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        from ordain import _products

        _products.outer_gram(a, b, 1.0 if self.biased else 0.0, gram.numpy())
        if self.rows > FEW_ROWS:
            dots += self.dot(vectors)
            return
        for vector, row in zip(vectors.flatten(1).numpy(), dots.numpy(), strict=True):
            _products.outer_dot(a, b, vector, self.biased, row)

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        if hashes.convolves(self._steps):
            hashes.add_outer(self._a, self._b, out)
        else:
            super().add_hashed(hashes, out)

    @cached_property
    def _arrays(self) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """The factors of single steps for the compiled loops, if those can take them."""
        if self._steps > 1 or not compiled(self._a, self._b):
            return None
        return tuple(part.numpy() for part in self._flat())  # type: ignore[return-value]

    def small_factors(self, dtype: torch.dtype) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """A ``[B, in]`` and b ``[B, out]`` if they are few and single steps, on the CPU and of this dtype."""
        small = self._steps == 1 and self.rows <= FEW_ROWS and self._a.dtype is self._b.dtype is dtype
        if not small or self._a.device.type != "cpu":
            return None
        # NumPy's views of so few numbers are made in half the time of torch's.
        a, b = np.ascontiguousarray(self._a.numpy()), np.ascontiguousarray(self._b.numpy())
        return a.reshape(-1, self.cols), b.reshape(-1, self.rows)

    def _flat(self) -> tuple[Tensor, Tensor]:
        return self._a.reshape(-1, self.cols).contiguous(), self._b.reshape(-1, self.rows).contiguous()


class Biased(Outer):
    """A linear layer's weight and bias, one behind the other in the flat vector, at T = 1.

    The bias is one more input that is always 1: its part of every product is nearly free.
    """

    biased = True

    @property
    def numel(self) -> int:
        return self.rows * (self.cols + 1)

    def view(self, flat: Tensor) -> Tensor:
        return flat

    def fill(self, out: Tensor) -> None:
        super().fill(out)
        out[:, self.rows * self.cols :].copy_(self._b[:, 0])

    def _split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        weight = flat[:, : self.rows * self.cols].view(len(flat), self.rows, self.cols)
        return weight, flat[:, self.rows * self.cols :]

    def dot(self, vectors: Tensor) -> Tensor:
        weight, bias = self._split(vectors)
        return self._dot(weight, bias)

    def _add_one(self, scaled: Tensor, a: Tensor, target: Tensor) -> None:
        bias = scaled.sum(dim=0)  # before anything is added: see in_pieces
        target[: self.rows * self.cols].view(self.rows, self.cols).addmm_(scaled.T, a)
        target[self.rows * self.cols :].add_(bias)

    def add_sketch(self, sketch: Sketch, offset: int, out: Tensor) -> None:
        super().add_sketch(sketch, offset, out)  # the weight's and the bias's hashes are those they have apart
        Made.flat(self._b[:, 0]).add_sketch(sketch, offset + self.rows * self.cols, out)

    @classmethod
    def join(cls, weight: Form, bias: Form) -> Biased | None:
        """Join a weight's form and its bias's, where that is possible."""
        if type(weight) is Outer and type(bias) is Made and bias._made is weight._b and weight._steps == 1:
            return cls(weight._a, weight._b)
        return None


PLAIN: dict[str, Callable[..., Form]] = {form.__name__: form for form in (Made, Outer, Biased)}
