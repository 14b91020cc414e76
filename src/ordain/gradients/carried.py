"""A batch with a few vectors in front of it that earlier batches left over."""

from __future__ import annotations

import torch
from torch import Tensor

from ordain.gradients.base import Gradients


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
        across = self._batch.dot(self._heads)
        above = torch.cat([self._heads @ self._heads.T, across], dim=1)
        return torch.cat([above, torch.cat([across.T, self._batch.gram()], dim=1)])

    def dot(self, vectors: Tensor) -> Tensor:
        return torch.cat([vectors @ self._heads.T, self._batch.dot(vectors)], dim=1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        before, own = torch.split(weights, [len(self._heads), self._batch.size], dim=1)
        return self._batch.weighted_sum(own).addmm_(before, self._heads)

    def select(self, rows: Tensor) -> Carried:
        h = len(self._heads)
        return Carried(self._heads[rows[rows < h]], self._batch.select(rows[rows >= h] - h))
