"""Nothing that happens on one rank only may leave the others waiting, or make the ranks' orders differ unseen."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from helpers import gradient_field
from thread_ranks import ThreadRanks, run_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

from ordain import GraB, Herding
from ordain.distributed import Distributed
from ordain.distributed.global_batch import GlobalBatch
from ordain.errors import MemoryLimitError, OrdainError
from ordain.gradients.factored import Factored

pytestmark = pytest.mark.filterwarnings("ignore::ordain.errors.OrdainWarning")
N = 24


def observed(order: GraB, indices: Any, batch: int = 3) -> np.ndarray:
    drawn = list(islice(indices, batch))
    return np.stack([gradient_field(N, 3)(i, order.epoch) for i in drawn])


def same(one: Any, other: Any) -> bool:
    """Are two states the same?"""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def said(job: Any) -> str:
    try:
        job()
    except (OrdainError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# --- a loss that is not a number -------------------------------------------------------------------


def trained(order: GraB, model: nn.Module, batch: int, spoilt: set[int], total: Any) -> Any:
    """Two epochs; in step 0 and 2 of the first the losses of some examples are NaN, and no optimizer step is made."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(N, 6, generator=generator).double(), torch.randint(3, (N,), generator=generator)
    for epoch in range(2):
        indices = iter(order.sampler)
        step = 0
        while drawn := list(islice(indices, batch)):
            losses = cross_entropy(model(x[drawn]), y[drawn], reduction="none")
            bad = torch.tensor([epoch == 0 and step in (0, 2) and i in spoilt for i in drawn])
            (losses * torch.where(bad, torch.nan, 1.0)).mean().backward()
            order.step()
            grads = [p.grad for p in model.parameters()]
            found_inf, grads = total(grads)
            for p, grad in zip(model.parameters(), grads, strict=True):
                if not found_inf:  # as GradScaler does
                    p.data -= 0.3 * grad
                p.grad = None
            step += 1
    table = order.state_dict()["vectors"]["table"]
    assert table.isfinite().all()
    next(iter(order.sampler))
    assert order.state_dict()["vectors"]["table"].isfinite().all()
    return [order.history(epoch).tolist() for epoch in range(3)], order.set_aside, table


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_a_loss_that_is_not_finite_on_one_rank(centering: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    first = GraB(None, N, distributed=False).history(0)
    spoilt = {int(i) for i in first[1::2]}  # all that rank 1 draws

    def rank(ranks: ThreadRanks) -> Any:
        def total(grads: list[torch.Tensor]) -> Any:
            for grad in grads:
                ranks.add(grad)
            return not all(grad.isfinite().all() for grad in grads), [grad / ranks.size for grad in grads]

        mine = copy.deepcopy(model)
        order = GraB(mine, N, centering=centering, distributed=Distributed(ranks=ranks))
        return trained(order, mine, 3, spoilt, total)

    answers = run_ranks(2, rank)
    orders, aside, table = answers[0]
    assert aside == 6
    assert all(sorted(one) == list(range(N)) for one in orders)
    assert len({tuple(one) for one in orders}) == 3
    for other_orders, other_aside, other_table in answers:
        assert (other_orders, other_aside) == (orders, aside)
        assert torch.equal(other_table, table)
    alone = copy.deepcopy(model)
    order = GraB(alone, N, centering=centering, distributed=False)
    expected = trained(order, alone, 6, spoilt, lambda grads: (not all(g.isfinite().all() for g in grads), grads))
    assert orders == expected[0]


# --- one rank fails --------------------------------------------------------------------------------


def test_memory_that_runs_out_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """While products are shared out: every rank raises, nothing is learned, and the next step is like any other."""
    products = Factored.products
    failing: set[int] = set()

    def fail(self: Factored, vectors: torch.Tensor) -> Any:
        if id(self) in failing:
            raise MemoryError
        return products(self, vectors)

    made = GlobalBatch.__init__

    def make(self: GlobalBatch, *args: Any, **options: Any) -> None:
        made(self, *args, **options | {"most": 10**9})  # shared out, however few
        if options["ranks"].rank == 1 and fails[0]:
            failing.add(id(self.mine))

    monkeypatch.setattr(Factored, "products", fail)
    monkeypatch.setattr(GlobalBatch, "__init__", make)
    fails = [False]

    def job(ranks: ThreadRanks) -> list[str]:
        order = GraB(None, N, distributed=Distributed(ranks=ranks))
        indices = iter(order.sampler)
        order.observe(observed(order, indices))
        before, given = order.state_dict(), observed(order, indices)
        ranks.gather(torch.zeros(1))
        fails[0] = True
        ranks.gather(torch.zeros(1))
        answers = [said(lambda: order.observe(given))]
        ranks.gather(torch.zeros(1))
        fails[0] = False
        ranks.gather(torch.zeros(1))
        assert same(order.state_dict(), before)
        order.observe(given)
        return [*answers, order.state_dict()["places"].tolist()]

    zero, one = run_ranks(2, job)
    assert zero[0].startswith("RanksError: got an error in order.step() on another rank")
    assert one[0].startswith(MemoryLimitError.__name__)
    assert zero[1] == one[1]


def test_an_interrupt_before_anything_was_said() -> None:
    """The rank may go on as if it had come later; the others have only waited."""

    def job(ranks: ThreadRanks) -> Any:
        order = GraB(None, N, distributed=Distributed(ranks=ranks))
        given = observed(order, iter(order.sampler))
        if ranks.rank == 1:

            class Interrupting(dict[str, Any]):
                def items(self) -> Any:
                    raise KeyboardInterrupt

            assert said(lambda: order.observe(Interrupting(grads=given))).startswith("KeyboardInterrupt")
        order.observe(given)
        return order.state_dict()["places"].tolist()

    zero, one = run_ranks(2, job)
    assert zero == one
    assert any(zero)


def test_a_rank_whose_step_broke_off_says_nothing_more() -> None:
    """What it said next would be taken for an answer to something else."""

    class Cut(ThreadRanks):
        last = 1000

        def gather(self, tensor: torch.Tensor) -> torch.Tensor:
            if self.calls >= self.last:
                raise KeyboardInterrupt
            return super().gather(tensor)

    def job(ranks: ThreadRanks) -> None:
        alone = Cut(0, 1, ranks.barrier, [None])
        order = GraB(None, N, distributed=Distributed(ranks=alone))
        indices = iter(order.sampler)
        order.observe(observed(order, indices))
        before, given = order.state_dict(), observed(order, indices)
        alone.last = alone.calls + 1
        assert said(lambda: order.observe(given)).startswith("KeyboardInterrupt")
        assert same(order.state_dict(), before)
        assert said(lambda: order.observe(given)).startswith("RanksError: got a step after one that was interrupted")

    run_ranks(1, job)


def test_a_model_that_one_rank_cannot_take() -> None:
    def job(ranks: ThreadRanks) -> str:
        model = nn.Sequential(nn.Linear(2, 2))
        model.requires_grad_(ranks.rank != 1)
        return said(lambda: GraB(model, N, distributed=Distributed(ranks=ranks)))

    zero, one = run_ranks(2, job)
    assert zero.startswith(
        "RanksError: got ranks with different error: None on rank 0, InputError: got a model with no"
    )
    assert one.startswith("InputError: got a model with no trainable parameter")


def test_a_model_that_no_rank_can_take() -> None:
    def job(ranks: ThreadRanks) -> str:
        return said(lambda: GraB(nn.Flatten(), N, distributed=Distributed(ranks=ranks)))

    assert all(one.startswith("InputError: got a model with no trainable parameter") for one in run_ranks(2, job))


@pytest.mark.parametrize("who", [{1}, {0}, {0, 1}])
def test_a_first_batch_that_is_passed_over(who: set[int]) -> None:
    """A rank that has seen no gradient yet does not know how long they are."""

    def job(ranks: ThreadRanks) -> Any:
        order = GraB(None, N, distributed=Distributed(ranks=ranks))
        indices = iter(order.sampler)
        given = observed(order, indices)
        if ranks.rank in who:
            order.skip(3)
        else:
            order.observe(given)
        for _ in range(3):
            order.observe(observed(order, indices))
        return order.state_dict()

    zero, one = run_ranks(2, job)
    assert same(zero, one)
    assert (zero["places"] == 2).sum() == 3 * len(who)
    assert ((zero["places"] == 1) | (zero["places"] == -1)).sum() == N - 3 * len(who)


@pytest.mark.parametrize(("change", "told"), [(np.float32, "3 numbers of float32"), ("short", "2 numbers of float64")])
def test_ranks_with_different_gradients(change: Any, told: str) -> None:
    def job(ranks: ThreadRanks) -> str:
        order = GraB(None, N, distributed=Distributed(ranks=ranks))
        given = observed(order, iter(order.sampler))
        if ranks.rank == 1:
            given = given[:, :2] if change == "short" else given.astype(change)
        return said(lambda: order.observe(given))

    expected = f"RanksError: got ranks with different gradients: 3 numbers of float64 on rank 0, {told} on rank 1"
    assert all(one.startswith(expected) for one in run_ranks(2, job))


# --- one rank is elsewhere -------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["nothing", "all", "without vectors"])
def test_a_state_loaded_on_one_rank_only(what: str) -> None:
    def job(ranks: ThreadRanks) -> str:
        order = GraB(None, N, distributed=Distributed(ranks=ranks))
        for _ in range(3):
            indices = iter(order.sampler)
            order.observe(observed(order, indices))
        if ranks.rank == 0 or what != "nothing":
            order.load_state_dict(order.state_dict(vectors=ranks.rank == 0 or what == "all"))
        order.resume()
        given = observed(order, iter(order.sampler))
        return said(lambda: order.observe(given))

    answers = run_ranks(2, job)
    if what == "all":
        assert answers == ["nothing", "nothing"]
    else:
        assert all(one.startswith("RanksError: got ranks with different order") for one in answers)


def test_a_frozen_order_says_nothing() -> None:
    """A rank may skip, step, or have come to its end under Join, whatever the others do."""

    def job(ranks: ThreadRanks) -> int:
        order = GraB(None, N, freeze_after=1, distributed=Distributed(ranks=ranks))
        order.observe(observed(order, iter(order.sampler), N // 2))
        next(iter(order.sampler))
        assert order.frozen
        calls = ranks.calls
        if ranks.rank == 0:
            order.step()
            order.joinable.join_hook().main_hook()
        else:
            order.skip(3)
        return ranks.calls - calls

    assert run_ranks(2, job) == [0, 0]


def test_a_rehearsal_of_one_rank_only_is_noticed() -> None:
    def job(ranks: ThreadRanks) -> str:
        order = Herding(None, N, fresh=True, distributed=Distributed(ranks=ranks))

        def a_pass(batches: int) -> None:
            indices = iter(order.sampler)
            for _ in range(batches):
                order.observe(observed(order, indices))

        if ranks.rank:
            a_pass(4)
        else:
            with order.rehearsal():
                a_pass(4)
        return said(lambda: a_pass(1))

    assert all(one.startswith("RanksError: got ranks with different") for one in run_ranks(2, job))


# --- trainers --------------------------------------------------------------------------------------


def test_trainers_see_a_distributed_sampler() -> None:
    def job(ranks: ThreadRanks) -> None:
        sampler = GraB(None, N, distributed=Distributed(ranks=ranks)).sampler
        assert isinstance(sampler, DistributedSampler)
        assert (sampler.num_replicas, sampler.rank, len(sampler)) == (2, ranks.rank, N // 2)
        sampler.set_epoch(7)
        assert len(list(sampler)) == N // 2

    run_ranks(2, job)
