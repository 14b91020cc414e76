"""Convergence by epochs and examples: fitted exponents next to those of Theorem 3 and of RR.

Each order runs every step size of a grid, to be tuned for each K and n, and the step sizes of Theorem 3. One run
measures all K: its weights after K epochs are those of a run of K epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ordain import theory
from ordain.orders import ORDERS
from ordain.study.vectors.convergence_figures import draw, say, tabulate
from ordain.study.vectors.objectives import LABELS, Objective, objective
from ordain.study.vectors.vector_study import Point, Study


@dataclass(frozen=True)
class ConvergenceRates:
    """``grid`` holds alpha n L; ``epochs`` are measured at ``n``, and ``sizes`` at ``at_epochs``."""

    seeds: int = 5
    d: int = 8
    problems: tuple[str, ...] = tuple(LABELS)
    orders: tuple[str, ...] = ("rr", "so", "flipflop", "grab", "grab-pair")
    n: int = 256
    epochs: tuple[int, ...] = (8, 16, 32, 64, 128)
    sizes: tuple[int, ...] = (32, 64, 128, 256, 512)
    at_epochs: int = 32
    grid: tuple[float, ...] = tuple(2.0 ** (2 * k / 3) for k in range(-8, 6))


def _points(config: ConvergenceRates) -> Iterator[Point]:
    sizes = sorted({config.n, *config.sizes})
    for name, n, seed, order in product(config.problems, sizes, range(config.seeds), config.orders):
        yield {"problem": name, "n": n, "seed": seed, "order": order}


def _measure(config: ConvergenceRates, point: Point) -> dict[str, Any]:
    """``gap`` and ``gradient`` are ``[steps, epochs]``: f - f*, and the mean of |grad f(w_k)|^2 over the epochs.

    ``theorem`` and ``theorem_pl`` give the step size of Theorem 3 for each K as an index into ``steps``.
    """
    n = point["n"]
    problem = objective(point["problem"], n=n, d=config.d, seed=point["seed"])
    epochs = list(config.epochs) if n == config.n else []
    epochs = sorted({*epochs, config.at_epochs}) if n in config.sizes else epochs
    c, bound = problem.constants, theory.walk_bound(n, config.d)
    steps = [gamma / (n * c.L) for gamma in config.grid]
    places = {}
    for name, step in (("theorem", theory.grab_step), ("theorem_pl", theory.grab_step_pl)):
        wanted = [step(c, n=n, epochs=count, balancing=bound) for count in epochs]
        steps += [alpha for alpha in dict.fromkeys(wanted) if alpha not in steps]
        places[name] = [steps.index(alpha) for alpha in wanted]
    runs = [train(problem, point["order"], seed=point["seed"], alpha=alpha, epochs=epochs) for alpha in steps]
    return {
        "epochs": epochs,
        "steps": steps,
        **places,
        "gap": [[_short(value) for value in gaps] for gaps, _ in runs],
        "gradient": [[_short(value) for value in means] for _, means in runs],
        "constants": asdict(c),
        "balancing": bound,
    }


def train(
    problem: Objective, order: str, *, seed: int, alpha: float, epochs: list[int]
) -> tuple[list[float], list[float]]:
    """SGD: after each of ``epochs``, f - f* and the mean over the epochs so far of |grad f(w_k)|^2."""
    from ordain.study.vectors.compiled import sgd_epoch  # numba is slow to import

    n, d = problem.b.shape
    policy = ORDERS[order].build(None, n, seed=seed)
    w, gradients = problem.start.copy(), np.empty((n, d))
    gaps, means, total = [], [], 0.0
    for done in range(1, max(epochs) + 1):
        total += float(np.square(problem.gradient(w)).sum())
        sigma: NDArray[np.int64] = np.fromiter(policy.sampler, dtype=np.int64, count=n)
        sgd_epoch(problem.kind, problem.low, problem.high, problem.b, sigma, alpha, w, gradients)
        policy.observe(torch.from_numpy(gradients))  # an order's signs do not depend on the batch size
        if done in epochs:
            gaps.append(problem.gap(w))
            means.append(total / done)
    return gaps, means


def _short(value: float) -> float:
    return float(f"{value:.6g}")


STUDY: Study[ConvergenceRates] = Study(
    name="rates",
    title="Convergence rates on problems with known constants",
    config=ConvergenceRates,
    quick={
        "seeds": 2,
        "problems": ("quadratic", "noisy"),
        "orders": ("rr", "grab"),
        "n": 16,
        "epochs": (4, 8),
        "sizes": (8, 16),
        "at_epochs": 8,
        "grid": (0.25, 0.5, 1.0),
    },
    points=_points,
    measure=_measure,
    draw=draw,
    tabulate=tabulate,
    say=say,
)
