"""The cursor and the order are two states: loaders may draw ahead, look, stop early or come back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import Regression, batches, build, gradient_field, is_permutation, run
from torch.utils.data import BatchSampler, DataLoader, Dataset

from ordain import GraB, RandomReshuffling, WithReplacement
from ordain.errors import OrdainWarning, StepError


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def field(indices: list[int]) -> np.ndarray:
    return np.stack([np.sin([i + 1.0, 2.0 * i, 3.0 * i + 1]) for i in indices])


def test_prefetch_does_not_move_the_order() -> None:
    """Drawing the whole epoch ahead, then observing, is the same as drawing and observing in turn."""
    ahead, in_turn = GraB(None, 11), GraB(None, 11)
    for _ in range(3):
        indices = list(ahead.sampler)
        for start in range(0, 11, 3):
            ahead.observe(field(indices[start : start + 3]))
        for batch in batches(in_turn, 3):
            in_turn.observe(field(batch))
    assert list(ahead.sampler) == list(in_turn.sampler)


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_drop_last_starves_nobody(centering: str) -> None:
    n = 10
    order = GraB(None, n, centering=centering)
    loader = DataLoader(Numbers(n), batch_size=4, sampler=order.sampler, drop_last=True)
    visited: set[int] = set()
    for _ in range(4):
        for batch in loader:
            order.observe(field(batch.tolist()))
            visited.update(batch.tolist())
        assert is_permutation(order.history(order.epoch), n)
    assert visited == set(range(n))  # the two that were dropped went to the middle, not to the end


def test_dropped_examples_take_the_middle_in_their_order() -> None:
    order = GraB(None, 10)
    drawn = list(order.sampler)
    order.observe(field(drawn[:8]))
    following = list(order.sampler)
    front = [i for i in drawn[:8] if i in following[: following.index(drawn[8])]]
    assert following[len(front) : len(front) + 2] == drawn[8:]


def test_an_early_break_ends_the_epoch() -> None:
    order = GraB(None, 12)
    for epoch in range(3):
        for number, batch in enumerate(batches(order, 3)):
            if number == 2:
                break
            order.observe(field(batch))
        assert order.epoch == epoch
    assert is_permutation(order.sampler, 12)
    assert order.epoch == 3


def test_an_evaluation_pass_costs_nothing() -> None:
    def orders(evaluate: bool) -> list[list[int]]:
        order, seen = GraB(None, 9), []
        for _ in range(3):
            epoch = []
            for batch in batches(order, 2):
                order.observe(field(batch))
                epoch += batch
            seen.append(epoch)
            if evaluate:
                with (
                    pytest.warns(OrdainWarning, match="no gradients were observed") if not len(seen) > 1 else _nothing()
                ):
                    list(order.sampler)
                    list(order.sampler)
        return seen

    assert orders(evaluate=True) == orders(evaluate=False)


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_a_learner_without_step_says_so_and_blind_orders_do_not_need_it() -> None:
    order = GraB(None, 5)
    first = list(order.sampler)
    with pytest.warns(OrdainWarning, match=r"no gradients were observed.*Call order\.step\(\)"):
        assert list(order.sampler) == first
    blind = RandomReshuffling(50)
    passes = [list(blind.sampler) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2]
    assert blind.epoch == 2


def test_blind_orders_cut_short_do_not_repeat_for_ever() -> None:
    order = RandomReshuffling(40)
    heads = []
    for _ in range(5):
        iterator = iter(order.sampler)
        heads.append(tuple(next(iterator) for _ in range(5)))
    assert len(set(heads)) == 4  # the first may have been a look; later ones are epochs


def test_two_live_iterators_are_told_apart() -> None:
    order = GraB(None, 6)
    first = iter(order.sampler)
    next(first)
    second = iter(order.sampler)
    next(second)
    with pytest.raises(StepError, match="one live iterator"):
        next(first)
    order.observe(field([next(second)]))


def test_batch_samplers_and_other_loaders_see_the_same() -> None:
    wanted = run(build("grab", 13), gradient_field(13, 3), 2, batch_size=4)
    order = build("grab", 13)
    loader = DataLoader(Numbers(13), batch_sampler=BatchSampler(order.sampler, 4, drop_last=False))
    values = gradient_field(13, 3)
    for epoch in range(2):
        seen = []
        for batch in loader:
            order.observe(np.stack([values(i, epoch) for i in batch.tolist()]))
            seen += batch.tolist()
        assert seen == wanted[epoch]


def test_indices_can_be_given_and_mixed_with_turns() -> None:
    n = 8
    order, twin = GraB(None, n), GraB(None, n)
    drawn, same = list(order.sampler), list(twin.sampler)
    order.observe(field(drawn[:3]), indices=drawn[:3])
    order.observe(field(drawn[3:5]))
    order.observe(field(drawn[5:]), indices=torch.tensor(drawn[5:]))
    twin.observe(field(same))
    assert list(order.sampler) == list(twin.sampler)
    late = GraB(None, n)
    drawn = list(late.sampler)
    late.observe(field(drawn[4:]), indices=drawn[4:])
    late.observe(field(drawn[:4]))  # what is left, in turn
    assert is_permutation(late.sampler, n)


def test_len_and_replacement() -> None:
    assert len(GraB(None, 7).sampler) == 7
    assert len(DataLoader(Regression(7), batch_size=2, sampler=GraB(None, 7).sampler)) == 4
    order = WithReplacement(2000, seed=1)
    first, second = list(order.sampler), list(order.sampler)
    assert first != second
    assert 0.60 < len(set(first)) / 2000 < 0.67  # 1 - 1/e
