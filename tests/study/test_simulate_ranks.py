"""Ranks in one process: each way of sharing against slow loops, and what is sent against real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from numpy.typing import NDArray
from torch import nn
from typer.testing import CliRunner

from ordain import herding, reference
from ordain.errors import InputError
from ordain.study import cli
from ordain.study.tasks import TASKS
from ordain.study.tasks.images import lenet
from ordain.study.vectors.rank_simulation import (
    DIGITS,
    METHODS,
    MODELS,
    Layer,
    Sharing,
    payload,
    simulate,
    sketched,
    vectors,
)

Order = list[int]


def random(n: int, d: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).random((n, d))


def simulated(z: NDArray[Any], way: Sharing, epochs: int = 3, seed: int = 7) -> list[Order]:
    return [sigma.tolist() for sigma in simulate(z, way, epochs=epochs, seed=seed)]


# --- each way, one vector after the other --------------------------------------------------------------


def slow_places(vectors_in_turn: list[Any], s: Any) -> tuple[list[int], Any]:
    signs = []
    for v in vectors_in_turn:
        signs.append(reference.deterministic(s, v))
        s = s + signs[-1] * v
    return signs, s


def slow_sum(z: NDArray[Any], sigma: Order, way: Sharing, mean: Any) -> Order:
    shared, signs = np.zeros(z.shape[1]), {}
    for start in range(0, len(z), way.world * way.each):
        step = range(start, min(len(z), start + way.world * way.each))
        sums = []
        for rank in range(way.world):
            own = [p for p in step if p % way.world == rank]
            if way.paired:
                pairs = list(zip(own[0::2], own[1::2], strict=False))
                found, s = slow_places([z[sigma[p]] - z[sigma[q]] for p, q in pairs], shared)
                signs |= {p: e for (p, _), e in zip(pairs, found, strict=True)}
                signs |= {q: -e for (_, q), e in zip(pairs, found, strict=True)}
            else:
                found, s = slow_places([z[sigma[p]] - mean for p in own], shared)
                signs |= dict(zip(own, found, strict=True))
            sums.append(s - shared)
        shared = shared + sum(sums)
    places = [signs.get(p, 0) for p in range(len(z))]
    front, back = ([sigma[p] for p, e in enumerate(places) if e == sign] for sign in (1, -1))
    return front + [sigma[p] for p, e in enumerate(places) if e == 0] + back[::-1]


def slow_orders(z: NDArray[Any], way: Sharing, first: Order, epochs: int) -> list[Order]:
    found, w = [first], way.world
    books: list[Any] = [
        (reference.PairGraB if way.paired else reference.GraB)(
            first if way.method == "exact" else first[rank::w], z.shape[1]
        )
        for rank in range(1 if way.method == "exact" else w)
    ]
    for epoch in range(epochs):
        sigma = found[-1]
        if way.method == "sum":
            mean = sum(z) / len(z) if epoch else np.zeros(z.shape[1])
            found.append(slow_sum(z, sigma, way, mean))
        elif way.method == "exact":
            for i in sigma:
                books[0].see(z[i])
            found.append(books[0].next_order())
        else:
            if way.method == "independent":
                for p, i in enumerate(sigma):
                    books[p % w].see(z[i])
            else:  # the server: one sum for all, their pairs in turn
                s = np.zeros(z.shape[1])
                for p in range(0, len(z), 2 * w):
                    for rank in range(w):
                        books[rank].s = s
                        books[rank].see(z[sigma[p + rank]])
                        books[rank].see(z[sigma[p + w + rank]])
                        s = books[rank].s
            new = [0] * len(z)
            for rank in range(w):
                new[rank::w] = books[rank].next_order()
            found.append(new)
    return found


@settings(max_examples=30, deadline=None)
@given(
    method=st.sampled_from(["exact", "sum", "independent", "cd-grab"]),
    paired=st.booleans(),
    world=st.integers(1, 5),
    each=st.integers(1, 5),
    share=st.integers(1, 4),
    d=st.integers(1, 4),
)
def test_every_way_is_its_slow_loop(method: str, paired: bool, world: int, each: int, share: int, d: int) -> None:
    n = world * share * (2 if method == "cd-grab" else 1)
    z, way = random(n, d, seed=n), Sharing(method, paired=paired or method == "cd-grab", world=world, each=each)
    found = simulated(z, way)
    assert found == slow_orders(z, way, found[0], 3)
    assert all(sorted(sigma) == list(range(n)) for sigma in found)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("each", [2, 16])
def test_one_rank_is_one_process(paired: bool, each: int) -> None:
    z = random(96, 5)
    exact = simulated(z, Sharing("exact", paired=paired))
    assert simulated(z, Sharing("sum", paired=paired, world=1, each=each)) == exact
    assert simulated(z, Sharing("independent", paired=paired)) == exact
    if paired:
        assert simulated(z, Sharing("cd-grab", paired=True)) == exact


def test_ranks_of_one_example_all_use_the_sum_before_the_step() -> None:
    """Then a step's signs do not depend on each other, and in the first all are those of a sum of 0."""
    z = random(64, 5)
    first, second = simulated(z, Sharing("sum", world=64, each=1), epochs=1)
    assert second == first[::-1]  # every sign is -1
    z, way = random(64, 5), Sharing("sum", world=8, each=1)
    first, second = simulated(z, way, epochs=1)
    s, signs = np.zeros(5), []
    for start in range(0, 64, 8):
        step = z[first[start : start + 8]]
        found = np.where(step @ s < 0, 1, -1)
        signs += found.tolist()
        s = s + found @ step
    assert second == reference.reorder(signs, first)


def test_random_orders_are_new_each_epoch_and_the_first_is_common() -> None:
    z = random(48, 3)
    found = simulated(z, Sharing("rr"))
    assert len({tuple(sigma) for sigma in found}) == 4
    for method in METHODS:
        assert simulated(z, Sharing(method, paired=True, world=2, each=4))[0] == found[0]


def test_shards_stay_with_their_rank() -> None:
    z = random(48, 3)
    for method in ("independent", "cd-grab"):
        found = simulated(z, Sharing(method, paired=True, world=4))
        assert all(set(sigma[r::4]) == set(found[0][r::4]) for sigma in found for r in range(4))
        assert found[1] != found[0]


def test_long_sketches_herd_as_well() -> None:
    z = random(2048, 16)
    small = sketched(z, 8, seed=1)
    large = sketched(z, 4096, seed=1)
    assert small.shape[1] <= 8
    assert large.shape[1] <= 16  # places that nothing goes to are left out
    np.testing.assert_allclose(np.square(large).sum(1), np.square(z).sum(1), rtol=0.2)

    def quality(seen: NDArray[Any]) -> float:
        *_, last = simulate(seen, Sharing("exact"), epochs=8, seed=0)
        return herding.herding_objective(z, last, norm=2)

    exact = quality(z)
    assert quality(large) < 1.2 * exact
    assert quality(small) > 1.2 * exact


@pytest.mark.parametrize(
    ("way", "n"),
    [
        (Sharing("sum", world=3), 64),
        (Sharing("cd-grab", world=8), 8),
        (Sharing("sum", each=0), 8),
        (Sharing("gossip"), 8),
    ],
)
def test_what_cannot_be_dealt_is_refused(way: Sharing, n: int) -> None:
    with pytest.raises(InputError, match=r"vectors on|a method"):
        next(simulate(random(n, 2), way, epochs=1, seed=0))


def test_gradients_on_digits_are_the_loop_s() -> None:
    """Softmax regression: (p - y) x' and p - y; p from the gradient itself says that they belong together."""
    z = vectors("digits", 64, 4, 0)
    assert z.shape == (64, 650)
    bias = z[:, 640:]
    np.testing.assert_allclose(bias.sum(axis=1), 0, atol=1e-5)
    assert ((bias < 0).sum(axis=1) == 1).all()  # the right class's alone
    assert np.linalg.matrix_rank(z[0, :640].reshape(10, 64), tol=1e-4) == 1
    assert len(np.unique(z, axis=0)) == 64
    assert np.array_equal(z, vectors.__wrapped__("digits", 64, 4, 0))
    assert not np.array_equal(z, vectors.__wrapped__("digits", 64, 4, 1))


# --- what is sent ----------------------------------------------------------------------------------------


def test_models_have_the_parameters_of_real_ones() -> None:
    count = {name: sum(layer.numel for layer in layers) for name, layers in MODELS.items()}
    mlp = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)), nn.Linear(1024, 10))
    assert count["MLP 4 x 1024"] == sum(p.numel() for p in mlp.parameters())
    assert count["LeNet"] == sum(p.numel() for p in lenet().parameters())
    assert count["logistic 784-10"] == TASKS["mnist"].parameters
    assert count["tiny BERT, T=32"] == TASKS["sst2"].parameters
    assert sum(layer.numel for layer in DIGITS) == TASKS["digits"].parameters


def test_bytes() -> None:
    layer = Layer(64, 10)
    assert payload((layer,), "exact", each=16) == 4 * 16 * 74
    assert payload((layer,), "exact", each=16, sketch=256) == 4 * 16 * 256
    assert payload((layer,), "sum", each=16) == 4 * 650 + 16
    assert payload((layer,), "cd-grab", each=16) == 4 * 16 * 650
    assert payload((layer,), "independent", each=16) == payload((layer,), "rr", each=16) == 0
    assert Layer(75, 6, 784).exact == 456  # smaller than its factors
    assert Layer(128, 30_522, 32, bias=False, table=True).exact == 32 * 129
    assert Layer(128, 2, 32, bias=False, table=True).exact == 256


# --- the command -----------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    words = [
        "simulate-ranks",
        "--quick",
        "--seeds",
        "1",
        "--out",
        str(tmp_path / "run"),
        "--plot",
        str(tmp_path / "plot"),
    ]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    assert "CD-GraB on 4 ranks leaves a longest prefix sum" in result.stdout
    assert "tiny BERT, T=32" in result.stdout
    assert f"{4 * 4 * TASKS['sst2'].parameters:,}" in result.stdout  # CD-GraB's bytes for it, at 4 examples a rank
    names = {path.name for path in (tmp_path / "plot").iterdir()}
    assert names == {f"{name}.{kind}" for name in ("quality-by-ranks", "bytes-and-quality") for kind in ("png", "svg")}
    assert all(imread(path).ndim == 3 for path in (tmp_path / "plot").glob("*.png"))
    (tmp_path / "file").write_text("x")
    refused = CliRunner().invoke(cli.app, ["simulate-ranks", "--quick", "--out", str(tmp_path / "file")])
    assert refused.exit_code == 2
