"""The strongly convex study: its minimum, its SGD and its best rates against plain computations."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

from ordain import reference
from ordain.study.vectors import STUDIES, convex
from ordain.study.vectors.convex import Convex, Regression

X = np.random.default_rng(0).normal(size=(24, 3)) / 3
Y = np.where(np.random.default_rng(1).random(24) < 0.5, -1.0, 1.0)
PROBLEM = Regression(X, Y, 0.01)


def test_the_minimum() -> None:
    found = minimize(PROBLEM.value, np.zeros(3), tol=1e-12)
    best = PROBLEM.value(PROBLEM.best())
    assert best <= found.fun
    assert best == pytest.approx(found.fun, abs=1e-9)


@pytest.mark.parametrize("decay", ["constant", "cosine"])
@pytest.mark.parametrize("order", ["rr", "grab"])
def test_sgd_is_a_plain_loop(order: str, decay: str) -> None:
    found = convex.train(PROBLEM, order, seed=0, rate=0.5, decay=decay, epochs=3)
    w, sigma, mean = np.zeros(3), convex.ORDERS["rr"].build(None, 24, seed=0).history(0), np.zeros(3)
    for epoch in range(3):
        if order == "rr":
            sigma = convex.ORDERS["rr"].build(None, 24, seed=0).history(epoch)
        gradients = []
        for step, i in enumerate(sigma):
            rate = 0.5 if decay == "constant" else 0.25 * (1 + np.cos(np.pi * (24 * epoch + step) / 72))
            gradients.append(0.01 * w - Y[i] / (1 + np.exp(Y[i] * (X[i] @ w))) * X[i])
            w = w - rate * gradients[-1]
        assert found[epoch] == pytest.approx(w)
        if order == "grab":
            signs = reference.balance(np.array(gradients) - mean, reference.deterministic)
            assert signs is not None
            sigma, mean = np.array(reference.reorder(signs, sigma.tolist())), np.mean(gradients, axis=0)


def test_divergence_is_no_best_rate() -> None:
    config = Convex(epochs=4, grid=(0.5, 1e300))
    gaps = [convex.train(PROBLEM, "rr", seed=0, rate=rate, decay="constant", epochs=4) for rate in config.grid]
    record = {"gap": [[PROBLEM.value(w) if np.isfinite(w).all() else 1e300 for w in of] for of in gaps]}
    assert config.best([record])[0] == 0


def test_exponents() -> None:
    """Gaps of 7 n^-1.5 K^-2 at the rate that is best for K, among rates that are best for other numbers of epochs."""
    config = Convex(epochs=20, sizes=(100, 200, 400), grid=(1.0, 2.0))
    epochs = np.arange(1.0, 21.0)
    records = []
    for n, seed, decay in product(config.sizes, range(3), config.decays):
        best = 7 * n**-1.5 * epochs**-2 * (1 + 0.1 * seed)
        gap = [np.where(epochs < 10, best, 2 * best).tolist(), np.where(epochs < 10, 3 * best, best).tolist()]
        records.append(
            {"problem": "digits", "n": n, "order": "rr", "decay": decay, "seed": seed, "gap": gap, "examples": n}
        )
    exact = config.by_examples(records, "digits", "rr")
    assert exact.mean == pytest.approx(-1.5)
    assert exact.error == pytest.approx(0, abs=1e-6)
    for record in records:  # a gap that is off the line counts as an error of its slope
        record["gap"] = [[gap * (2.0 if record["n"] == 200 else 1.0) for gap in of] for of in record["gap"]]
    off = config.by_examples(records, "digits", "rr")
    assert off.mean == pytest.approx(-1.5)
    residuals = np.log(2) * np.array([-1, 2, -1]) / 3
    assert off.error == pytest.approx(np.sqrt(residuals @ residuals / (2 * np.log(2) ** 2)))
    assert config.by_epochs(records, "digits", "rr").mean == pytest.approx(-2)


def test_a_quick_run(tmp_path: Path) -> None:
    study = STUDIES["convex"]
    config = study.configure(quick=True)
    study.run(config, tmp_path, lambda *_: None)
    headings, rows = study.table(tmp_path)
    assert headings[-1] == "f - f* after 6 epochs"
    gaps = {(row[1], row[2]): float(row[5]) for row in rows}
    assert all(float(row[4]) > 0 for row in rows)
    assert gaps["400", "SAG (scikit-learn)"] < gaps["400", "random reshuffling, constant"]
    assert all(gap > 0 for gap in gaps.values())
    assert set(study.figures(tmp_path)) == {"convex"}
    by_n, by_length = study.sentences(tmp_path)
    assert "falls like random reshuffling n^(" in by_n
    assert "and GraB K^(" in by_length
    assert by_n.count("(bound: n^") == by_length.count("(bound: K^-2)") == 2
