"""The interfaces of a batch of per-example gradients, and of a source of such batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain.gradients.hashing import HashFamily
from ordain.gradients.memory import chunk_numbers
from ordain.gradients.param_grads import Materialized, ParamGrads


class Gradients(ABC):
    """Per-example gradients g_1 .. g_B in R^d, which need not be held as ``[B, d]``.

    A custom class needs the four attributes and the three abstract methods; everything else follows from them.

    Attributes:
        size: B, the number of examples.
        dim: d, the length of one gradient.
        dtype: the dtype of the results, float32 or float64.
        device: the device of the results.
    """

    size: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, B]`` of <g_i, g_j>, right only where j >= i; and ``[k, d]`` to ``[k, B]`` of <v_k, g_i>."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``[k, B]`` to ``[k, d]``: sum_i w_ki g_i, added to ``out`` in place if that is given."""

    @abstractmethod
    def select(self, rows: Tensor) -> Gradients:
        """The gradients of these examples only."""

    def gram(self) -> Tensor:
        """``[B, B]``: <g_i, g_j>."""
        gram, _ = self.products(torch.zeros(0, self.dim, dtype=self.dtype, device=self.device))
        return gram.triu() + gram.triu(1).T

    def dot(self, vectors: Tensor) -> Tensor:
        """``[k, d]`` to ``[k, B]``: <v_k, g_i>."""
        return self.products(vectors)[1]

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`products` of the differences g_1 - g_2, g_3 - g_4, ..., for an even B."""
        return differences(*self.products(vectors))

    def add_signed(self, signs: Tensor, out: Tensor) -> None:
        """Add sum_i e_i g_i to out[0] and, if there is one, sum_i g_i to out[1], for ``[B]`` of +1.0 and -1.0."""
        self.weighted_sum(torch.stack([signs, torch.ones_like(signs)])[: len(out)], out=out)

    def rows(self, out: Tensor | None = None) -> Tensor:
        """``[B, d]``, written to ``out`` if that is given."""
        if out is None:
            out = torch.empty(self.size, self.dim, dtype=self.dtype, device=self.device)
        return out.copy_(self.weighted_sum(torch.eye(self.size, dtype=self.dtype, device=self.device)))

    def add_sketch(self, family: HashFamily, out: Tensor) -> None:
        """Add the sketches ``[B, k]`` of the gradients to ``out``; a few examples are materialised at a time."""
        hashes = family.hashes(0, 1, self.dim, out)
        step = max(1, chunk_numbers() // max(1, self.dim))
        for lo in range(0, self.size, step):
            hi = min(lo + step, self.size)
            one = torch.zeros(hi - lo, self.size, dtype=out.dtype, device=out.device)
            one[:, lo:hi].fill_diagonal_(1.0)
            hashes.add_materialized(self.weighted_sum(one).unsqueeze(1), out[lo:hi])

    def by_parameter(self) -> tuple[list[tuple[int, ParamGrads]], float]:
        """(offset, gradients) of each parameter, and what they are to be multiplied by: for sending to other ranks."""
        return [(0, Materialized(self.rows().unsqueeze(1)))], 1.0

    def double(self) -> Gradients | None:
        """The same gradients in float64, for products that cancel in float32; None if not available."""
        return None

    def one_row(self) -> Sequence[Tensor] | None:
        """The parts of the one gradient, flat and one after the other; None unless B is 1 and it is held like that."""
        return None

    def linear_layer(self) -> tuple[NDArray[Any], NDArray[Any], bool, float] | None:
        """Inputs ``[B, in]``, output gradients ``[B, out]``, biased, scale; None unless that is one small layer."""
        return None


def differences(gram: Tensor, dots: Tensor) -> tuple[Tensor, Tensor]:
    """From products of g_1, g_2, ... to those of g_1 - g_2, g_3 - g_4, ...; right where j >= i, as gram is."""
    gram = gram.triu() + gram.triu(1).T
    rows = gram[0::2] - gram[1::2]
    return rows[:, 0::2] - rows[:, 1::2], dots[:, 0::2] - dots[:, 1::2]


class Collected(NamedTuple):
    """A batch of gradients, and how many of the loader's examples it covers.

    Attributes:
        gradients: one row for each example; or, from a source with ``whole_units``, one row for each unit.
        examples: the number of examples.
    """

    gradients: Gradients
    examples: int


class Source(Protocol):
    """Watches a model and returns the per-example gradients of its backward passes.

    Attributes:
        dim: the length of one gradient; None if it is not known before the first batch.
        parameters: names and shapes of the parameters, which must match those of a saved state; empty if not known.
        like: an empty tensor with the dtype and device of the gradients.
        whole_units: whether each row is the gradient of a whole unit (a micro-batch) and not of one example.
        name: its name in a saved state: sketches of different sources must not be mixed.
    """

    parameters: list[str]
    like: Tensor
    whole_units: bool
    name: str

    @property
    def dim(self) -> int | None: ...

    def attach(self) -> None:
        """Start watching the model."""

    def collect(self) -> list[Collected]:
        """One batch for each forward pass that a backward has reached since the last call."""

    def drop(self, size: int | None = None) -> bool:
        """Discard what waits to be collected: all of it, or the last forward's if it had ``size`` examples.

        Returns whether anything still waits.
        """

    def detach(self) -> None:
        """Remove all hooks from the model; :meth:`attach` watches it again."""
