"""Sketches: k numbers for each gradient, whose inner products approximate those of the gradients.

S: R^d -> R^k is linear and random, with E <Sg, Sh> = <g, h>. It depends only on k, a seed and the position of each
parameter in the flat gradient, so sketches of different batches, processes and runs may be added. Neither S nor the
gradients are ever materialised.
"""

from __future__ import annotations

from typing import Any

import torch

from ordain import _rng
from ordain.errors import InputError
from ordain.gradients.dense import Dense, as_gradients
from ordain.gradients.hashing import HashFamily
from ordain.gradients.protocol import Gradients

_MOST = 2**31


class Sketch:
    """The map S for gradients of any length.

    Args:
        k: the number of numbers kept per example. <Sg, Sh> has a variance of at most 2/k |g|^2 |h|^2. For
            outer products, whose rows and columns are hashed separately, it is at most 8/k, or 2 rows/k if there are at
            most k/16 rows.
        seed: determines all random numbers.

    >>> one, other = torch.ones(1, 50), torch.arange(50.0)[None]
    >>> small = Sketch(16, seed=1)
    >>> a, b, both = (small(Dense([g])).rows() for g in (one, other, one + other))
    >>> torch.allclose(a + b, both)
    True
    """

    def __init__(self, k: int, *, seed: int = 0) -> None:
        self.k = check_sketch(k)
        self._family = HashFamily(self.k, seed=_rng.check_seed(seed))

    def __call__(self, batch: Gradients) -> Dense:
        """``[B, d]`` in any form to ``[B, k]``."""
        out = torch.zeros(batch.size, self.k, dtype=batch.dtype, device=batch.device)
        batch.add_sketch(self._family, out)
        return Dense([out])


def sketch(grads: Any, k: int, *, seed: int = 0) -> Dense:
    """Sketch per-example gradients ``[B, d]``, in any form that ``observe()`` takes, as ``[B, k]``.

    It is linear: with the same k, seed and layout of parameters, the sketch of a sum is the sum of the sketches.

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
            remedy="Try 4096; powers of two are fastest.",
        )
    return k
