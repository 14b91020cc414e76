"""Per-example gradients of one parameter, represented so that they need not all be held at once.

A parameter is seen as a matrix ``[rows, cols]`` whose row-major order is its own. Each representation can
*materialise* a few rows for all examples, ``[B, few, cols]``; from that alone everything follows, a chunk of rows at a
time. Subclasses that know better ways override.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ordain.gradients.hashing import Hashes, HashFamily
from ordain.gradients.memory import chunk_numbers, in_pieces, out_of_memory, scratch
from ordain.kernels.dispatch import FEW_EXAMPLES, FEW_ROWS, add_products, compiled, on_cpu, row_dots

_CACHED = 2**18  # numbers: 1 MB of float32


class ParamGrads(ABC):
    """Per-example gradients G_1 .. G_B of one parameter, each ``[rows, cols]``.

    Attributes:
        size: B.
        rows: rows of the parameter as a matrix.
        cols: columns of it.
        kind: what it is called when it is sent to other ranks; None: it is sent materialised.
    """

    size: int
    rows: int
    cols: int
    kind: ClassVar[str | None] = None

    @property
    def numel(self) -> int:
        """How many numbers the parameter has."""
        return self.rows * self.cols

    def view(self, flat: Tensor) -> Tensor:
        """``[k, numel]`` as the ``[k, rows, cols]`` that the other methods take, without a copy."""
        return flat.view(len(flat), self.rows, self.cols)

    @abstractmethod
    def materialize(self, lo: int, hi: int) -> Tensor:
        """``[B, hi - lo, cols]``: rows lo .. hi of every example's gradient."""

    def _in_scratch(self, lo: int, hi: int) -> Tensor:
        """The same, valid until the next call."""
        return self.materialize(lo, hi)

    def fill(self, out: Tensor) -> None:
        """All of every example's gradient, into ``[B, numel]``; a chunk of rows at a time."""
        whole = out.view(self.size, self.rows, self.cols)
        for lo, hi in self.chunks():
            whole[:, lo:hi].copy_(self._in_scratch(lo, hi))

    @abstractmethod
    def dot(self, vectors: Tensor) -> Tensor:
        """``[k, rows, cols]`` to ``[k, B]``: <V_k, G_i>."""

    @abstractmethod
    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """out[k] += sum_i weights[k, i] G_i, for ``[k, B]`` and ``[k, rows, cols]``."""

    def add_signed(self, each: Tensor, scale: float, signed: Tensor, total: Tensor) -> None:
        """signed[0] += sum_i each_i G_i and total[0] += sum_i scale G_i, for ``[B]`` of +scale or -scale."""
        self.add_weighted(each.unsqueeze(0), signed)
        self.add_weighted(torch.full_like(each, scale).unsqueeze(0), total)

    @abstractmethod
    def select(self, rows: Tensor) -> ParamGrads:
        """The gradients of these examples only."""

    def paired(self) -> ParamGrads | None:
        """The differences G_1 - G_2, G_3 - G_4, ..., for an even B; None where that saves nothing.

        Half as many to materialise, and a quarter of the Gram matrix.
        """
        return None

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        """Add <G_i, G_j> to gram where j >= i (at least) and <V_k, G_i> to dots; a chunk of rows at a time."""
        for lo, hi in self.chunks():
            add_products(self._in_scratch(lo, hi).flatten(1), vectors[:, lo:hi].flatten(1), gram, dots)

    def add_sketch(self, family: HashFamily, offset: int, out: Tensor) -> None:
        """out[i] += S G_i, for ``[B, k]`` and the parameter at ``offset`` of the flat gradient."""
        self.add_hashed(family.hashes(offset, self.rows, self.cols, out), out)

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        """The same with these hashes; a chunk of rows at a time."""
        for lo, hi in self.chunks():
            hashes.of_rows(lo, hi).add_materialized(self.materialize(lo, hi), out)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows small enough to materialise."""
        step = max(1, chunk_numbers() // (self.size * self.cols))
        for lo in range(0, self.rows, step):
            yield lo, min(lo + step, self.rows)

    def linear_layer(self, dtype: torch.dtype) -> tuple[NDArray[Any], NDArray[Any], bool] | None:
        """Inputs ``[B, in]``, output gradients ``[B, out]`` and whether the bias is there too.

        None unless this is a small linear layer seen once by each example, on the CPU and of this dtype.
        """
        return None

    def with_bias(self, bias: ParamGrads) -> ParamGrads | None:
        """This weight's gradients joined with those of the bias right after it; None where that saves nothing."""
        return None

    # --- taking apart and putting together, for ranks that exchange gradients ---------------------

    def apart(self) -> list[tuple[int, ParamGrads]]:
        """(offset, gradients) of each parameter, where this stands for several."""
        return [(0, self)]

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors it consists of; the gradients are linear in the last one."""
        return (self.materialize(0, self.rows),)

    def parts(self) -> tuple[ParamGrads, ...]:
        """What it is composed of, instead of tensors."""
        return ()

    def settings(self) -> dict[str, Any]:
        """What :meth:`build` needs besides tensors and parts: numbers and strings."""
        return {}

    @classmethod
    def build(cls, tensors: Sequence[Tensor], parts: Sequence[ParamGrads], **settings: Any) -> ParamGrads:
        """From what :meth:`tensors`, :meth:`parts` and :meth:`settings` reflipped."""
        return cls(*tensors, *parts, **settings)

    def scaled(self, ratio: float) -> ParamGrads:
        """The gradients times a number."""
        tensors = self.tensors() if not self.parts() else ()
        if tensors:
            last = tensors[-1] * ratio if ratio else torch.zeros_like(tensors[-1])  # not NaN where it is not finite
            tensors = (*tensors[:-1], last)
        kind = type(self) if self.kind else Materialized
        return kind.build(tensors, [part.scaled(ratio) for part in self.parts()], **self.settings())

    def zeros(self, size: int) -> ParamGrads:
        """Gradients of this kind that are zero, for ``size`` examples."""
        device = self.materialize(0, 1).device
        return self.select(torch.zeros(size, dtype=torch.int64, device=device)).scaled(0.0)

    @classmethod
    def laid(cls, several: Sequence[ParamGrads], places: Sequence[Tensor]) -> ParamGrads | None:
        """One of several of this kind: example i of the r-th is example ``places[r][i]`` of the whole.

        None where they do not fit together.
        """
        if len({str(one.settings()) for one in several}) > 1:
            return None
        columns = list(zip(*(one.tensors() for one in several), strict=True))
        if any(len({tensor.shape[1:] for tensor in column}) > 1 for column in columns):
            return None
        return cls.build([lay_rows(column, places) for column in columns], (), **several[0].settings())


def lay_rows(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """``[B_r, ...]`` each into one ``[B, ...]``, every row in its place."""
    whole = tensors[0].new_empty(sum(len(place) for place in places), *tensors[0].shape[1:])
    for tensor, place in zip(tensors, places, strict=True):
        whole[place] = tensor.to(whole.dtype)
    return whole


class Materialized(ParamGrads):
    """Gradients that are held as they are, ``[B, rows, cols]``: biases, norms, and what the fallback computes."""

    kind = "materialized"

    def __init__(self, grads: Tensor) -> None:
        self._grads = grads
        self.size, self.rows, self.cols = grads.shape

    @classmethod
    def flat(cls, grads: Tensor) -> Materialized:
        """From ``[B, *shape]``, as one row."""
        return cls(grads.reshape(grads.shape[0], 1, -1))

    def materialize(self, lo: int, hi: int) -> Tensor:
        return self._grads[:, lo:hi]

    def dot(self, vectors: Tensor) -> Tensor:
        return vectors.flatten(1) @ self._grads.flatten(1).T

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        out.view(len(weights), -1).addmm_(weights, self._grads.flatten(1))

    def select(self, rows: Tensor) -> Materialized:
        return Materialized(self._grads[rows])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._grads,)

    def paired(self) -> Materialized:
        return Materialized(self._grads[0::2] - self._grads[1::2])


class OuterProduct(ParamGrads):
    """G_i = sum_t b_it a_it' for layer inputs a ``[B, T, cols]`` and output gradients b ``[B, T, rows]``."""

    kind = "outer"
    biased = False

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self._a, self._b = a, b
        self.size, self.steps, self.cols = a.shape
        self.rows = b.shape[2]
        # Gram of factors: T^2 (rows + cols) a pair of examples. Materialising: T rows cols an example, and then
        # rows cols a pair. Whichever multiplies less.
        factored = self.size * self.steps**2 * (self.rows + self.cols)
        materialized = (self.size + self.steps) * self.rows * self.cols
        self._materializes = self.steps > 1 and factored >= materialized

    def materialize(self, lo: int, hi: int) -> Tensor:
        return torch.bmm(self._b[:, :, lo:hi].mT, self._a)

    def _in_scratch(self, lo: int, hi: int) -> Tensor:
        out = scratch(self.size, hi - lo, self.cols, like=self._a)
        return torch.bmm(self._b[:, :, lo:hi].mT, self._a, out=out)

    def fill(self, out: Tensor) -> None:
        weight = out[:, : self.rows * self.cols].view(self.size, self.rows, self.cols)
        if out.dtype is self._a.dtype is self._b.dtype:
            torch.bmm(self._b.mT, self._a, out=weight)
        else:
            weight.copy_(self.materialize(0, self.rows))

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
        return dots if self.steps == 1 else dots.view(len(vectors), self.size, self.steps).sum(dim=2)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        arrays = self._arrays
        if arrays and self.rows <= FEW_ROWS and out.dtype is self._a.dtype:
            from ordain.kernels import products

            for weight, target in zip(weights.numpy(), out.flatten(1).numpy(), strict=True):
                products.outer_add(*arrays, weight, self.biased, target)
            return
        a, b = self._flat()
        for weight, target in zip(weights, out, strict=True):
            each = weight if self.steps == 1 else weight.repeat_interleave(self.steps)

            def add(lo: int, hi: int, each: Tensor = each, target: Tensor = target) -> None:
                self._add_one(b[lo:hi] * each[lo:hi, None], a[lo:hi], target)

            in_pieces(len(a), add)

    def add_signed(self, each: Tensor, scale: float, signed: Tensor, total: Tensor) -> None:
        if self.steps > 1 or self.size <= FEW_EXAMPLES or not on_cpu(self._a, self._b, signed):
            super().add_signed(each, scale, signed, total)
            return
        try:
            self._add_apart(each, scale, signed.view(-1).numpy(), total.view(-1).numpy())
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            super().add_signed(each, scale, signed, total)

    def _add_apart(self, each: Tensor, scale: float, signed: NDArray[Any], total: NDArray[Any]) -> None:
        """Sum over either sign's examples, which is half the work each.

        A few rows of the sums at a time stay in the cache until they are added and subtracted. All memory is
        allocated before anything is added.
        """
        from ordain.kernels import products

        a, b = self._flat()
        sides = [(a[rows], b[rows]) for rows in (torch.nonzero(each > 0)[:, 0], torch.nonzero(each <= 0)[:, 0])]
        biases = [right.sum(dim=0).numpy() for _, right in sides] if self.biased else None
        step = max(1, _CACHED // self.cols)
        buffers = a.new_empty(2, min(step, self.rows), self.cols)
        for lo in range(0, self.rows, step):
            hi = min(lo + step, self.rows)
            one, other = (
                torch.mm(right[:, lo:hi].T, left, out=buffer[: hi - lo]).view(-1).numpy()
                for (left, right), buffer in zip(sides, buffers, strict=True)
            )
            part = slice(lo * self.cols, hi * self.cols)
            products.add_apart(one, other, scale, signed[part], total[part])
        if biases is not None:
            part = slice(self.rows * self.cols, self.numel)
            products.add_apart(biases[0], biases[1], scale, signed[part], total[part])

    def _add_one(self, scaled: Tensor, a: Tensor, target: Tensor) -> None:
        target.addmm_(scaled.T, a)

    def with_bias(self, bias: ParamGrads) -> ParamGrads | None:
        if self.steps > 1 or self.biased or bias.kind != "materialized" or bias.tensors()[0] is not self._b:
            return None
        return WithBias(self._a, self._b)

    def select(self, rows: Tensor) -> OuterProduct:
        return type(self)(self._a[rows], self._b[rows])

    def tensors(self) -> tuple[Tensor, ...]:
        return self._a, self._b

    @classmethod
    def laid(cls, several: Sequence[ParamGrads], places: Sequence[Tensor]) -> ParamGrads | None:
        factors = [one.tensors() for one in several]
        steps = max(a.shape[1] for a, _ in factors)
        # Steps of zeros behind add nothing.
        long = [[pad(x, (0, 0, 0, steps - x.shape[1])) for x in one] for one in factors]
        return cls(*(lay_rows(column, places) for column in zip(*long, strict=True)))

    def paired(self) -> OuterProduct | None:
        if self.steps == 1:
            return None
        # The second of a pair is as many steps more, with the sign of one factor flipped: the narrower one.
        a, b = (part.reshape(self.size // 2, 2 * self.steps, -1) for part in (self._a, self._b))
        flipped = torch.ones(2 * self.steps, 1, dtype=b.dtype, device=b.device)
        flipped[self.steps :] = -1.0
        return OuterProduct(a, b * flipped) if self.rows <= self.cols else OuterProduct(a * flipped, b)

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        if self._materializes:
            super().add_products(vectors, gram, dots)
            return
        if self._arrays and gram.dtype is self._a.dtype:
            self._add_compiled(*self._arrays, vectors, gram, dots)
            return
        a, b = self._flat()
        gram += (
            (a @ a.T).add_(1.0 if self.biased else 0.0).mul_(b @ b.T) if self.steps == 1 else self._gram_of_steps(a, b)
        )
        dots += self.dot(vectors)

    def _gram_of_steps(self, a: Tensor, b: Tensor) -> Tensor:
        """All pairs of steps are ``[B T, B T]`` numbers: a few examples' rows of them at a time."""
        each = max(1, chunk_numbers() // (self.size * self.steps**2)) * self.steps
        gram = []
        for lo in range(0, len(a), each):
            pairs = (a[lo : lo + each] @ a.T).mul_(b[lo : lo + each] @ b.T)
            gram.append(pairs.view(-1, self.steps, self.size, self.steps).sum(dim=(1, 3)))
        return torch.cat(gram)

    def _add_compiled(self, a: NDArray[Any], b: NDArray[Any], vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        from ordain.kernels import products

        products.outer_gram(a, b, 1.0 if self.biased else 0.0, gram.numpy())
        if self.rows > FEW_ROWS:
            dots += self.dot(vectors)
            return
        for vector, row in zip(vectors.flatten(1).numpy(), dots.numpy(), strict=True):
            products.outer_dot(a, b, vector, self.biased, row)

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        if hashes.convolves(self.steps):
            hashes.add_outer(self._a, self._b, out)
        else:
            super().add_hashed(hashes, out)

    @cached_property
    def _arrays(self) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """The factors of single steps for the compiled loops, if those can take them."""
        if self.steps > 1 or not compiled(self._a, self._b):
            return None
        return tuple(part.numpy() for part in self._flat())  # type: ignore[return-value]

    def linear_layer(self, dtype: torch.dtype) -> tuple[NDArray[Any], NDArray[Any], bool] | None:
        small = self.steps == 1 and self.rows <= FEW_ROWS and self._a.dtype is self._b.dtype is dtype
        if not small or self._a.device.type != "cpu":
            return None
        # NumPy's views of so few numbers take half the time of torch's.
        a, b = np.ascontiguousarray(self._a.numpy()), np.ascontiguousarray(self._b.numpy())
        return a.reshape(-1, self.cols), b.reshape(-1, self.rows), self.biased

    def _flat(self) -> tuple[Tensor, Tensor]:
        return self._a.reshape(-1, self.cols).contiguous(), self._b.reshape(-1, self.rows).contiguous()


class WithBias(OuterProduct):
    """A linear layer's weight and the bias right after it in the flat vector, at T = 1.

    The bias is one more input that is always 1: its part of every product is nearly free.
    """

    kind = "with bias"
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

    def add_sketch(self, family: HashFamily, offset: int, out: Tensor) -> None:
        for place, grads in self.apart():
            grads.add_sketch(family, offset + place, out)  # with the hashes that they have apart

    def apart(self) -> list[tuple[int, ParamGrads]]:
        return [(0, OuterProduct(self._a, self._b)), (self.rows * self.cols, Materialized(self._b))]
