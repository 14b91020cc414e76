"""Stratified reshuffling: the classes in proportion in every prefix, and as random as that allows."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from helpers import is_permutation, reloaded
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import ThreadRanks, run_ranks

from ordain import RandomReshuffling, Stratified
from ordain.distributed import Distributed
from ordain.errors import InputError, StateError

LABELS = np.random.default_rng(0).choice(4, size=90, p=[0.5, 0.3, 0.15, 0.05])


def excess(labels: Any, order: Any) -> Any:
    """``[n + 1, classes]``: how many more of each class there are in each prefix than its share."""
    found = np.asarray(labels)[np.asarray(order)]
    kinds, sizes = np.unique(labels, return_counts=True)
    counts = np.vstack([np.zeros(len(kinds)), (found[:, None] == kinds).cumsum(axis=0)])
    return counts - np.arange(len(found) + 1)[:, None] * sizes / len(found)


@given(labels=st.lists(st.integers(0, 6), min_size=1, max_size=60), seed=st.integers(0, 50))
def test_every_prefix_of_every_epoch_is_in_proportion(labels: list[int], seed: int) -> None:
    order = Stratified(labels, seed=seed)
    kinds, sizes = np.unique(labels, return_counts=True)
    shares = sizes / len(labels)
    for epoch in range(3):
        visited = order.history(epoch)
        assert is_permutation(visited, len(labels))
        assert (np.abs(excess(labels, visited)) <= 1 + (len(kinds) - 2) * shares + 1e-9).all()


def test_reshuffling_is_far_from_that() -> None:
    def worst(order: Any) -> list[float]:
        return [float(np.abs(excess(LABELS, order.history(epoch))).max()) for epoch in range(20)]

    assert np.mean(worst(RandomReshuffling(90))) > 2 * max(worst(Stratified(LABELS)))


def test_equal_classes_come_in_turn() -> None:
    labels = np.repeat(np.arange(5), 8)
    for epoch in range(4):
        found = labels[Stratified(labels, seed=1).history(epoch)]
        assert all(
            sorted(found[at : at + 5]) == [0, 1, 2, 3, 4] for at in range(36)
        )  # in any window, not in blocks only


def test_within_these_bounds_it_is_random() -> None:
    """Each example is as often in the first half as any other, and epochs and seeds differ."""
    labels = ["a"] * 4 + ["b"] * 6
    order = Stratified(labels)
    first = np.zeros(10)
    for epoch in range(2000):
        first[order.history(epoch)[:5]] += 1
    assert np.abs(first / 2000 - 0.5).max() < 0.05  # four standard deviations
    assert len({tuple(order.history(epoch)) for epoch in range(20)}) == 20
    assert len({tuple(Stratified(labels, seed=seed).history(0)) for seed in range(20)}) == 20
    assert Stratified(labels, seed=7).history(3).tolist() == Stratified(labels, seed=7).history(3).tolist()


def test_labels_of_any_kind() -> None:
    numbers = [3, 1, 1, 3, 9, 1, 3, 1]
    words = [{3: "b", 1: "a", 9: "c"}[one] for one in numbers]
    wanted = Stratified(numbers, seed=2).history(1).tolist()
    kinds: list[Any] = [np.array(numbers, dtype=np.uint8), torch.tensor(numbers), tuple(numbers), words]
    kinds += [np.array(words), np.array(words, dtype=object)]
    assert all(Stratified(kind, seed=2).history(1).tolist() == wanted for kind in kinds)
    assert is_permutation(Stratified([True, False, True]).sampler, 3)


@pytest.mark.parametrize(
    "bad", [[], [0.5, 1.0], [[0, 1]], torch.rand(4), [None, "a"], 5, "ab", np.array([{}, {}], dtype=object)]
)
def test_what_is_no_class_is_refused(bad: Any) -> None:
    with pytest.raises(InputError, match=r"labels of shape .*; expected one class for each example"):
        Stratified(bad)


def test_a_state_is_of_these_labels() -> None:
    order, other = Stratified(LABELS), Stratified(LABELS)
    batch = list(islice(order.sampler, 10))
    order.observe(torch.zeros(10, 1))
    other.load_state_dict(reloaded(order.state_dict()))
    other.resume()
    assert batch + list(other.sampler) == order.history(0).tolist()
    with pytest.raises(StateError, match="labels="):
        Stratified(LABELS[::-1]).load_state_dict(order.state_dict())


@pytest.mark.parametrize("mode", ["exact", "independent"])
def test_ranks(mode: Any) -> None:
    """Together they visit the order of one process; or each has a shard, and its classes in proportion."""

    def job(ranks: ThreadRanks) -> list[list[int]]:
        order = Stratified(LABELS, distributed=Distributed(mode=mode, ranks=ranks))
        return [list(order.sampler) for _ in range(3)]

    found = run_ranks(3, job)
    for epoch in range(3):
        shards = [one[epoch] for one in found]
        assert is_permutation([i for shard in shards for i in shard], 90)
        if mode == "exact":
            assert [i for three in zip(*shards, strict=True) for i in three] == Stratified(LABELS).history(
                epoch
            ).tolist()
            continue
        for shard, one in zip(shards, found, strict=True):
            assert set(shard) == set(one[0])
            if epoch:
                assert np.abs(excess(LABELS[one[0]], [one[0].index(i) for i in shard])).max() <= 2 + 1e-9


def test_ranks_with_other_labels_are_told() -> None:
    def job(ranks: ThreadRanks) -> Any:
        return Stratified(np.roll(LABELS, ranks.rank), distributed=Distributed(ranks=ranks))

    with pytest.raises(Exception, match="labels"):
        run_ranks(2, job)
