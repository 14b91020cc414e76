"""Batches that are cut up: which are, and what becomes of the rest when one piece fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import BALANCERS, cut_up
from torch import nn

from benchmarks.models import logistic, mlp, tiny_bert
from ordain import GraB
from ordain.errors import MemoryLimitError, OrdainWarning
from ordain.gradients import few, memory
from ordain.gradients.rows import Rows
from ordain.study.tasks.images import lenet
from ordain.study.tasks.language import LanguageModel

N, SIZE, STEPS, WIDE = 26, 12, 5, 7
CENTERINGS = pytest.mark.parametrize("centering", ["mean", "pair"])


class Run:
    """Training steps on a layer over several steps, whose gradients are had by making them, and an embedding."""

    def __init__(self, centering, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(9, WIDE), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 3)).double()
        self.words = torch.randint(9, (N, STEPS))
        self.scale = torch.ones(N, 1, 1, dtype=torch.float64)
        self.order = GraB(self.model, N, centering=centering, seed=1, **options)

    def batches(self):
        drawn = list(self.order.sampler)
        return [drawn[at : at + SIZE] for at in range(0, N, SIZE)]

    def backward(self, batch):
        (self.model(self.words[batch]) * self.scale[batch]).sin().sum(dim=(1, 2)).mean().backward()

    def epoch(self):
        for batch in self.batches():
            self.backward(batch)
            self.order.step()
        return self.order

    def signs(self):
        """Of this epoch, by example."""
        signs = np.empty(N, dtype=np.int64)
        signs[self.order.history(self.order.epoch)] = self.order._places
        return signs


@pytest.mark.parametrize(
    ("build", "x", "cut"),
    [
        (tiny_bert, lambda: torch.randint(100, (20, 32)), True),
        (lambda: LanguageModel(10_000), lambda: torch.randint(10_000, (20, 35)), True),
        (mlp, lambda: torch.randn(20, 1024), False),  # one step: the Gram matrix comes from the factors
        (lenet, lambda: torch.randn(20, 3, 32, 32), False),  # most of it is, too
        (lambda: nn.Sequential(nn.Conv2d(32, 256, 3), nn.Flatten()), lambda: torch.randn(20, 32, 6, 6), False),
        (logistic, lambda: torch.randn(20, 784), False),
    ],
)
@CENTERINGS
def test_which_batches_are_cut_up(build, x, cut, centering, monkeypatch):
    """Where gradients are made, and a few of them have room."""
    model, taken = build(), []
    monkeypatch.setattr(few, "cut", lambda batch, size: taken.append(size) or iter(()))
    order = GraB(model, 40, centering=centering)
    list(order.sampler)
    model(x()).square().mean().backward()
    order.step()
    assert taken == ([8 if centering == "mean" else 16] if cut else [])


@CENTERINGS
def test_what_has_no_room_is_not_cut_up(centering, monkeypatch):
    cut_up(monkeypatch, vectors=4)
    monkeypatch.setattr(few, "FEWEST", 4)
    width = WIDE * (WIDE + 1) + 3 * (WIDE + 1)
    for numbers, cut in ((4 * width, True), (4 * width - 1, False)):
        monkeypatch.setattr(memory, "CHUNK_NUMBERS", numbers)
        run = Run(centering)
        run.backward(run.batches()[0])
        (batch,) = run.order._source.collect()
        assert (few.pieces(batch, paired=centering == "pair") is not None) == cut


def failing(monkeypatch, name, error, *, at, of=few.Few):
    """The call of a method that fails."""
    method, calls = getattr(of, name), []

    def scarce(self, *args, **options):
        calls.append(len(calls))
        if len(calls) == at:
            raise error
        return method(self, *args, **options)

    monkeypatch.setattr(of, name, scarce)
    return calls


@CENTERINGS
def test_memory_that_runs_out_between_two_pieces_counts_nothing_twice(centering, monkeypatch):
    cut_up(monkeypatch, vectors=2)
    plain, run = Run(centering), Run(centering)
    plain.epoch()
    calls = failing(monkeypatch, "_make", MemoryError(), at=2)
    run.epoch()
    assert len(calls) > 3
    assert (run.signs() == plain.signs()).all()
    torch.testing.assert_close(run.order._vectors["table"], plain.order._vectors["table"], rtol=1e-12, atol=1e-12)
    assert list(run.order.sampler) == list(plain.order.sampler)


@pytest.mark.parametrize(("name", "at"), [("add_weighted", 1), ("select", 1), ("select", 5)])
@CENTERINGS
def test_memory_that_runs_out_once_in_a_piece(centering, name, at, monkeypatch):
    """In the sum of the epoch's first piece, or as a piece is taken: nothing is lost and nothing counted twice."""
    cut_up(monkeypatch, vectors=2)
    plain, run = Run(centering), Run(centering)
    plain.epoch()
    calls = failing(monkeypatch, name, MemoryError(), at=at, of=Rows)
    run.epoch()
    assert len(calls) > at
    assert (run.order._signed, run.order._summed) == (plain.order._signed, plain.order._summed)
    torch.testing.assert_close(run.order._vectors["table"], plain.order._vectors["table"], rtol=1e-12, atol=1e-12)
    assert list(run.order.sampler) == list(plain.order.sampler)


@CENTERINGS
def test_another_default_device_is_not_ours(centering, monkeypatch):
    cut_up(monkeypatch, vectors=2)
    plain, run = Run(centering).epoch(), Run(centering)
    for batch in run.batches():
        run.backward(batch)
        with torch.device("meta"):
            run.order.step()
    assert list(run.order.sampler) == list(plain.sampler)


@CENTERINGS
def test_memory_that_has_run_out_for_good(centering, monkeypatch):
    """The first pieces are in the sums and the batch is given up: they begin at zero, and every example is drawn."""
    cut_up(monkeypatch, vectors=2)
    run = Run(centering)
    first, second, third = run.batches()
    run.backward(first)
    run.order.step()
    before = run.order._places.copy()
    make, calls = few.Few._make, []

    def scarce(self, *args):
        calls.append(self)
        if len(calls) > 1:
            raise MemoryError
        return make(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(few.Few, "_make", scarce)
        run.backward(second)
        with pytest.raises(MemoryLimitError, match=r"order\.skip"):
            run.order.step()
    assert not run.order._vectors["table"][0].any()
    run.order.skip(len(second))
    run.backward(third)
    run.order.step()
    assert (run.order._places[:SIZE] == before[:SIZE]).all()  # signs that were given stay
    assert sorted(run.order.sampler) == list(range(N))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("fault")])
@pytest.mark.parametrize("at", [1, 2])
@CENTERINGS
def test_a_piece_that_is_cut_off_in_its_sum(centering, at, error, monkeypatch):
    cut_up(monkeypatch, vectors=2)
    run = Run(centering)
    first, *rest = run.batches()
    failing(monkeypatch, "add_signed" if centering == "mean" else "add_paired", error, at=at)
    run.backward(first)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        run.order.step()
    assert not run.order._vectors["table"][0].any()
    run.order.skip(len(first))
    for batch in rest:
        run.backward(batch)
        run.order.step()
    assert sorted(run.order.sampler) == list(range(N))


@CENTERINGS
def test_what_is_not_finite_is_set_aside_in_its_piece_only(centering, monkeypatch):
    """The others have the signs that whole batches give them."""
    runs = []
    for cut in (False, True):
        with monkeypatch.context() as patch:
            taken = cut_up(patch, vectors=2) if cut else []
            run = Run(centering)
            run.scale[run.order.history(0)[5]] = torch.inf
            with pytest.warns(OrdainWarning, match="not finite"):
                run.epoch()
            assert bool(taken) == cut
            runs.append(run)
    whole, pieces = runs
    assert pieces.order.set_aside == whole.order.set_aside == 1
    assert (pieces.signs() == whole.signs()).all()


@pytest.mark.parametrize("balancer", BALANCERS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@CENTERINGS
def test_cut_up_or_whole_is_the_same(centering, reduction, balancer, monkeypatch):
    orders = []
    for cut in (False, True):
        with monkeypatch.context() as patch:
            if cut:
                cut_up(patch, vectors=3)
            run = Run(centering, balancer=BALANCERS[balancer], loss_reduction=reduction)
            for _ in range(3):
                run.epoch()
            orders.append([run.order.history(epoch).tolist() for epoch in range(3)])
    assert orders[0] == orders[1]
