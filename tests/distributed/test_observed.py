"""Ranks whose gradients are given: uneven rests, batches passed over, gradients that are not finite, and resuming."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from helpers import gradient_field
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import ThreadRanks, run_ranks

from ordain import GraB, RandomReshuffling
from ordain.distributed import Distributed
from ordain.distributed.rank_view import dealt
from ordain.errors import GradientError, InputError, RanksError, StepError

pytestmark = pytest.mark.filterwarnings("ignore::ordain.errors.OrdainWarning")


def rows(field: Any, drawn: list[int], epoch: int, bad: set[int]) -> np.ndarray:
    return np.stack([np.full(3, np.nan) if i in bad else field(i, epoch) for i in drawn])


def one_process(n: int, batch: int, epochs: int, *, bad: set[int] = frozenset(), **options: Any) -> list[list[int]]:
    """What one process does with global batches; the oracle."""
    order, field = GraB(None, n, distributed=False, **options), gradient_field(n, 3)
    for _ in range(epochs):
        indices = iter(order.sampler)
        while drawn := list(islice(indices, batch)):
            order.observe(rows(field, drawn, order.epoch, bad))
    next(iter(order.sampler))
    return [order.history(epoch).tolist() for epoch in range(epochs + 1)]


def a_rank(
    ranks: ThreadRanks,
    n: int,
    batch: int,
    epochs: int,
    *,
    bad: set[int] = frozenset(),
    tail: Any = "repeat",
    visits: list[Any] | None = None,
    **options: Any,
) -> list[list[int]]:
    order = GraB(None, n, distributed=Distributed(ranks=ranks, tail=tail), **options)
    field = gradient_field(n, 3)
    for _ in range(epochs):
        seen: list[int] = []
        indices = iter(order.sampler)
        while drawn := list(islice(indices, batch)):
            order.observe(rows(field, drawn, order.epoch, bad))
            seen += drawn
        while tail == "uneven" and len(seen) < -(-n // ranks.size) and order.state_dict()["taken"] < n:
            order.joinable.join_hook().main_hook()
        if visits is not None:
            visits.append((ranks.rank, order.epoch, seen))
    next(iter(order.sampler), None)
    return [order.history(epoch).tolist() for epoch in range(epochs + 1)]


@settings(max_examples=30)
@given(
    n=st.integers(1, 40),
    ranks=st.integers(1, 4),
    batch=st.integers(1, 5),
    centering=st.sampled_from(["mean", "pair"]),
    group=st.sampled_from([1, 1, 2, 3]),
    bad=st.sets(st.integers(0, 39), max_size=3),
)
def test_any_number_of_examples_and_ranks(
    n: int, ranks: int, batch: int, centering: Any, group: int, bad: set[int]
) -> None:
    options: dict[str, Any] = {"centering": centering, "group": group, "bad": bad}
    expected = one_process(n, ranks * batch, 3, **options)
    for histories in run_ranks(ranks, lambda one: a_rank(one, n, batch, 3, **options)):
        assert histories == expected


@pytest.mark.parametrize(("n", "ranks", "batch"), [(11, 2, 2), (10, 3, 2), (9, 4, 1), (5, 4, 3)])
@pytest.mark.parametrize("tail", ["repeat", "drop", "uneven"])
def test_every_example_once(n: int, ranks: int, batch: int, tail: Any) -> None:
    visits: list[Any] = []
    answers = run_ranks(ranks, lambda one: a_rank(one, n, batch, 3, tail=tail, visits=visits))
    assert all(one == answers[0] for one in answers)
    if tail != "drop":
        assert answers[0] == one_process(n, ranks * batch, 3)
    for epoch in range(3):
        seen = {rank: indices for rank, number, indices in visits if number == epoch}
        order = answers[0][epoch]
        rest = n % ranks
        if tail == "drop":
            assert sorted(i for indices in seen.values() for i in indices) == sorted(order[: n - rest])
        for rank, indices in seen.items():
            end = {"drop": n - rest, "uneven": n, "repeat": n + (-n) % ranks}[tail]
            assert indices == (order + order)[rank:end:ranks]


def test_the_dropped_change_from_epoch_to_epoch() -> None:
    order = run_ranks(3, lambda one: a_rank(one, 10, 3, 6, tail="drop"))[0]
    assert len({tuple(one[9:]) for one in order}) > 1


@pytest.mark.parametrize("each", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 7, 12, 13, 24])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_dealt_positions(n: int, ranks: int, each: int) -> None:
    uneven = [dealt(n, ranks=ranks, rank=r, each=each, tail="uneven") for r in range(ranks)]
    assert sorted(np.concatenate(uneven).tolist()) == list(range(n))
    repeated = [dealt(n, ranks=ranks, rank=r, each=each) for r in range(ranks)]
    assert {p for one in repeated for p in one.tolist() if p < n} == set(range(n))
    dropped = np.concatenate([dealt(n, ranks=ranks, rank=r, each=each, tail="drop") for r in range(ranks)])
    assert len(set(dropped.tolist())) == len(dropped) == min(n, -(-n // each) // ranks * ranks * each)


def test_a_batch_passed_over_by_one_rank() -> None:
    """Its examples keep the middle; the others' are learned from, as if one process had set those aside."""
    n, field = 12, gradient_field(12, 3)

    def job(ranks: ThreadRanks) -> list[int]:
        order = GraB(None, n, distributed=Distributed(ranks=ranks))
        indices = iter(order.sampler)
        for step in range(3):
            drawn = list(islice(indices, 2))
            if step == 1 and ranks.rank == 1:
                order.skip(2)
            else:
                order.observe(rows(field, drawn, 0, set()))
        next(iter(order.sampler))
        return order.history(1).tolist()

    first, second = run_ranks(2, job)
    order = GraB(None, n, distributed=False)
    indices = list(order.sampler)
    kept = np.array([i for i in range(n) if i not in (5, 7)])
    for lo, hi in ((0, 4), (4, 8), (8, 12)):
        these = kept[(kept >= lo) & (kept < hi)]
        order.observe(rows(field, [indices[i] for i in these], 0, set()), np.array(indices)[these])
    next(iter(order.sampler))
    assert first == second == order.history(1).tolist()


def test_an_error_of_one_rank_is_raised_by_all() -> None:
    def job(ranks: ThreadRanks) -> str:
        order = GraB(None, 8, distributed=Distributed(ranks=ranks))
        list(islice(order.sampler, 4))
        order.observe(np.ones((2, 3)))
        try:
            order.observe(np.ones((2, 3), dtype=np.int64) if ranks.rank == 1 else np.ones((2, 3)))
        except (GradientError, RanksError) as error:
            assert order.state_dict()["taken"] == 4
            return f"{type(error).__name__}: {error}"
        return ""

    zero, one = run_ranks(2, job)
    assert zero.startswith("RanksError: got an error in order.step() on rank 1")
    assert one.startswith("GradientError")


@pytest.mark.parametrize(
    ("differs", "options"),
    [("n", {"n": 9}), ("seed", {"seed": 4}), ("centering", {"centering": "pair"}), ("group", {"group": 2})],
)
def test_ranks_built_differently_are_told(differs: str, options: dict[str, Any]) -> None:
    def job(ranks: ThreadRanks) -> str:
        given = {"n": 8, "seed": 0} | (options if ranks.rank == 1 else {})
        with pytest.raises(RanksError, match=f"different {differs}: .* on rank 0, .* on rank 1"):
            GraB(None, distributed=Distributed(ranks=ranks), **given)
        return "told"

    assert run_ranks(2, job) == ["told", "told"]


def test_other_models_and_orders_are_told() -> None:
    def model(ranks: ThreadRanks) -> None:
        with pytest.raises(RanksError, match="different length of gradients: 6 on rank 0, 8 on rank 1"):
            GraB(torch.nn.Linear(2 + ranks.rank, 2), 8, distributed=Distributed(ranks=ranks))

    def order(ranks: ThreadRanks) -> None:
        kind = GraB if ranks.rank else (lambda _, n, **options: RandomReshuffling(n, **options))
        with pytest.raises(RanksError, match="different order: RandomReshuffling on rank 0, GraB on rank 1"):
            kind(None, 8, distributed=Distributed(ranks=ranks))

    run_ranks(2, model)
    run_ranks(2, order)


def test_an_order_made_before_the_ranks_met_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank would visit all of it, in silence."""
    order, alone = GraB(None, 8), GraB(None, 8, distributed=False)
    monkeypatch.setattr("ordain.distributed.rank_view.other_ranks", lambda: True)
    assert len(list(alone.sampler)) == 8
    with pytest.raises(StepError, match="created before init_process_group"):
        list(order.sampler)


def test_unknown_modes_and_tails_are_refused() -> None:
    with pytest.raises(InputError, match="mode='server'"):
        GraB(None, 8, distributed="server")
    with pytest.raises(InputError, match="tail='cut'"):
        Distributed(tail="cut")
    with pytest.raises(InputError, match="without a process group"):
        GraB(None, 8, distributed="exact")


def test_fewer_examples_than_ranks() -> None:
    def job(ranks: ThreadRanks) -> list[int]:
        for tail in ("drop", "uneven"):
            with pytest.raises(InputError, match="n=2 examples for 3 ranks"):
                GraB(None, 2, distributed=Distributed(ranks=ranks, tail=tail))
        return list(GraB(None, 2, distributed=Distributed(ranks=ranks)).sampler)

    visited = run_ranks(3, job)
    assert [len(one) for one in visited] == [1, 1, 1]
    assert {i for one in visited for i in one} == {0, 1}


def test_a_rank_s_own_error_is_not_lost_with_the_others() -> None:
    """Those that it waits for in vain are the effect, not the cause."""

    def job(ranks: ThreadRanks) -> None:
        order = GraB(None, 4, distributed=Distributed(ranks=ranks))
        list(order.sampler)

        def lost(_: torch.Tensor) -> torch.Tensor:
            raise RanksError("no answer", expected="one", remedy="None.")

        ranks.gather = lost  # type: ignore[method-assign]
        with pytest.raises(GradientError, match="floating-point") as raised:
            order.observe(np.ones((2, 3), dtype=np.int64))
        assert isinstance(raised.value.__cause__, RanksError)

    run_ranks(1, job)


def test_batches_of_different_sizes_are_refused() -> None:
    def job(ranks: ThreadRanks) -> None:
        order = GraB(None, 12, distributed=Distributed(ranks=ranks))
        list(islice(order.sampler, 4))
        with pytest.raises(RanksError, match=r"batches of \[2, 3\]"):
            order.observe(np.ones((2 + ranks.rank, 3)))
        assert order.state_dict()["taken"] == 0

    run_ranks(2, job)


def test_ranks_out_of_step_are_told() -> None:
    def job(ranks: ThreadRanks) -> None:
        order = GraB(None, 8, distributed=Distributed(ranks=ranks))
        list(islice(order.sampler, 4))
        if ranks.rank == 1:
            later = {"epoch": 1, "origin": 1, "origin_arrangement": torch.arange(8)}
            order.load_state_dict(order.state_dict(history=False) | later)
            order.resume()
            list(islice(order.sampler, 4))
        with pytest.raises(RanksError, match="different epoch"):
            order.observe(np.ones((2, 3)))

    run_ranks(2, job)


def test_indices_and_more_than_was_drawn_are_refused() -> None:
    def job(ranks: ThreadRanks) -> None:
        order = GraB(None, 8, distributed=Distributed(ranks=ranks))
        list(islice(order.sampler, 2))
        with pytest.raises(InputError, match="indices"):
            order.observe(np.ones((2, 3)), [0, 1])
        with pytest.raises(StepError, match="3 examples to observe, but only 2 drawn"):
            order.observe(np.ones((3, 3)))

    run_ranks(2, job)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (1, 4), (4, 2)])
def test_resumed_under_another_number_of_ranks(before: int, after: int) -> None:
    """The global order is dealt anew; with the same global batches nothing else changes."""
    n, field, batch = 48, gradient_field(48, 3), 12

    def start(ranks: ThreadRanks) -> Any:
        order = GraB(None, n, distributed=Distributed(ranks=ranks))
        for steps in (4, 2):
            indices = iter(order.sampler)
            for _ in range(steps):
                order.observe(rows(field, list(islice(indices, batch // before)), order.epoch, set()))
        return order.state_dict()

    states = run_ranks(before, start)

    def go_on(ranks: ThreadRanks) -> Any:
        order = GraB(None, n, distributed=Distributed(ranks=ranks))
        order.load_state_dict(states[0])
        assert order.resume() == 1
        for steps in (2, 4):
            indices = iter(order.sampler)
            for _ in range(steps):
                order.observe(rows(field, list(islice(indices, batch // after)), order.epoch, set()))
        next(iter(order.sampler))
        return [order.history(epoch).tolist() for epoch in range(4)]

    answers = run_ranks(after, go_on)
    assert all(one == answers[0] for one in answers)
    assert all(sorted(one) == list(range(n)) for one in answers[0])
    assert answers[0] == one_process(n, batch, 3)


def test_random_reshuffling_is_dealt() -> None:
    def job(ranks: ThreadRanks) -> Any:
        order = RandomReshuffling(10, seed=3, distributed=Distributed(ranks=ranks))
        passes = []
        for epoch in range(3):
            order.sampler.set_epoch(epoch)
            passes.append(list(order.sampler))
            order.step()
        return passes

    alone = RandomReshuffling(10, seed=3, distributed=False)
    for rank, passes in enumerate(run_ranks(2, job)):
        assert passes == [alone.history(epoch)[rank::2].tolist() for epoch in range(3)]
