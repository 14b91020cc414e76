"""Convergence against epochs and examples: fitted exponents beside those of Theorem 3 and of RR.

Each order runs every step size of a grid, so that it can be tuned for each K and n, and the step sizes of Theorem 3.
A run passes through all K on its way: its weights after K epochs are those of a run of K epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ordain import theory
from ordain.orders import ORDERS
from ordain.study.vectors import problems
from ordain.study.vectors.rates_shown import draw, say, tabulate
from ordain.study.vectors.study import Point, Study

__all__ = ["STUDY", "Rates"]


@dataclass(frozen=True)
class Rates:
    """``grid`` holds alpha n L; ``epochs`` are tried at ``n``, and ``sizes`` at ``at_epochs``."""

    seeds: int = 5
    d: int = 8
    problems: tuple[str, ...] = tuple(problems.LABELS)
    orders: tuple[str, ...] = ("rr", "so", "flipflop", "grab", "grab-pair")
    n: int = 256
    epochs: tuple[int, ...] = (8, 16, 32, 64, 128)
    sizes: tuple[int, ...] = (32, 64, 128, 256, 512)
    at_epochs: int = 32
    grid: tuple[float, ...] = tuple(2.0 ** (2 * k / 3) for k in range(-8, 6))


def _sizes(quick: bool, **changes: Any) -> Rates:
    small: dict[str, Any] = {
        "seeds": 2,
        "problems": ("quadratic", "noisy"),
        "orders": ("rr", "grab"),
        "n": 16,
        "epochs": (4, 8),
        "sizes": (8, 16),
        "at_epochs": 8,
        "grid": (0.25, 0.5, 1.0),
    }
    return Rates(**(small if quick else {}) | changes)


def _points(config: Rates) -> Iterator[Point]:
    for name in config.problems:
        for n in sorted({config.n, *config.sizes}):
            for seed in range(config.seeds):
                for order in config.orders:
                    yield {"problem": name, "n": n, "seed": seed, "order": order}


def _measure(config: Rates, point: Point) -> dict[str, Any]:
    """``gap`` and ``gradient`` are ``[steps, epochs]``: f - f*, and the mean of |grad f(w_k)|^2 over the epochs.

    ``theorem`` and ``theorem_pl`` name Theorem 3's step size for each K by its place in ``steps``.
    """
    n = point["n"]
    known = problems.problem(point["problem"], n=n, d=config.d, seed=point["seed"])
    epochs = list(config.epochs) if n == config.n else []
    epochs = sorted({*epochs, config.at_epochs}) if n in config.sizes else epochs
    c, bound = known.constants, theory.walk_bound(n, config.d)
    steps = [gamma / (n * c.L) for gamma in config.grid]
    places = {}
    for name, step in (("theorem", theory.grab_step), ("theorem_pl", theory.grab_step_pl)):
        wanted = [step(c, n=n, epochs=count, balancing=bound) for count in epochs]
        steps += [alpha for alpha in dict.fromkeys(wanted) if alpha not in steps]
        places[name] = [steps.index(alpha) for alpha in wanted]
    runs = [_train(known, point["order"], seed=point["seed"], alpha=alpha, epochs=epochs) for alpha in steps]
    return {
        "epochs": epochs,
        "steps": steps,
        **places,
        "gap": [[_short(value) for value in gaps] for gaps, _ in runs],
        "gradient": [[_short(value) for value in means] for _, means in runs],
        "constants": asdict(c),
        "balancing": bound,
    }


def _train(
    known: problems.Problem, order: str, *, seed: int, alpha: float, epochs: list[int]
) -> tuple[list[float], list[float]]:
    """What was reached after each of ``epochs``: f - f*, and the mean over epochs so far of |grad f(w_k)|^2."""
    from ordain.study.vectors import loops  # numba takes a while to import

    n, d = known.b.shape
    policy = ORDERS[order].build(None, n, seed=seed)
    w, gradients = known.start.copy(), np.empty((n, d))
    gaps, means, total = [], [], 0.0
    for done in range(1, max(epochs) + 1):
        total += float(np.square(known.gradient(w)).sum())
        sigma: NDArray[np.int64] = np.fromiter(policy.sampler, dtype=np.int64, count=n)
        loops.epoch(known.kind, known.low, known.high, known.b, sigma, alpha, w, gradients)
        # One call an epoch: an order's signs are those of one gradient at a time, whatever the batch.
        policy.observe(torch.from_numpy(gradients))
        if done in epochs:
            gaps.append(known.gap(w))
            means.append(total / done)
    return gaps, means


def _short(value: float) -> float:
    return float(f"{value:.6g}")


STUDY: Study[Rates] = Study(
    name="rates",
    title="Convergence rates on problems with known constants",
    sizes=_sizes,
    points=_points,
    measure=_measure,
    draw=draw,
    tabulate=tabulate,
    say=say,
)
