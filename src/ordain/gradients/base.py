"""What a batch of gradients, and whatever produces such batches, must offer."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Gradients(Protocol):
    """Per-example gradients g_1 .. g_B in R^d."""

    @property
    def size(self) -> int:
        """B, the number of examples."""

    @property
    def dim(self) -> int:
        """d, the length of one gradient."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the answers: float32 or float64."""

    @property
    def device(self) -> torch.device:
        """Where the answers live."""

    def gram(self) -> Tensor:
        """``[B, B]``: <g_i, g_j>."""

    def dot(self, vectors: Tensor) -> Tensor:
        """``[k, d]`` to ``[k, B]``: <v_k, g_i>."""

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`gram`, right only where j >= i, and :meth:`dot`: what must be made for both is made once."""

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`products` of the differences g_1 - g_2, g_3 - g_4, ..., for an even B."""

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``[k, B]`` to ``[k, d]``: sum_i w_ki g_i, added to ``out`` in place if that is given."""

    def select(self, rows: Tensor) -> Gradients:
        """The gradients of these examples only."""


class Source(Protocol):
    """Watches a model and yields what its backward passes made."""

    dim: int

    def collect(self) -> list[Gradients]:
        """One batch for each forward pass that a backward has reached since the last call."""

    def drop(self, size: int | None = None) -> bool:
        """Forget what waits to be collected: all of it, or the last forward's if it was of ``size`` examples.

        Returns whether anything still waits.
        """

    def detach(self) -> None:
        """Leave the model exactly as it was found."""
