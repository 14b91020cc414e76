"""A claim, and what was found about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ordain.study.claims.evidence import Evidence

__all__ = ["FAILS", "HOLDS", "OPEN", "Claim", "Finding", "together"]

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot tell"


@dataclass(frozen=True)
class Finding:
    """The verdict, what was measured in sentences, and a figure's file in the folder of runs."""

    verdict: str
    measured: tuple[str, ...]
    figure: str | None = None


@dataclass(frozen=True)
class Claim:
    """What the paper says, and how to find out."""

    title: str
    paper: str
    find: Callable[[Evidence], Finding]


def together(votes: Iterable[bool | None]) -> str:
    """One vote against is enough; without one, all must be for it. None is a vote that could be luck.

    >>> together([True, True]), together([True, None]), together([True, False]), together([])
    ('holds', 'cannot tell', 'does not hold', 'cannot tell')
    """
    cast = list(votes)
    if any(vote is False for vote in cast):
        return FAILS
    return HOLDS if cast and all(cast) else OPEN
