"""Convergence by epochs and examples: fitted exponents next to those of Theorem 3 and of RR.

Each order runs every step size of a grid, to be tuned for each K and n, and the step sizes of Theorem 3. One run
measures all K: its weights after K epochs are those of a run of K epochs.

The problems are small and their constants known exactly: f_i(w) = h(w) - <b_i, w>, where the b_i sum to zero. h is a
sum over coordinates with its minimum 0 at w = 0, and equals the mean loss f. An example's gradient differs from the
mean gradient by b_i at every w, so Assumption 3 holds on all of R^d, which is true of few problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ordain import theory
from ordain.orders import ORDERS
from ordain.study.vectors import convergence_figures
from ordain.study.vectors.convergence_figures import LABELS
from ordain.study.vectors.vector_study import Point
from ordain.theory import Constants

Floats = NDArray[np.float64]
SINE_MU = 0.1755  # of x^2 + 3 sin(x)^2: min of h'^2/2h, at x = 2.2017 (tests); the literature has 1/32


@dataclass(frozen=True)
class Objective:
    """``low`` and ``high`` are curvatures ``[d]``.

    - quadratic: h_j = low_j x^2 / 2, which is kinked with ``low = high``.
    - kinked: h_j = high_j x^2 / 2 for x < 0, low_j x^2 / 2 for x >= 0. A random walk around the kink feels a
      force on average, unlike at the minimum of a smooth function with small steps: RR's rate is tight here.
    - sine: h_j = x^2 + 3 sin(x)^2, with curvatures from -4 to 8, started where they are negative.
    """

    sine: bool
    low: Floats
    high: Floats
    b: Floats
    start: Floats

    @cached_property
    def constants(self) -> Constants:
        """Exact: Hessians are diagonal, so |H|_inf is the largest curvature and |H v|_2 is largest at v = 1."""
        return Constants(
            L=float(self.high.max()),
            L_2inf=float(np.linalg.norm(self.high)),
            L_inf=float(self.high.max()),
            varsigma=float(np.linalg.norm(self.b, axis=1).max()),
            F=self.gap(self.start),
            mu=SINE_MU if self.sine else float(self.low.min()),
        )

    def gap(self, w: Floats) -> float:
        """f(w) - f*, which is h(w)."""
        if self.sine:
            return float((w**2 + 3 * np.sin(w) ** 2).sum())
        return float((self._curvature(w) * w**2).sum() / 2)

    def gradient(self, w: Floats) -> Floats:
        """Grad f(w)."""
        return 2 * w + 3 * np.sin(2 * w) if self.sine else self._curvature(w) * w

    def _curvature(self, w: Floats) -> Floats:
        return np.where(w < 0, self.high, self.low)


def objective(name: str, *, n: int, d: int, seed: int) -> Objective:
    """One of :data:`LABELS` with n random examples."""
    b = np.random.default_rng([n, d, seed]).normal(size=(n, d))
    b /= np.linalg.norm(b, axis=1, keepdims=True)
    b -= b.mean(axis=0)
    one, q = np.ones(d), np.linspace(0.25, 1.0, d)
    if name in ("quadratic", "kinked"):
        low, high = (q, q) if name == "quadratic" else (0.25 * one, one)
        return Objective(False, low, high, b, one / np.sqrt(d))
    # "noisy": varsigma^2 far above F L, so that small mean gradients take small steps, as the non-convex rates assume.
    return Objective(True, -4 * one, 8 * one, (1000 if name == "noisy" else 4) * b, 1.5 * one)


@dataclass(frozen=True)
class ConvergenceRates:
    """``grid`` holds alpha n L; ``epochs`` are measured at ``n``, and ``sizes`` at ``at_epochs``."""

    name: ClassVar = "rates"
    title: ClassVar = "Convergence rates on problems with known constants"
    quick: ClassVar = {
        "seeds": 2,
        "problems": ("quadratic", "noisy"),
        "orders": ("rr", "grab"),
        "n": 16,
        "epochs": (4, 8),
        "sizes": (8, 16),
        "at_epochs": 8,
        "grid": (0.25, 0.5, 1.0),
    }
    seeds: int = 5
    d: int = 8
    problems: tuple[str, ...] = tuple(LABELS)
    orders: tuple[str, ...] = ("rr", "so", "flipflop", "grab", "grab-pair")
    n: int = 256
    epochs: tuple[int, ...] = (8, 16, 32, 64, 128)
    sizes: tuple[int, ...] = (32, 64, 128, 256, 512)
    at_epochs: int = 32
    grid: tuple[float, ...] = tuple(2.0 ** (2 * k / 3) for k in range(-8, 6))

    draw = convergence_figures.draw
    tabulate = convergence_figures.tabulate
    say = convergence_figures.say

    def points(self) -> Iterator[Point]:
        sizes = sorted({self.n, *self.sizes})
        for name, n, seed, order in product(self.problems, sizes, range(self.seeds), self.orders):
            yield {"problem": name, "n": n, "seed": seed, "order": order}

    def measure(self, point: Point) -> dict[str, Any]:
        """``gap`` and ``gradient`` are ``[steps, epochs]``: f - f*, and the mean of |grad f(w_k)|^2 over the epochs.

        ``theorem`` and ``theorem_pl`` give the step size of Theorem 3 for each K as an index into ``steps``.
        """
        n = point["n"]
        problem = objective(point["problem"], n=n, d=self.d, seed=point["seed"])
        epochs = list(self.epochs) if n == self.n else []
        epochs = sorted({*epochs, self.at_epochs}) if n in self.sizes else epochs
        c, bound = problem.constants, theory.walk_bound(n, self.d)
        steps = [gamma / (n * c.L) for gamma in self.grid]
        places = {}
        for name, step in (("theorem", theory.grab_step), ("theorem_pl", theory.grab_step_pl)):
            wanted = [step(c, n=n, epochs=count, balancing=bound) for count in epochs]
            steps += [alpha for alpha in dict.fromkeys(wanted) if alpha not in steps]
            places[name] = [steps.index(alpha) for alpha in wanted]
        runs = [train(problem, point["order"], seed=point["seed"], alpha=alpha, epochs=epochs) for alpha in steps]
        gaps, means = ([[float(f"{value:.6g}") for value in of] for of in found] for found in zip(*runs, strict=True))
        return {
            "epochs": epochs,
            "steps": steps,
            **places,
            "gap": gaps,
            "gradient": means,
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
        sgd_epoch(problem.sine, problem.low, problem.high, problem.b, sigma, alpha, w, gradients)
        policy.observe(torch.from_numpy(gradients))  # an order's signs do not depend on the batch size
        if done in epochs:
            gaps.append(problem.gap(w))
            means.append(total / done)
    return gaps, means
