"""Per-example gradients of a table in which each example touches a few rows: embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ordain.errors import GradientError
from ordain.gradients.hashing import Hashes
from ordain.gradients.memory import chunk_numbers, in_pieces
from ordain.gradients.param_grads import ParamGrads


class SparseRows(ParamGrads):
    """G_i has b_n added to row ids_n for every entry n of example i; all other rows are zero.

    Args:
        examples: ``[N]``, which example each entry belongs to (any integer dtype).
        ids: ``[N]``, which row of the table it touches.
        b: ``[N, cols]``, what it adds there.
        size: B, the number of examples.
        rows: the number of rows of the table.
    """

    kind = "sparse rows"

    def __init__(self, examples: Tensor, ids: Tensor, b: Tensor, *, size: int, rows: int) -> None:
        super().__init__(size, rows, b.shape[1], settings={"size": size, "rows": rows})
        self._entries = examples.long(), ids.long(), b

    @cached_property
    def _joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """The entries with those of the same example and id added up, sorted by id: ``[M]``, ``[M]``, ``[M, cols]``."""
        examples, ids, b = self._entries
        keys, place = torch.unique(ids * self.size + examples, return_inverse=True)
        ids = keys // self.size
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < self.rows:
            raise GradientError(
                f"ids from {int(ids[0])} to {int(ids[-1])} in a table of {self.rows} rows",
                expected="ids of its rows",
                remedy="Resize the embedding before creating the order.",
            )
        return keys % self.size, ids, b.new_zeros(len(keys), self.cols).index_add_(0, place, b)

    def materialize(self, lo: int, hi: int) -> Tensor:
        return _spread(self._joined, self.size, lo, hi)

    def dot(self, vectors: Tensor) -> Tensor:
        examples, ids, b = self._joined
        dots = vectors.new_zeros(len(vectors), self.size)
        for vector, row in zip(vectors, dots, strict=True):
            touched = vector.view(self.rows, self.cols).index_select(0, ids)
            row.index_add_(0, examples, torch.linalg.vecdot(touched, b.to(touched.dtype)))
        return dots

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        examples, ids, b = self._joined
        for weight, target in zip(weights, out, strict=True):

            def add(lo: int, hi: int, weight: Tensor = weight, target: Tensor = target) -> None:
                scaled = b[lo:hi] * weight[examples[lo:hi], None]
                target.view(self.rows, self.cols).index_add_(0, ids[lo:hi], scaled.to(target.dtype))

            in_pieces(len(ids), add)

    def select(self, rows: Tensor) -> SparseRows:
        examples, ids, b = self._joined
        chosen, entries = (rows[:, None] == examples).nonzero(as_tuple=True)
        return SparseRows(chosen, ids[entries], b[entries], size=len(rows), rows=self.rows)

    def paired(self) -> SparseRows:
        examples, ids, b = self._entries
        flipped = (1 - 2 * (examples % 2)).to(b.dtype)[:, None]
        return SparseRows(examples // 2, ids, b * flipped, size=self.size // 2, rows=self.rows)

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        """An id that one example has touches the diagonal only; the ids of several are multiplied out."""
        examples, ids, b = self._joined
        _, group, members = torch.unique_consecutive(ids, return_inverse=True, return_counts=True)
        shared = members > 1
        entries = shared[group]
        alone = ~entries
        squares = b[alone].square().sum(dim=1)
        gram.diagonal().index_add_(0, examples[alone], squares.to(gram.dtype))
        slots = (torch.cumsum(shared, dim=0) - 1)[group][entries]  # the shared ids, counted from 0
        count, together = int(shared.sum()), (examples[entries], slots, b[entries])
        step = max(1, chunk_numbers() // max(1, self.size * self.cols))
        for lo in range(0, count, step):
            grads = _spread(together, self.size, lo, min(lo + step, count)).flatten(1).to(gram.dtype)
            gram.addmm_(grads, grads.T)
        dots += self.dot(vectors)

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        hashes.add_entries(*self._entries, out)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._joined

    def zeros(self, size: int) -> SparseRows:
        return SparseRows(*(part[:0] for part in self._joined), size=size, rows=self.rows)

    @classmethod
    def laid(cls, several: Sequence[ParamGrads], places: Sequence[Tensor]) -> SparseRows:
        entries = [one.tensors() for one in several]
        examples = torch.cat([place[one[0]] for place, one in zip(places, entries, strict=True)])
        ids, b = (torch.cat([one[k] for one in entries]) for k in (1, 2))
        return cls(examples, ids, b, size=sum(len(place) for place in places), rows=several[0].rows)


def _spread(joined: tuple[Tensor, Tensor, Tensor], size: int, lo: int, hi: int) -> Tensor:
    """``[size, hi - lo, cols]``: joined entries sorted by id, those of ids lo .. hi, each in its place."""
    examples, ids, b = joined
    first, last = torch.searchsorted(ids, torch.tensor([lo, hi], device=ids.device)).tolist()
    grads = b.new_zeros(size, hi - lo, b.shape[1])
    grads[examples[first:last], ids[first:last] - lo] = b[first:last]
    return grads
