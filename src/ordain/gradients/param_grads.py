"""Per-example gradients of one parameter, represented so that they need not all be held at once.

A parameter is seen as a matrix ``[rows, cols]`` whose row-major order is its own, and vectors in its space come flat,
``[k, numel]``. Each representation can *materialise* a few rows for all examples, ``[B, few, cols]``; from that alone
everything follows, a chunk of rows at a time. Subclasses that know better ways override.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain.gradients.hashing import Hashes
from ordain.gradients.memory import chunk_numbers, in_pieces, out_of_memory, scratch

_CACHED = 2**18  # numbers: 1 MB of float32
_SMALL_ROWS = 32  # a linear layer with so few outputs can be balanced in one compiled pass


class ParamGrads(ABC):
    """Per-example gradients G_1 .. G_B of one parameter, each ``[rows, cols]``.

    Attributes:
        size: B.
        rows: rows of the parameter as a matrix.
        cols: columns of it.
        numel: how many numbers the parameter has.
        kind: what it is called when it is sent to other ranks; None: it is sent materialised.

    A kind that has a name tells what it is constructed from: tensors, the gradients linear in the last one, or other
    gradients as parts; and settings, which are numbers and strings by keyword.
    """

    kind: ClassVar[str | None] = None

    def __init__(
        self,
        size: int,
        rows: int,
        cols: int,
        *,
        more: int = 0,
        tensors: tuple[Tensor, ...] = (),
        parts: tuple[ParamGrads, ...] = (),
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.size, self.rows, self.cols = size, rows, cols
        self.numel = rows * cols + more
        self._tensors, self._parts, self._settings = tensors, parts, settings or {}

    @abstractmethod
    def materialize(self, lo: int, hi: int) -> Tensor:
        """``[B, hi - lo, cols]``: rows lo .. hi of every example's gradient."""

    def in_scratch(self, lo: int, hi: int) -> Tensor:
        """The same in a buffer that is reused: valid until the next call."""
        return self.materialize(lo, hi)

    def dot(self, vectors: Tensor) -> Tensor:
        """``[k, numel]`` to ``[k, B]``: <V_k, G_i>."""
        dots = vectors.new_zeros(len(vectors), self.size)
        for lo, hi in self.chunks():
            dots.addmm_(vectors[:, lo * self.cols : hi * self.cols], self.in_scratch(lo, hi).flatten(1).T)
        return dots

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """out[k] += sum_i weights[k, i] G_i, for ``[k, B]`` and ``[k, numel]``."""
        for lo, hi in self.chunks():
            out[:, lo * self.cols : hi * self.cols].addmm_(weights, self.in_scratch(lo, hi).flatten(1))

    def select(self, rows: Tensor) -> ParamGrads:
        """The gradients of these examples only."""
        return self._rebuilt([tensor[rows] for tensor in self.tensors()], [part.select(rows) for part in self._parts])

    def fill(self, out: Tensor) -> None:
        """Write every example's gradient to ``[B, numel]``; a chunk of rows at a time."""
        whole = out.view(self.size, self.rows, self.cols)
        for lo, hi in self.chunks():
            whole[:, lo:hi].copy_(self.in_scratch(lo, hi))

    def add_signed(self, each: Tensor, scale: float, out: Tensor) -> None:
        """out[0] += sum_i each_i G_i and out[1] += sum_i scale G_i, for ``[B]`` of +scale or -scale."""
        self.add_weighted(torch.stack([each, torch.full_like(each, scale)]), out)

    def paired(self) -> ParamGrads | None:
        """The differences G_1 - G_2, G_3 - G_4, ..., for an even B; None where that saves nothing.

        Half as many to materialise, and a quarter of the Gram matrix.
        """
        return None

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        """Add <G_i, G_j> to gram where j >= i (at least) and <V_k, G_i> to dots; a chunk of rows at a time."""
        for lo, hi in self.chunks():
            grads = self.in_scratch(lo, hi).flatten(1)
            gram.addmm_(grads, grads.T)
            dots.addmm_(vectors[:, lo * self.cols : hi * self.cols], grads.T)

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        """out[i] += S G_i, for ``[B, k]`` and the parameter's hashes; a chunk of rows at a time."""
        for lo, hi in self.chunks():
            hashes.of_rows(lo, hi).add_materialized(self.materialize(lo, hi), out)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows small enough to materialise."""
        step = max(1, chunk_numbers() // max(1, self.size * self.cols))
        for lo in range(0, self.rows, step):
            yield lo, min(lo + step, self.rows)

    def linear_layer(self, dtype: torch.dtype) -> tuple[NDArray[Any], NDArray[Any], bool] | None:
        """Inputs ``[B, in]``, output gradients ``[B, out]`` and whether the bias is there too.

        None unless this is a small linear layer seen once by each example, on the CPU and of this dtype.
        """
        return None

    # --- taking apart and putting together, for ranks that exchange gradients ---------------------

    def apart(self) -> list[ParamGrads]:
        """The gradients of each parameter, where this stands for several that lie one after the other."""
        return [self]

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors it consists of, unless it consists of parts; a kind without a name is materialised."""
        return self._tensors if self._tensors or self._parts else (self.materialize(0, self.rows),)

    def parts(self) -> tuple[ParamGrads, ...]:
        """The gradients it is composed of, instead of tensors."""
        return self._parts

    def settings(self) -> dict[str, Any]:
        """What :meth:`build` needs besides."""
        return self._settings

    @classmethod
    def build(cls, tensors: Sequence[Tensor], parts: Sequence[ParamGrads], **settings: Any) -> ParamGrads:
        """From what :meth:`tensors`, :meth:`parts` and :meth:`settings` returned."""
        make: Any = cls
        return make(*tensors, *parts, **settings)  # type: ignore[no-any-return]

    def _rebuilt(self, tensors: Sequence[Tensor], parts: Sequence[ParamGrads] = ()) -> ParamGrads:
        """The same of other tensors and parts."""
        return (type(self) if self.kind else Materialized).build(tensors, parts, **self._settings)

    def scaled(self, ratio: float) -> ParamGrads:
        """The gradients times a number."""
        tensors = list(self.tensors())
        if tensors:  # 0 makes zeros of what is not finite, too
            tensors[-1] = tensors[-1] * ratio if ratio else torch.zeros_like(tensors[-1])
        return self._rebuilt(tensors, [part.scaled(ratio) for part in self._parts])

    def double(self) -> ParamGrads:
        """The gradients in float64."""
        wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in self.tensors()]
        return self._rebuilt(wide, [part.double() for part in self._parts])

    def zeros(self, size: int) -> ParamGrads:
        """Gradients of this kind that are zero, for ``size`` examples."""
        device = self.materialize(0, 1).device
        return self.select(torch.zeros(size, dtype=torch.int64, device=device)).scaled(0.0)

    @classmethod
    def laid(cls, several: Sequence[ParamGrads], places: Sequence[Tensor]) -> ParamGrads | None:
        """One of several of this kind: example i of the r-th is example ``places[r][i]`` of the whole.

        None where they do not fit together. Shorter tensors ``[B, T, ...]`` get steps of zeros, which add nothing.
        """
        alike = len({str(one.settings()) for one in several}) == 1
        columns = list(zip(*(one.tensors() for one in several), strict=True))
        if not alike or any(len({tensor.shape[2:] for tensor in column}) > 1 for column in columns):
            return None
        return cls.build([lay_rows(column, places) for column in columns], (), **several[0].settings())


def lay_rows(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """``[B_r, T_r, ...]`` each into one ``[B, T, ...]``, every row in its place, with zeros behind it."""
    steps = max(tensor.shape[1] for tensor in tensors)
    whole = tensors[0].new_zeros(sum(len(place) for place in places), steps, *tensors[0].shape[2:])
    for tensor, place in zip(tensors, places, strict=True):
        whole[place, : tensor.shape[1]] = tensor.to(whole.dtype)
    return whole


def pair_factors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors ``[B, T, ...]`` of sum_t b_t a_t' to ``[B / 2, 2 T, ...]`` of the differences of consecutive pairs.

    b a' - c d' = (b - c) a' + c (a - d)': what a pair has in common is subtracted before it is multiplied, not after.
    """
    (first_a, second_a), (first_b, second_b) = ((part[0::2], part[1::2]) for part in (a, b))
    return torch.cat([first_a, first_a - second_a], dim=1), torch.cat([first_b - second_b, second_b], dim=1)


class Materialized(ParamGrads):
    """Gradients that are held as they are, ``[B, rows, cols]``: biases, norms, and what the graph gives."""

    kind = "materialized"

    def __init__(self, grads: Tensor) -> None:
        super().__init__(*grads.shape, tensors=(grads,))
        self._grads = grads

    @classmethod
    def of(cls, grads: Tensor) -> Materialized:
        """From ``[B, *shape]``: with the rows that a sketch hashes the parameter by, however its gradient is found."""
        return cls(grads.reshape(grads.shape[0], grads.shape[1] if grads.ndim > 2 else 1, -1))

    def materialize(self, lo: int, hi: int) -> Tensor:
        return self._grads[:, lo:hi]

    def paired(self) -> Materialized:
        return Materialized(self._grads[0::2] - self._grads[1::2])


class OuterProduct(ParamGrads):
    """G_i = sum_t b_it a_it' for layer inputs a ``[B, T, cols]`` and output gradients b ``[B, T, rows]``."""

    kind = "outer"
    biased = False

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__(a.shape[0], b.shape[2], a.shape[2], more=b.shape[2] if self.biased else 0, tensors=(a, b))
        self._a, self._b, self._steps = a, b, a.shape[1]

    def materialize(self, lo: int, hi: int) -> Tensor:
        return torch.bmm(self._b[:, :, lo:hi].mT, self._a)

    def fill(self, out: Tensor) -> None:
        if self._steps == 1:
            torch.mul(self._b.mT, self._a, out=out.view(self.size, self.rows, self.cols))
        else:
            super().fill(out)

    def in_scratch(self, lo: int, hi: int) -> Tensor:
        out = scratch(self.size, hi - lo, self.cols, like=self._a)
        return torch.bmm(self._b[:, :, lo:hi].mT, self._a, out=out)

    def dot(self, vectors: Tensor) -> Tensor:
        a, b = self._flat()
        weights = self.rows * self.cols
        dots = a.new_empty(len(vectors), len(a))
        for vector, row in zip(vectors, dots, strict=True):
            matrix = vector[:weights].view(self.rows, self.cols)
            # Multiplying the wider factor first leaves the smaller matrix to go over again.
            if self.rows < self.cols:
                torch.linalg.vecdot(a @ matrix.T, b, out=row)
            else:
                torch.linalg.vecdot(b @ matrix, a, out=row)
            if self.biased:
                row.addmv_(b, vector[weights:])
        return dots if self._steps == 1 else dots.view(len(vectors), self.size, self._steps).sum(dim=2)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        a, b = self._flat()
        for weight, target in zip(weights, out, strict=True):
            each = weight if self._steps == 1 else weight.repeat_interleave(self._steps)

            def add(lo: int, hi: int, each: Tensor = each, target: Tensor = target) -> None:
                scaled = b[lo:hi] * each[lo:hi, None]
                bias = scaled.sum(dim=0) if self.biased else None  # before anything is added: see in_pieces
                target[: self.rows * self.cols].view(self.rows, self.cols).addmm_(scaled.T, a[lo:hi])
                if bias is not None:
                    target[self.rows * self.cols :].add_(bias)

            in_pieces(len(a), add)

    def add_signed(self, each: Tensor, scale: float, out: Tensor) -> None:
        # The sums over either sign's examples are half the work each. A few rows of them at a time stay in the cache
        # until they are added and subtracted. All memory is allocated before anything is added. Elsewhere than on the
        # CPU the host would have to wait for the signs.
        if each.device.type != "cpu":
            super().add_signed(each, scale, out)
            return
        try:
            sides = torch.nonzero(each > 0)[:, 0], torch.nonzero(each <= 0)[:, 0]
            halves = [(self._a[rows].reshape(-1, self.cols), self._b[rows].reshape(-1, self.rows)) for rows in sides]
            biases = [b.sum(dim=0) for _, b in halves]
            step = min(max(1, self.rows), max(1, _CACHED // max(1, self.cols)))
            buffers = scratch(3, step * self.cols, like=self._a, name="sums")
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            super().add_signed(each, scale, out)
            return
        for lo in range(0, self.rows, step):
            hi = min(lo + step, self.rows)
            plus, minus, signed = buffers[:, : (hi - lo) * self.cols]
            for (a, b), into in zip(halves, (plus, minus), strict=True):
                torch.mm(b[:, lo:hi].T, a, out=into.view(hi - lo, self.cols))
            torch.sub(plus, minus, out=signed)
            part = out[:, lo * self.cols : hi * self.cols]
            part[0].add_(signed, alpha=scale)
            part[1].add_(plus.add_(minus), alpha=scale)
        if self.biased:
            part = out[:, self.rows * self.cols :]
            part[0].add_(biases[0], alpha=scale).sub_(biases[1], alpha=scale)
            part[1].add_(biases[0], alpha=scale).add_(biases[1], alpha=scale)

    def paired(self) -> OuterProduct:
        return OuterProduct(*pair_factors(self._a, self._b))

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        # Gram of factors: T^2 (rows + cols) a pair of examples. Materialising: T rows cols an example, and then
        # rows cols a pair. Whichever multiplies less.
        factored = self.size * self._steps**2 * (self.rows + self.cols)
        if self._steps > 1 and factored >= (self.size + self._steps) * self.rows * self.cols:
            super().add_products(vectors, gram, dots)
            return
        a, b = self._flat()
        if self._steps == 1:
            gram.addcmul_((a @ a.T).add_(1.0 if self.biased else 0.0), b @ b.T)
        else:  # all pairs of steps are [B T, B T] numbers: a few examples' rows of them at a time
            few = max(1, chunk_numbers() // max(1, self.size * self._steps**2))
            for lo in range(0, self.size, few):
                hi = min(lo + few, self.size)
                rows = slice(lo * self._steps, hi * self._steps)
                pairs = (a[rows] @ a.T).mul_(b[rows] @ b.T)
                gram[lo:hi] += pairs.view(hi - lo, self._steps, self.size, self._steps).sum(dim=(1, 3))
        dots += self.dot(vectors)

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        if hashes.convolves(self._steps):
            hashes.add_outer(self._a, self._b, out)
        else:
            super().add_hashed(hashes, out)

    def linear_layer(self, dtype: torch.dtype) -> tuple[NDArray[Any], NDArray[Any], bool] | None:
        small = self._steps == 1 and self.rows <= _SMALL_ROWS and self._a.dtype is self._b.dtype is dtype
        if not small or self._a.device.type != "cpu":
            return None
        # NumPy's views of so few numbers take half the time of torch's.
        a, b = np.ascontiguousarray(self._a.numpy()), np.ascontiguousarray(self._b.numpy())
        return a.reshape(-1, self.cols), b.reshape(-1, self.rows), self.biased

    def _flat(self) -> tuple[Tensor, Tensor]:
        """``[B T, cols]`` and ``[B T, rows]``."""
        return self._a.reshape(-1, self.cols), self._b.reshape(-1, self.rows)


class WithBias(OuterProduct):
    """A linear layer's weight and the bias right after it in the flat vector, at T = 1.

    The bias is one more input that is always 1: its part of every product is nearly free.
    """

    kind = "with bias"
    biased = True

    def paired(self) -> OuterProduct:
        return _PairsWithBias(*pair_factors(self._a, self._b))

    def apart(self) -> list[ParamGrads]:
        return [OuterProduct(self._a, self._b), Materialized(self._b)]


class _PairsWithBias(OuterProduct):
    """The differences of pairs of a linear layer's gradients: those of the bias are the first of the factors b."""

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        super().add_products(vectors, gram, dots)
        bias = self._b[:, 0]
        gram.addmm_(bias, bias.T)
        dots.addmm_(vectors[:, self.numel :], bias.T)
