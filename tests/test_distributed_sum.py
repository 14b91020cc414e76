"""Mode "sum": each rank balances its own batch against the common sum; the oracle is that sentence, in loops."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import gradient_field
from hypothesis import given, settings
from hypothesis import strategies as st
from test_distributed_observed import a_rank
from thread_ranks import ThreadRanks, run_ranks
from torch import nn
from torch.nn.functional import cross_entropy

from ordain import GraB, Greedy, SelfBalancingWalk
from ordain.distributed import Distributed
from ordain.errors import InputError


def slow(n: int, ranks: int, batch: int, epochs: int, *, paired: bool) -> list[list[int]]:
    """Algorithm 4 with Algorithm 5, but that ranks see each other's sums only after the step."""
    field = gradient_field(n, 3)
    order = GraB(None, n, distributed=False).history(0).tolist()
    orders, mean = [order], np.zeros(3)
    for epoch in range(epochs):
        s, total, places = np.zeros(3), np.zeros(3), np.zeros(n, dtype=int)
        for start in range(0, n, ranks * batch):
            added = np.zeros(3)
            for rank in range(ranks):
                mine = [p for p in range(start, min(start + ranks * batch, n)) if p % ranks == rank]
                own = s.copy()
                if paired:
                    for one, other in zip(mine[0::2], mine[1::2], strict=False):
                        z = field(order[one], epoch) - field(order[other], epoch)
                        sign = 1 if np.linalg.norm(own + z) < np.linalg.norm(own - z) else -1
                        own += sign * z
                        places[one], places[other] = sign, -sign
                else:
                    for one in mine:
                        z = field(order[one], epoch) - mean
                        places[one] = 1 if np.linalg.norm(own + z) < np.linalg.norm(own - z) else -1
                        own += places[one] * z
                        total += field(order[one], epoch)
                added += own - s
            s = s + added
        mean = total / n
        front = [i for i, place in zip(order, places, strict=True) if place > 0]
        middle = [i for i, place in zip(order, places, strict=True) if place == 0]
        back = [i for i, place in zip(order, places, strict=True) if place < 0]
        order = front + middle + back[::-1]
        orders.append(order)
    return orders


@settings(max_examples=40)
@given(
    n=st.integers(1, 40), ranks=st.integers(1, 4), batch=st.integers(1, 5), centering=st.sampled_from(["mean", "pair"])
)
def test_against_loops(n: int, ranks: int, batch: int, centering: Any) -> None:
    expected = slow(n, ranks, batch, 3, paired=centering == "pair")
    for histories in run_ranks(ranks, lambda one: a_rank(one, n, batch, 3, mode="sum", centering=centering)):
        assert histories == expected


def test_one_rank_is_one_process() -> None:
    for options in ({}, {"balancer": SelfBalancingWalk(c=3.0)}, {"group": 2}):
        alone = run_ranks(1, lambda one, given=options: a_rank(one, 24, 4, 3, **given))
        assert run_ranks(1, lambda one, given=options: a_rank(one, 24, 4, 3, mode="sum", **given)) == alone


def test_ranks_toss_their_own_coins() -> None:
    """With sums of zero length signs are coins alone: four ranks with the same coins would agree with each other."""

    def job(ranks: ThreadRanks) -> Any:
        order = GraB(None, 64, balancer=SelfBalancingWalk(c=1e9), distributed=Distributed(mode="sum", ranks=ranks))
        list(order.sampler)
        order.observe(np.ones((16, 3)))
        return order._places.copy()

    places = run_ranks(4, job)
    assert all((one == places[0]).all() for one in places)
    by_rank = [places[0][rank::4].tolist() for rank in range(4)]
    assert len({tuple(one) for one in by_rank}) == 4


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_from_a_model(centering: Any) -> None:
    """What a backward gives and what observe() is given lead to the same orders."""
    x, y = torch.randn(32, 5, generator=torch.Generator().manual_seed(1)).double(), torch.arange(32) % 3
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def job(ranks: ThreadRanks, given: bool) -> list[int]:
        model = copy.deepcopy(start)
        rule = Distributed(mode="sum", ranks=ranks)
        order = GraB(None if given else model, 32, centering=centering, distributed=rule)
        for _ in range(2):
            drawn = list(order.sampler)
            for number in range(0, len(drawn), 4):
                batch = drawn[number : number + 4]
                if given:
                    rows = []
                    for i in batch:
                        grads = torch.autograd.grad(cross_entropy(model(x[[i]]), y[[i]]), list(model.parameters()))
                        rows.append(torch.cat([grad.flatten() for grad in grads]))
                    order.observe(torch.stack(rows))
                else:
                    cross_entropy(model(x[batch]), y[batch]).backward()
                    order.step()
        next(iter(order.sampler))
        return order.history(2).tolist()

    given, watched = (run_ranks(2, lambda one, way=way: job(one, way)) for way in (True, False))
    assert given == watched
    assert given[0] == given[1]


def test_what_cannot_be_summed_is_refused() -> None:
    def job(ranks: ThreadRanks) -> None:
        rule = Distributed(mode="sum", ranks=ranks)
        with pytest.raises(InputError, match="mode='sum' for Greedy"):
            Greedy(None, 8, distributed=rule)
        with pytest.raises(InputError, match="micro-batches"):
            GraB(nn.Linear(2, 2), 8, gradients="microbatch", distributed=rule)

    run_ranks(2, job)


def test_unknown_modes_and_tails_are_refused() -> None:
    with pytest.raises(InputError, match="mode='server'"):
        GraB(None, 8, distributed="server")
    with pytest.raises(InputError, match="tail='cut'"):
        Distributed(tail="cut")
    with pytest.raises(InputError, match="without a process group"):
        GraB(None, 8, distributed="exact")
