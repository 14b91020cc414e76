"""A clear error of ours before anything changes: what came, what was expected, what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from faulty_run import plain_hooks
from helpers import Regression, batches, build, gradient_field, is_permutation, run, small_model
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from ordain import FixedOrder, GraB, Greedy, Herding, RandomReshuffling, Stratified
from ordain.errors import (
    GradientError,
    InputError,
    MemoryLimitError,
    OrdainError,
    OrdainWarning,
    StateError,
    StepError,
)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomReshuffling(0), "n=0; expected the number of examples, at least 1"),
        (lambda: GraB(None, -3), "n=-3"),
        (lambda: GraB(None, 2.5), "n=2.5"),
        (lambda: GraB(None, True), "n=True"),
        (lambda: GraB(None, []), "n=0"),
        (lambda: GraB(None, "ten"), "n='ten'"),
        (lambda: GraB(None, Stream()), "an IterableDataset .*map-style"),
        (lambda: RandomReshuffling(Stream()), "an IterableDataset"),
        (lambda: GraB(10, small_model()), r"a model of type int; expected a torch.nn.Module first.*GraB\(model"),
        (lambda: RandomReshuffling(5, seed=-1), "seed=-1; expected an integer in"),
        (lambda: RandomReshuffling(5, seed=1.0), "seed=1.0"),
        (lambda: RandomReshuffling(5, group=0), "group=0; expected an integer >= 1"),
        (lambda: GraB(None, 5, centering="none"), "centering='none'"),
        (lambda: GraB(None, 5, freeze_after=0), "freeze_after=0"),
        (lambda: GraB(None, 5, freeze_after=True), "freeze_after=True"),
        (lambda: GraB(small_model(), 5, batch_dim="x"), "batch_dim='x'"),
        (lambda: Herding(None, 5, routine="greedy"), "routine='greedy'"),
        (lambda: Herding(None, 5, tolerance=2), "tolerance=2; expected a fraction"),
        (lambda: Herding(None, 5, memory_limit="2GB"), "memory_limit='2GB'; expected bytes"),
        (lambda: Greedy(None, 5, memory_limit=None), "memory_limit=None"),
        (lambda: Herding(None, 5, fresh="no"), "fresh='no'"),
        (lambda: Stratified([[1], [2, 3]]), r"labels=\[\[1\], \[2, 3\]\]"),
        (lambda: Stratified(torch.ones(3, dtype=torch.bfloat16)), r"labels=tensor"),
        (lambda: GraB(small_model(), 5, gradients="magic"), "gradients='magic'"),
        (lambda: GraB(small_model(), 5, loss_reduction="none"), "loss_reduction='none'; expected 'mean' or 'sum'"),
        (lambda: GraB(nn.Tanh(), 5), "no trainable parameter"),
        (lambda: FixedOrder([0, 0, 1]), r"expected a permutation of range\(n\)"),
        (lambda: FixedOrder([]), "permutation"),
        (lambda: FixedOrder([0.0, 1.0]), "permutation"),
        (lambda: FixedOrder([[0, 1]]), "permutation"),
        (lambda: RandomReshuffling(5).history(-1), "epoch -1"),
        (lambda: GraB(None, 5).history(1), "epoch 1; expected an epoch from 0 to 0"),
        (lambda: Herding(None, 5).rehearsal().__enter__(), "fresh=True"),
        (lambda: RandomReshuffling(5).resume(6), "done=6"),
    ],
)
def test_arguments(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert isinstance(caught.value, ValueError)


def test_a_refused_order_leaves_the_model_alone() -> None:
    model = small_model()
    with pytest.raises(MemoryLimitError):
        Greedy(model, 1000, memory_limit=10)
    with pytest.raises(InputError):
        GraB(model, 5, loss_reduction="none")
    with pytest.raises(InputError):
        GraB(model, 5, freeze_after=0)
    assert not any(plain_hooks(model))


def test_memory_is_refused_with_the_figure_and_the_remedy() -> None:
    model = nn.Linear(784, 10)
    with pytest.raises(
        MemoryLimitError, match=r"60,000 gradients of 7,850 numbers to store: 1\.75 GiB.*0\.50 GiB.*GraB"
    ):
        Greedy(model, 60_000, memory_limit=2**29)
    Greedy(model, 60_000, memory_limit=2**31).detach()
    Greedy(model, 60_000, memory_limit=2**29, group=64).detach()
    order = Herding(None, 1000, memory_limit=1000)
    batch = next(batches(order, 2))
    with pytest.raises(MemoryLimitError, match="memory_limit"):
        order.observe(np.ones((len(batch), 5)))
    assert isinstance(MemoryLimitError("a", expected="b", remedy="c"), MemoryError)


@pytest.mark.parametrize("name", ["grab", "grab-pair", "herding"])
def test_gradients_of_another_length_change_nothing(name: str) -> None:
    n, field = 9, gradient_field(9, 4)
    wanted = run(build(name, n), field, 2, batch_size=3)
    order = build(name, n)
    for epoch in range(2):
        for batch in batches(order, 3):
            order.observe(np.stack([field(i, epoch) for i in batch]))
            with pytest.raises(GradientError, match="length 5; expected length 4"):
                order.observe(np.ones((1, 5)))
    assert list(order.sampler) == wanted[2]


@pytest.mark.parametrize("name", ["grab", "grab-pair", "herding", "rr"])
def test_more_observed_than_drawn(name: str) -> None:
    order = build(name, 6)
    with pytest.raises(StepError, match="1 examples to observe, but only 0 drawn"):
        order.observe(np.ones((1, 2)))
    iterator = iter(order.sampler)
    next(iterator), next(iterator)
    with pytest.raises(StepError, match="3 examples to observe, but only 2 drawn"):
        order.observe(np.ones((3, 2)))
    order.observe(np.ones((2, 2)))
    assert is_permutation(order.sampler, 6)


def test_step_out_of_turn() -> None:
    data, model = Regression(6), small_model()
    order = GraB(model, data)
    loader = iter(DataLoader(data, batch_size=3, sampler=order.sampler))
    with pytest.raises(StepError, match=r"no new gradients.*after loss\.backward\(\)"):
        order.step()
    x, y = next(loader)
    nn.functional.cross_entropy(model(x), y).backward()
    order.step()
    with pytest.raises(StepError, match="no new gradients"):
        order.step()
    model.eval()
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(StepError, match=r"in eval\(\) mode.*Call model\.train\(\)"):
        order.step()
    model.train()
    nn.functional.cross_entropy(model(data.x[:5]), data.y[:5]).backward()
    with pytest.raises(StepError, match="5 examples to observe, but only"):
        order.step()  # a batch that came from somewhere else
    with pytest.raises(StepError, match=r"without a model.*observe\(grads\)"):
        GraB(None, 3).step()
    with pytest.raises(StepError, match="before anything was drawn"):
        RandomReshuffling(3).step()


@pytest.mark.parametrize("indices", [[0], [0, 0], [0, 9], [0.0, 1.0], [-1, 0]])
def test_bad_indices(indices: list[Any]) -> None:
    order = GraB(None, 5)
    list(order.sampler)
    with pytest.raises(InputError, match=r"ind(ices|ex)"):
        order.observe(np.ones((2, 3)), indices=indices)


def test_indices_out_of_turn() -> None:
    order = GraB(None, 5)
    iterator = iter(order.sampler)
    first = next(iterator)
    other = next(i for i in range(5) if i != first)
    with pytest.raises(StepError, match=f"example {other}; expected examples that were drawn"):
        order.observe(np.ones((1, 2)), indices=[other])
    order.observe(np.ones((1, 2)), indices=[first])
    with pytest.raises(StepError, match="not yet observed"):
        order.observe(np.ones((1, 2)), indices=[first])
    grouped = GraB(None, 4, group=2)
    list(grouped.sampler)
    with pytest.raises(InputError, match="indices with group=2"):
        grouped.observe(np.ones((1, 2)), indices=[0])


@pytest.mark.parametrize("name", ["grab", "grab-pair", "grab-walk", "herding", "greedy"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("size", [1, 4])
def test_a_gradient_that_is_not_finite_is_set_aside(name: str, value: float, size: int) -> None:
    n, field, bad = 14, gradient_field(14, 3), 5
    order = build(name, n)

    def spoilt_run(epochs: int) -> None:
        for epoch in range(epochs):
            for batch in batches(order, size):
                grads = np.stack([field(i, epoch) for i in batch])
                grads[np.array(batch) == bad, 1] = value
                order.observe(grads)

    with pytest.warns(OrdainWarning, match="set aside for epoch 0") as caught:
        spoilt_run(3)
    assert len([one for one in caught if one.category is OrdainWarning]) == 1  # warned of once, counted always
    assert order.set_aside == 3  # type: ignore[attr-defined]
    assert is_permutation(order.sampler, n)
    kept = [leaf for leaf in tree_leaves(order.state_dict()) if isinstance(leaf, torch.Tensor)]
    assert any(leaf.is_floating_point() for leaf in kept)
    assert all(leaf.isfinite().all() for leaf in kept)


def test_the_others_are_ordered_as_if_it_were_not_there() -> None:
    n, field = 10, gradient_field(10, 3)
    order = GraB(None, n)
    first = list(order.sampler)
    grads = np.stack([field(i, 0) for i in first])
    grads[4] = np.nan
    with pytest.warns(OrdainWarning):
        order.observe(grads)
    following = list(order.sampler)
    kept = [i for i in first if i != first[4]]
    twin = GraB(None, n - 1)
    positions = list(twin.sampler)
    twin.observe(np.stack([field(i, 0) for i in kept]))
    assert [i for i in following if i != first[4]] == [kept[positions.index(p)] for p in twin.sampler]


def test_a_bad_example_takes_its_unit_with_it() -> None:
    n, field = 12, gradient_field(12, 3)
    for size in (1, 2, 5, 12):
        for centering in ("mean", "pair"):
            order = GraB(None, n, group=3, centering=centering)
            bad = order.history(0)[4]

            def spoilt_epoch(order: GraB = order, bad: int = bad, size: int = size) -> None:
                for batch in batches(order, size):
                    grads = np.stack([field(i, 0) for i in batch])
                    grads[np.array(batch) == bad] = np.nan
                    order.observe(grads)

            with pytest.warns(OrdainWarning):
                spoilt_epoch()
            assert is_permutation(order.sampler, n)
            assert all(torch.isfinite(vector).all() for vector in order.state_dict()["vectors"].values())
            assert order.set_aside == 1


def test_states_of_another_order_are_refused_and_change_nothing() -> None:
    n, field = 8, gradient_field(8, 3)
    order = GraB(None, n, seed=1)
    run(order, field, 2, batch_size=3)
    state = order.state_dict()
    others = {
        "n=8.*expected n=9": GraB(None, 9, seed=1),
        "seed=1.*expected seed=2": GraB(None, n, seed=2),
        "order='GraB'.*expected order='Herding'": Herding(None, n, seed=1),
        "group=1.*expected group=2": GraB(None, n, seed=1, group=2),
        "centering='mean'.*expected centering='pair'": GraB(None, n, seed=1, centering="pair"),
        r"learn='Always\(\)'.*expected learn='Until\(epochs=1\)'": GraB(None, n, seed=1, freeze_after=1),
    }
    for message, other in others.items():
        before = other.state_dict()
        with pytest.raises(StateError, match=message):
            other.load_state_dict(state)
        assert str(other.state_dict()) == str(before)
    model = GraB(small_model(), n, seed=1)
    with pytest.raises(StateError, match="length 3; expected length 39"):
        model.load_state_dict(state)
    with pytest.raises(StateError, match="version=99"):
        order.load_state_dict(state | {"version": 99})
    with pytest.raises(StateError, match="a state with version='list'"):
        order.load_state_dict([])  # type: ignore[arg-type]


def test_an_empty_batch_is_nothing() -> None:
    order = GraB(None, 3)
    list(order.sampler)
    order.observe(np.ones((0, 4)))
    order.observe(np.ones((3, 4)))


def test_messages_have_three_parts() -> None:
    error = OrdainError("a", expected="b", remedy="C.")
    assert str(error) == "got a; expected b. C."


@pytest.mark.parametrize("first", [torch.float32, torch.float64])
def test_gradients_of_another_dtype_in_mid_epoch(first: torch.dtype) -> None:
    """Nothing changes, and the epoch goes on with gradients of the dtype that it began with."""
    other = torch.float64 if first is torch.float32 else torch.float32
    order, plain = Herding(None, 8), Herding(None, 8)
    grads = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 3)))
    for one in (order, plain):
        drawn = list(one.sampler)
        one.observe(grads[drawn[:4]].to(first))
        if one is order:
            with pytest.raises(GradientError, match=rf"of {other}; expected {first}.*Convert them"):
                one.observe(grads[drawn[4:]].to(other))
        one.observe(grads[drawn[4:]].to(first))
    assert list(order.sampler) == list(plain.sampler)


def test_a_routine_that_returns_floats() -> None:
    order = Herding(None, 4, routine=lambda z: np.arange(4.0))
    list(order.sampler)
    order.observe(np.zeros((4, 2)))
    with pytest.raises(InputError, match="dtype float64 from the herding routine"):
        next(iter(order.sampler))


@pytest.mark.parametrize("kind", [GraB, Herding])
def test_a_head_of_another_length_than_what_was_observed(kind: Any) -> None:
    """The head is found at the first batch, and observe() came before it."""
    model = small_model()
    order = kind(model, 8, params="head")
    list(order.sampler)
    order.observe(torch.zeros(4, 7).double())
    before = order.state_dict()
    x = torch.randn(4, next(model.parameters()).shape[1]).double()
    model(x).square().sum(1).mean().backward()
    with pytest.raises(GradientError, match="expected length 7, as before"):
        order.step()
    assert torch.equal(order.state_dict()["places"], before["places"])
