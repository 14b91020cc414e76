"""Per-example gradients of a table of which each example touches a few rows: embeddings."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ordain.gradients.forms import Form
from ordain.gradients.hashing import Hashes
from ordain.gradients.memory import chunk_numbers, in_pieces
from ordain.gradients.small import add_products


class Rows(Form):
    """G_i has b_n added to row ids_n for every entry n of example i; all other rows are zero.

    Args:
        examples: ``[N]``, which example each entry belongs to.
        ids: ``[N]``, which row of the table it touches.
        b: ``[N, cols]``, what it adds there.
        size: B, the number of examples.
        rows: the number of rows of the table.
    """

    sparse = True

    def __init__(self, examples: Tensor, ids: Tensor, b: Tensor, *, size: int, rows: int) -> None:
        self._entries = examples, ids, b
        self.size, self.rows, self.cols = size, rows, b.shape[1]

    @cached_property
    def _joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """The entries with those of the same example and id added up, sorted by id: ``[M]``, ``[M]``, ``[M, cols]``."""
        examples, ids, b = self._entries
        keys, place = torch.unique(ids * self.size + examples, return_inverse=True)
        joined = b.new_zeros(len(keys), self.cols).index_add_(0, place, b)
        return keys % self.size, keys // self.size, joined

    def make(self, lo: int, hi: int) -> Tensor:
        return _spread(self._joined, self.size, lo, hi)

    def dot(self, vectors: Tensor) -> Tensor:
        examples, ids, b = self._joined
        dots = vectors.new_zeros(len(vectors), self.size)
        for vector, row in zip(vectors, dots, strict=True):
            row.index_add_(0, examples, torch.linalg.vecdot(vector.index_select(0, ids), b))
        return dots

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        examples, ids, b = self._joined
        for weight, target in zip(weights, out, strict=True):

            def add(lo: int, hi: int, weight: Tensor = weight, target: Tensor = target) -> None:
                target.index_add_(0, ids[lo:hi], b[lo:hi] * weight[examples[lo:hi], None])

            in_pieces(len(ids), add)

    def select(self, rows: Tensor) -> Rows:
        examples, ids, b = self._joined
        chosen, entries = (rows[:, None] == examples).nonzero(as_tuple=True)
        return Rows(chosen, ids[entries], b[entries], size=len(rows), rows=self.rows)

    def paired(self) -> Rows:
        examples, ids, b = self._entries
        turned = (1 - 2 * (examples % 2)).to(b.dtype)[:, None]
        return Rows(examples // 2, ids, b * turned, size=self.size // 2, rows=self.rows)

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        """An id that one example has touches the diagonal only; the ids of several are multiplied out."""
        examples, ids, b = self._joined
        _, group, members = torch.unique_consecutive(ids, return_inverse=True, return_counts=True)
        shared = members > 1
        entries = shared[group]
        alone = ~entries
        gram.diagonal().index_add_(0, examples[alone], b[alone].square().sum(dim=1))
        slots = (torch.cumsum(shared, dim=0) - 1)[group][entries]  # the shared ids, counted from 0
        count = int(shared.sum())
        together = examples[entries], slots, b[entries]
        step = max(1, chunk_numbers() // (self.size * self.cols))
        for lo in range(0, count, step):
            made = _spread(together, self.size, lo, min(lo + step, count)).flatten(1)
            add_products(made, made.new_empty(0, made.shape[1]), gram, dots[:0])
        dots += self.dot(vectors)

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        hashes.add_entries(*self._entries, out)


def _spread(joined: tuple[Tensor, Tensor, Tensor], size: int, lo: int, hi: int) -> Tensor:
    """``[size, hi - lo, cols]``: joined entries sorted by id, those of ids lo .. hi, each in its place."""
    examples, ids, b = joined
    first, last = torch.searchsorted(ids, torch.tensor([lo, hi], device=ids.device)).tolist()
    made = b.new_zeros(size, hi - lo, b.shape[1])
    made[examples[first:last], ids[first:last] - lo] = b[first:last]
    return made
