"""Per-example gradients of a table in which each example touches a few rows: embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain.errors import GradientError
from ordain.gradients.hashing import Hashes
from ordain.gradients.memory import chunk_numbers, in_pieces
from ordain.gradients.param_grads import ParamGrads
from ordain.kernels.dispatch import add_products, on_cpu


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
        self._entries = examples.long(), ids.long(), b
        self.size, self.rows, self.cols = size, rows, b.shape[1]

    @cached_property
    def _joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """The entries with those of the same example and id added up, sorted by id: ``[M]``, ``[M]``, ``[M, cols]``."""
        examples, ids, b = self._entries
        if on_cpu(b):
            return self._join(ids * self.size + examples, b)
        keys, place = torch.unique(ids * self.size + examples, return_inverse=True)
        joined = b.new_zeros(len(keys), self.cols).index_add_(0, place, b)
        return keys % self.size, keys // self.size, joined

    def _join(self, keys: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same from keys that are id * size + example, compiled."""
        from ordain.kernels import tables

        b = b.contiguous()
        examples, ids, joined = torch.empty_like(keys), torch.empty_like(keys), torch.empty_like(b)
        flat, into = keys.numpy(), (examples.numpy(), ids.numpy(), joined.numpy())
        count = tables.join_entries(flat, np.argsort(flat, kind="stable"), self.size, b.numpy(), *into)
        if count and not 0 <= into[1][0] <= into[1][count - 1] < self.rows:  # compiled loops look at no bounds
            raise GradientError(
                f"ids from {into[1][0]} to {into[1][count - 1]} in a table of {self.rows} rows",
                expected="ids of its rows",
                remedy="Give the embedding its size before the order is made.",
            )
        return examples[:count], ids[:count], joined[:count]

    def _arrays(self, *others: Tensor) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
        """The joined entries for the compiled loops, if those can take them together with others."""
        examples, ids, b = self._joined
        return (examples.numpy(), ids.numpy(), b.numpy()) if on_cpu(b, *others) else None

    def materialize(self, lo: int, hi: int) -> Tensor:
        return _spread(self._joined, self.size, lo, hi)

    def dot(self, vectors: Tensor) -> Tensor:
        dots = vectors.new_zeros(len(vectors), self.size)
        self._add_dots(vectors, dots)
        return dots

    def _add_dots(self, vectors: Tensor, dots: Tensor) -> None:
        arrays = self._arrays(vectors, dots)
        examples, ids, b = self._joined
        for vector, row in zip(vectors, dots, strict=True):
            if arrays:
                from ordain.kernels import tables

                tables.entry_dots(*arrays, vector.numpy(), row.numpy())
            else:
                row.index_add_(0, examples, torch.linalg.vecdot(vector.index_select(0, ids), b))

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        arrays = self._arrays(weights, out)
        examples, ids, b = self._joined
        for weight, target in zip(weights, out, strict=True):
            if arrays:
                from ordain.kernels import tables

                tables.entry_add(*arrays, weight.numpy(), target.numpy())
                continue

            def add(lo: int, hi: int, weight: Tensor = weight, target: Tensor = target) -> None:
                target.index_add_(0, ids[lo:hi], b[lo:hi] * weight[examples[lo:hi], None])

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
        arrays = self._arrays(gram)
        if arrays:
            from ordain.kernels import tables

            tables.entry_gram(*arrays, self.size, gram.numpy())
        else:
            self._add_gram(gram)
        self._add_dots(vectors, dots)

    def _add_gram(self, gram: Tensor) -> None:
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
            add_products(made, made.new_empty(0, made.shape[1]), gram, gram[:0])

    def add_hashed(self, hashes: Hashes, out: Tensor) -> None:
        hashes.add_entries(*self._entries, out)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._joined

    def settings(self) -> dict[str, Any]:
        return {"size": self.size, "rows": self.rows}

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
    made = b.new_zeros(size, hi - lo, b.shape[1])
    made[examples[first:last], ids[first:last] - lo] = b[first:last]
    return made
