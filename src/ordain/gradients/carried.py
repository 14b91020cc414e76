"""A batch with a few vectors in front of it that earlier batches left over."""

from __future__ import annotations

import torch
from torch import Tensor

from ordain.gradients.base import Gradients
from ordain.gradients.small import differences, mirrored


class Carried:
    """Rows ``heads`` [h, d] (an unpaired example, an incomplete unit), then the batch's own."""

    def __init__(self, heads: Tensor, batch: Gradients) -> None:
        self._heads, self._batch = heads, batch

    @property
    def size(self) -> int:
        return len(self._heads) + self._batch.size

    @property
    def dim(self) -> int:
        return self._batch.dim

    @property
    def dtype(self) -> torch.dtype:
        return self._batch.dtype

    @property
    def device(self) -> torch.device:
        return self._batch.device

    def gram(self) -> Tensor:
        return mirrored(self.products(self._heads[:0])[0])

    def dot(self, vectors: Tensor) -> Tensor:
        return torch.cat([vectors @ self._heads.T, self._batch.dot(vectors)], dim=1)

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        all_vectors = torch.cat([vectors, self._heads])
        gram, dots = self._batch.products(all_vectors)
        dots = torch.cat([all_vectors @ self._heads.T, dots], dim=1)
        above = dots[len(vectors) :]
        return torch.cat([above, torch.cat([above[:, len(self._heads) :].T, gram], dim=1)]), dots[: len(vectors)]

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return differences(*self.products(vectors))

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        before, own = torch.split(weights, [len(self._heads), self._batch.size], dim=1)
        return self._batch.weighted_sum(own, out=out).addmm_(before, self._heads)

    def select(self, rows: Tensor) -> Carried:
        h = len(self._heads)
        return Carried(self._heads[rows[rows < h]], self._batch.select(rows[rows >= h] - h))
