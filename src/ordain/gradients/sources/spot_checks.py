"""When to inspect a backward, with which examples, and how to tell whether gradients agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from ordain.gradients.protocol import Gradients

_FIRST = 4  # passes that are all inspected
MOST_APART = 499  # passes from one to the next: at one to four steps more, below one per cent of the time


class SpotChecks:
    """At the first passes, then ever more rarely."""

    def __init__(self) -> None:
        self._passes = 0
        self._next = 1
        self._random = torch.Generator().manual_seed(0)

    @property
    def contiguous(self) -> bool:
        """Have all passes so far been inspected?"""
        return self._passes <= _FIRST

    def due(self) -> bool:
        """Is this pass to be inspected?"""
        self._passes += 1
        if self._passes < self._next:
            return False
        apart = 1 if self._passes < _FIRST else max(1, int(0.6 * self._passes))
        self._next = self._passes + min(apart, MOST_APART)
        return True

    def examples(self, size: int, *, device: torch.device, all_apart: bool) -> list[Tensor]:
        """``[B]``: a random half of the examples or, for ``all_apart``, sets such that of any two examples each is in
        one without the other.
        """
        if size == 1:
            return [torch.ones(1, dtype=torch.bool, device=device)]
        count = 1
        while all_apart and math.comb(count, count // 2) < size:
            count += 1
        places = torch.randperm(size, generator=self._random).tolist()
        sets = torch.zeros(count, size, dtype=torch.bool)
        if all_apart:
            for place, members in zip(places, combinations(range(count), count // 2), strict=False):
                sets[list(members), place] = True
        else:
            # With the last but not the first: a half that comes first shows nothing of what mixes each example with
            # those before it.
            sets[0, places[: size // 2]] = True
            sets[0, 0], sets[0, -1] = False, True
        return list(sets.to(device))


def differing(
    batches: Sequence[Gradients],
    chosen: Sequence[Tensor],
    wanted: Mapping[Tensor, Tensor],
    offsets: Mapping[Tensor, tuple[int, str]],
    *,
    mean: bool,
    coarse: bool,
) -> list[Tensor]:
    """The parameters for which the gradients of the chosen examples do not add up to those wanted.

    Args:
        batches: per-example gradients.
        chosen: ``[B]`` for each batch.
        wanted: what autograd gave each parameter.
        offsets: each parameter's place in the flat vector, and its name.
        mean: whether the loss took the mean over a batch, which its gradients have undone.
        coarse: was anything computed in less than float32 (autocast)?
    """
    like = batches[0]
    explained = torch.zeros(1, like.dim, dtype=like.dtype, device=like.device)
    for batch, some in zip(batches, chosen, strict=True):
        batch.weighted_sum(some.to(batch.dtype)[None] / (batch.size if mean else 1), out=explained)
    # A gradient that is zero but for rounding (a bias before a normalization, the bias of attention's keys)
    # has no digits to compare: it need only be small beside the whole.
    whole = float(explained.norm())
    wrong = []
    for p, (offset, _) in offsets.items():
        mine = explained[0, offset : offset + p.numel()]
        theirs = wanted[p].reshape(-1).to(mine) if p in wanted else torch.zeros_like(mine)
        size = max(float(theirs.norm()), float(mine.norm()))
        apart = float((mine - theirs).norm())
        exact = p.dtype in (torch.float32, torch.float64) and not coarse
        tolerance = (1e-4 if p.dtype == torch.float64 else 1e-3) if exact else 5e-2
        unseen = not bool(mine.any()) and apart > 1e-6 * tolerance * max(whole, 1e-12)  # no layer has anything of it
        if unseen or apart > tolerance * max(size, 1e-2 * whole, 1e-12):
            wrong.append(p)
    return wrong
