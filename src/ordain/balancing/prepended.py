"""A batch with a few vectors in front of it that earlier batches left over."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """Vectors g_1 .. g_B in R^d, known by their products and sums."""

    size: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, B]`` of <g_i, g_j>, right only where j >= i; and ``[k, d]`` to ``[k, B]`` of <v_k, g_i>."""

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``[k, B]`` to ``[k, d]``: sum_i w_ki g_i, added to ``out`` in place if that is given."""


class Prepended:
    """Rows ``heads`` [h, d] (an unpaired example, an incomplete unit), then the batch's own."""

    def __init__(self, heads: Tensor, batch: Rows) -> None:
        self._heads, self._batch = heads, batch
        self.size = len(heads) + batch.size
        self.dim, self.dtype, self.device = batch.dim, batch.dtype, batch.device

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Rows`."""
        all_vectors = torch.cat([vectors, self._heads])
        gram, dots = self._batch.products(all_vectors)
        dots = torch.cat([all_vectors @ self._heads.T, dots], dim=1)
        above = dots[len(vectors) :]
        return torch.cat([above, torch.cat([above[:, len(self._heads) :].T, gram], dim=1)]), dots[: len(vectors)]

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See :class:`Rows`."""
        before, own = torch.split(weights, [len(self._heads), self._batch.size], dim=1)
        return self._batch.weighted_sum(own, out=out).addmm_(before, self._heads)
