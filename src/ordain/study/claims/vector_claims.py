"""Claims on herding and convergence rates, checked with the vector studies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from ordain.study.claims.evidence import MECHANICS, NOT_RUN, TRAINING, Claim, Evidence, Finding, together
from ordain.study.vectors import STUDIES
from ordain.study.vectors.vector_study import Estimate, Record, where

_ALIKE = 1.1  # ratio up to which prefix sums count as similar
Votes = Callable[[Any, list[Record]], Iterable[bool | None]]


def _study(name: str, figure: str, votes: Votes, evidence: Evidence) -> Finding:
    """The sentences of a study, and the verdict from its records."""
    if not evidence.has(name):
        return NOT_RUN
    study, folder = STUDIES[name], evidence.folder / name
    said = study.sentences(folder)
    return Finding(together(study.shown(votes, folder)), tuple(said), evidence.figure(name, figure))


def _shorter(_: Any, records: list[Record]) -> Iterable[bool | None]:
    """Prefix sums are shorter after ten rounds than after one, and after one than in random order."""
    orders = ("herding-10", "herding-1", "random")
    ten, one, none = (np.mean([record["l2"] for record in where(records, order=order)]) for order in orders)
    return [bool(ten < one < none)]


def _similar(config: Any, records: list[Record]) -> Iterable[bool | None]:
    """Algorithm 6 is close to Algorithm 5 after the last round, for every dimension."""
    for d in config.dims:
        found = (where(records, d=d, balancer=name) for name in ("deterministic", "walk"))
        ours, walk = (np.mean([record["l2"][-1] for record in of]) for of in found)
        yield bool(walk <= _ALIKE * ours)


def _greedy_fails(config: Any, records: list[Record]) -> Iterable[bool | None]:
    """Whether greedy is worse than random at the largest n; inconclusive if Algorithm 1 itself is not."""
    mean = {
        order: np.mean([r[order] for r in where(records, n=config.sizes[-1])])
        for order in ("random", "greedy", "greedy-centred")
    }
    yield bool(mean["greedy"] > mean["random"])
    yield True if mean["greedy-centred"] > mean["random"] else None


def _rates(config: Any, records: list[Record]) -> Iterable[bool | None]:
    """GraB's loss decays faster in n than RR's by more than three standard errors."""
    for fits in config.n_exponents(records).values():
        yield _faster(fits["grab"], fits["rr"])


def _convex(config: Any, records: list[Record]) -> Iterable[bool | None]:
    """The same on problems with real data; inconclusive if it is not clear."""
    for problem in config.problems:
        yield _faster(*(config.by_examples(records, problem, order) for order in ("grab", "rr"))) or None


def _faster(ours: Estimate, theirs: Estimate) -> bool | None:
    """Whether one exponent is lower by more than three standard errors; None for a single seed."""
    if ours.error is None or theirs.error is None:
        return None
    return bool(theirs.mean - ours.mean > 3 * (ours.error**2 + theirs.error**2) ** 0.5)


CLAIMS = (
    Claim(
        "Balancing and reordering shortens prefix sums (Figure 1b)",
        "Herding by balancing, repeated, keeps prefix sums of random vectors short.",
        partial(_study, "toy-herding", "prefix-norms", _shorter),
        MECHANICS,
    ),
    Claim(
        "Greedy can be far worse than random (Statement 1)",
        "There are vectors on which Algorithm 1's prefix sums grow like n, a random order's like the square root of n.",
        partial(_study, "statement1", "statement1", _greedy_fails),
        MECHANICS,
    ),
    Claim(
        "Algorithm 5 is like Algorithm 6 after ten rounds",
        "“They obtain similar results when called repeatedly (10 times).”",
        partial(_study, "balancing", "balancing", _similar),
        MECHANICS,
    ),
    Claim(
        "The rates' exponents",
        "GraB gains a factor of n over RR under PL, and the cube root of n on smooth non-convex problems.",
        partial(_study, "rates", "rates-gap", _rates),
        MECHANICS,
    ),
    Claim(
        "The exponent of n, on regularised logistic regression",
        "Under PL, GraB's loss falls like n^-2 where RR's falls like n^-1.",
        partial(_study, "convex", "convex", _convex),
        TRAINING,
    ),
)
