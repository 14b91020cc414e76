"""Sketches: k numbers for each gradient, whose inner products are those of the gradients but for a little noise.

S: R^d -> R^k is linear and random, with E <Sg, Sh> = <g, h>. It follows from k, a seed and where each parameter lies in
the flat gradient, and from nothing else: sketches of different batches, processes and days may be added up. Neither S
nor the gradients are ever held.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ordain import _rng
from ordain.errors import InputError
from ordain.gradients.base import Gradients
from ordain.gradients.dense import Dense, as_gradients
from ordain.gradients.factored import Factored
from ordain.gradients.hashing import Hashes
from ordain.gradients.memory import chunk_numbers

_KEPT = 2**16  # hashes of longer flat gradients are drawn each time: keeping them would take more room than a gradient
_MOST = 2**31


class Sketch:
    """The map S for gradients of any length, with the hashes it has drawn so far: rows + cols numbers a parameter.

    Args:
        k: how many numbers an example keeps. <Sg, Sh> has a variance of at most 2/k |g|^2 |h|^2, or 8/k where g and h
            are outer products, whose rows and columns are hashed apart.
        seed: everything random follows from it.

    >>> one, other = torch.ones(1, 50), torch.arange(50.0)[None]
    >>> small = Sketch(16, seed=1)
    >>> a, b, both = (small(Dense([g])).blocks()[0] for g in (one, other, one + other))
    >>> torch.allclose(a + b, both)
    True
    """

    def __init__(self, k: int, *, seed: int = 0) -> None:
        self.k = check_sketch(k)
        self._seed = _rng.check_seed(seed)
        self._drawn: dict[tuple[Any, ...], Hashes] = {}

    def __call__(self, batch: Gradients) -> Dense:
        """``[B, d]`` in any form to ``[B, k]``."""
        out = torch.zeros(batch.size, self.k, dtype=batch.dtype, device=batch.device)
        if isinstance(batch, Factored):
            for offset, form in batch.forms():
                form.add_sketch(self, offset, out)
            out.mul_(batch.scale)
        elif isinstance(batch, Dense):
            offset = 0
            for block in batch.blocks():
                self.hashes(offset, 1, block.shape[1], out).add_made(block.unsqueeze(1), out)
                offset += block.shape[1]
        else:
            self._add_any(batch, out)
        return Dense([out])

    def _add_any(self, batch: Gradients, out: Tensor) -> None:
        """Of gradients known by their operations alone: a few rows are made at a time."""
        step = max(1, chunk_numbers() // max(1, batch.dim))
        hashes = self.hashes(0, 1, batch.dim, out)
        for lo in range(0, batch.size, step):
            hi = min(lo + step, batch.size)
            one = torch.zeros(hi - lo, batch.size, dtype=out.dtype, device=out.device)
            one[:, lo:hi].fill_diagonal_(1.0)
            hashes.add_made(batch.weighted_sum(one).unsqueeze(1), out[lo:hi])

    def hashes(self, offset: int, rows: int, cols: int, like: Tensor) -> Hashes:
        """Those of the parameter ``[rows, cols]`` at ``offset``, with signs of the dtype and device of ``like``."""
        key = offset, rows, cols, like.dtype, like.device
        found = self._drawn.get(key)
        if found is None:
            found = Hashes.draw(rows, cols, k=self.k, seed=self._seed, offset=offset, like=like)
            if rows > 1 or cols <= _KEPT:
                self._drawn[key] = found
        return found


def sketch(grads: Any, k: int, *, seed: int = 0) -> Dense:
    """Per-example gradients ``[B, d]``, in any form that ``observe()`` takes, as sketches ``[B, k]``.

    Linear: the sketch of a sum is the sum of sketches, of whatever batches, for one k, seed and layout of parameters.

    >>> g = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    >>> bool((sketch(g, 4096).gram() - g @ g.T).abs().max() < 60)
    True
    """
    return Sketch(k, seed=seed)(as_gradients(grads))


def check_sketch(k: Any) -> int:
    """Return ``k`` as a length that a sketch can have, or raise."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= _MOST:
        raise InputError(
            f"a sketch of {k!r} numbers",
            expected=f"an integer from 1 to {_MOST}",
            remedy="Try 4096; a power of two is quickest.",
        )
    return k
