"""The problems' constants against finite differences, SGD against a plain loop, and the theorems against runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ordain import reference, theory
from ordain.orders import ORDERS
from ordain.study.vectors import STUDIES, compiled, convergence_rates
from ordain.study.vectors.convergence_rates import LABELS, SINE_MU, objective

D = 3


@pytest.mark.parametrize("name", list(LABELS))
def test_values_gradients_and_examples_agree(name: str) -> None:
    p = objective(name, n=12, d=D, seed=0)
    assert np.abs(p.b.sum(axis=0)).max() < 1e-9  # the examples' means are f itself
    assert p.gap(np.zeros(D)) == 0
    rng = np.random.default_rng(0)
    for w in rng.normal(size=(20, D)):
        h = 1e-6
        slopes = [(p.gap(w + h * e) - p.gap(w - h * e)) / (2 * h) for e in np.eye(D)]
        assert p.gradient(w) == pytest.approx(slopes, abs=1e-6)
        out, moved = np.empty((12, D)), w.copy()
        compiled.sgd_epoch(p.sine, p.low, p.high, p.b, np.arange(12), 0.0, moved, out)
        assert out == pytest.approx(p.gradient(w) - p.b)
        assert moved.tolist() == w.tolist()


@pytest.mark.parametrize("name", list(LABELS))
def test_constants_hold_and_are_tight(name: str) -> None:
    p = objective(name, n=12, d=D, seed=0)
    c, rng = p.constants, np.random.default_rng(1)
    assert c.varsigma == pytest.approx(np.linalg.norm(p.b, axis=1).max())
    assert p.gap(p.start) == c.F
    reached = np.zeros(3)
    corners = list(itertools.product((-1.0, 1.0), repeat=D))
    for w in [*rng.normal(scale=2, size=(1000, D)), *(1e-3 * np.array(corner) for corner in corners)]:
        for v in (*corners, *rng.normal(size=(3, D))):
            step = 1e-5 * np.array(v)
            change = p.gradient(w + step) - p.gradient(w)
            largest, length = np.abs(step).max(), np.linalg.norm(step)
            found = np.array(
                [np.linalg.norm(change) / length, np.linalg.norm(change) / largest, np.abs(change).max() / largest]
            )
            reached = np.maximum(reached, found)
        assert np.square(p.gradient(w)).sum() / 2 >= c.mu * p.gap(w) * (1 - 1e-9)
    limits = np.array([c.L, c.L_2inf, c.L_inf])
    assert (reached <= limits * (1 + 1e-4)).all()
    assert (reached >= 0.95 * limits).all()


def test_pl_constant_of_the_sine() -> None:
    x = np.linspace(1e-4, 10, 1_000_001)
    ratio = (2 * x + 3 * np.sin(2 * x)) ** 2 / (2 * (x**2 + 3 * np.sin(x) ** 2))
    assert ratio.min() == pytest.approx(SINE_MU, abs=1e-4)
    assert ratio.min() >= SINE_MU
    # Beyond: |h'| >= 2x - 3 and h <= x^2 + 3, whose ratio grows.
    assert SINE_MU < (2 * 10 - 3) ** 2 / (2 * (100 + 3))


@pytest.mark.parametrize("order", ["rr", "grab"])
def test_training_is_plain_sgd(order: str) -> None:
    """Against a loop that calls Algorithm 4's twin one gradient at a time."""
    p = objective("kinked", n=10, d=D, seed=2)
    alpha, w = 0.05, p.start.copy()
    sigma = list(ORDERS["rr"].build(None, 10, seed=5).history(0))
    m, gaps, total = np.zeros(D), [], 0.0
    for k in range(4):
        if order == "rr":
            sigma = list(ORDERS["rr"].build(None, 10, seed=5).history(k))
        total += np.square(p.gradient(w)).sum()
        seen = []
        for i in sigma:
            g = p.gradient(w) - p.b[i]
            seen.append(g)
            w = w - alpha * g
        gaps.append(p.gap(w))
        if order == "grab":
            signs = reference.balance([g - m for g in seen], reference.deterministic)
            assert signs is not None
            sigma = reference.reorder(signs, sigma)
            m = np.mean(seen, axis=0)
    found, means = convergence_rates.train(p, order, seed=5, alpha=alpha, epochs=[1, 4])
    assert found == pytest.approx([gaps[0], gaps[3]])
    assert means[1] == pytest.approx(total / 4)


@pytest.mark.parametrize("name", ["quadratic", "kinked", "sine", "noisy"])
def test_grab_keeps_what_theorem_3_proves(name: str) -> None:
    p = objective(name, n=16, d=D, seed=0)
    c, epochs, bound = p.constants, [2, 40], 16.0  # no signed sum of 16 unit vectors is longer than 16
    for step, proved, which in (
        (theory.grab_step, theory.grab_proved, 1),
        (theory.grab_step_pl, theory.grab_proved_pl, 0),
    ):
        for k, count in enumerate(epochs):
            alpha = step(c, n=16, epochs=count, balancing=bound)
            found = convergence_rates.train(p, "grab", seed=0, alpha=alpha, epochs=epochs)[which][k]
            assert found <= proved(c, n=16, epochs=count, balancing=bound)


def synthetic(
    config: convergence_rates.ConvergenceRates, order: str, powers: tuple[float, float]
) -> list[dict[str, Any]]:
    """Records whose tuned errors are K^a n^b times the seed, at the middle step of the grid."""
    records = []
    for name, n, seed in itertools.product(config.problems, config.sizes, range(config.seeds)):
        epochs = sorted({*config.epochs, config.at_epochs})
        errors = [
            [(1 + seed) * float(k) ** powers[0] * float(n) ** powers[1] * far for k in epochs] for far in (3, 1, 5, 9)
        ]
        c = objective(name, n=n, d=D, seed=seed).constants
        records.append(
            {"problem": name, "n": n, "seed": seed, "order": order, "epochs": epochs, "gap": errors, "gradient": errors}
            | {"steps": [0.1, 0.2, 0.4, 0.01], "theorem": [3] * len(epochs), "theorem_pl": [3] * len(epochs)}
            | {"constants": vars(c), "balancing": 4.0}
        )
    return records


def test_tables_find_the_exponents_of_made_up_records() -> None:
    config = replace(STUDIES["rates"].configure(quick=True), grid=(0.1, 0.2, 0.4), problems=("quadratic", "noisy"))
    records = synthetic(config, "grab", (-2.0, -1.5)) + synthetic(config, "rr", (-1.0, -0.5))
    rows = {row[:2]: row[2:] for row in config.tabulate(records)[1]}
    assert rows["quadratic", "GraB"] == (
        "-2.00 ± 0.00 (-2)",
        "-1.50 ± 0.00 (-2)",
        "-2.00 ± 0.00 (-2/3)",
        "-1.50 ± 0.00 (-2/3)",
        "9",
    )
    assert rows["noisy", "random reshuffling"][:2] == ("-1.00 ± 0.00 (-2)", "-0.50 ± 0.00 (-1)")
    said = " ".join(config.say(records))
    assert "K^(-2.00 ± 0.00) n^(-1.50 ± 0.00) for GraB (-2, -2)" in said
    assert "20 times smaller than the tuned one" in said
    assert "9 times as large" in said
    assert "first or last of the grid" not in said
    edge = [r | {"gap": r["gap"][1:] + r["gap"][:1]} for r in records]
    assert "first or last of the grid (noisy, quadratic)" in " ".join(config.say(edge))
