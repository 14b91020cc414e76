"""Everything that can be written outside the package, written outside it: see docs/extending.md."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from given_source import GivenSource
from helpers import batches, gradient_field, is_permutation, reloaded, run, run_epoch, same_state
from torch import nn

from ordain import Balancer, Deterministic, Every, GraB, Order, Schedule, Until, herding
from ordain.balancing import Decision
from ordain.errors import InputError, StateError
from ordain.gradients import Gradients
from ordain.orders.arrangement import Arrangement
from ordain.orders.sign_log import OrderLog, Settle

N, DIM = 17, 3

# --- a balancer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alternating(Balancer):
    """+1, -1, +1, ... whatever the vectors are; state[2] counts them."""

    random: ClassVar[bool] = False

    def signs(self, dots: Any, gram: Any, *, state: Any, **_: Any) -> Any:
        assert np.allclose(gram, gram.T)
        first = int(state[2])
        state[2] += len(dots)
        return np.where((first + np.arange(len(dots))) % 2, -1, 1)


class Louder(Deterministic):
    """A subclass of a built-in balancer whose signs() is its own: the opposite ones."""

    calls = 0

    def signs(self, *args: Any, **options: Any) -> Any:
        type(self).calls += 1
        return -super().signs(*args, **options)


@pytest.mark.parametrize("model", [False, True])
@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_a_balancer_s_signs_decide(centering: Any, model: bool) -> None:
    """From given gradients and from a model that one linear layer is all of, which has a compiled pass of its own."""
    watched = nn.Linear(DIM, 2).double()
    order = GraB(watched if model else None, N, centering=centering, balancer=Alternating())
    first = list(order.sampler)
    for at in range(0, N, 4):
        x = torch.randn(len(first[at : at + 4]), DIM, dtype=torch.float64)
        if model:
            watched(x).square().sum(dim=1).mean().backward()
            order.step()
        else:
            order.observe(x)
    signs = [1 if t % 2 == 0 else -1 for t in range(N)]
    if centering == "pair":
        each = [1 if t % 2 == 0 else -1 for t in range(N // 2)]
        signs = [sign for e in each for sign in (e, -e)] + [0]
    assert list(order.sampler) == herding.reorder(signs, first).tolist()


def test_an_overridden_balancer_is_asked() -> None:
    Louder.calls = 0
    field = gradient_field(N, DIM)
    mine, plain = (run(GraB(None, N, balancer=b), field, 1, batch_size=4) for b in (Louder(), Deterministic()))
    assert Louder.calls == 5
    assert mine[1] != plain[1]
    z = np.random.default_rng(0).normal(size=(N, DIM))
    Louder.calls = 0
    assert herding.herd(z, balancer=Louder(), rounds=2).tolist() != herding.herd(z, rounds=2).tolist()
    assert Louder.calls == 2


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_vectors_are_herded_by_any_balancer(centering: Any) -> None:
    """Deterministic's own rule, written outside, finds the orders of the compiled loop."""

    class Same(Deterministic):
        def signs(self, *args: Any, **options: Any) -> Any:
            return super().signs(*args, **options)

    z = np.random.default_rng(0).normal(size=(700, 5))
    found, wanted = (herding.herd(z, balancer=b, centering=centering, rounds=3) for b in (Same(), Deterministic()))
    assert found.tolist() == wanted.tolist()


def test_what_a_balancer_must_not_return() -> None:
    class Wrong(Alternating):
        def signs(self, dots: Any, gram: Any, **_: Any) -> Any:
            return np.zeros(len(dots))

    order = GraB(None, 4, balancer=Wrong())
    list(order.sampler)
    before = order.state_dict()
    with pytest.raises(InputError, match=r"with values \[0\.0\] from .*Wrong.*; expected \[4\] of \+1 and -1"):
        order.observe(torch.ones(4, 2))
    assert str(order.state_dict()["counters"]) == str(before["counters"])


def test_an_unknown_kind_is_refused() -> None:
    class Unknown(Deterministic):
        kind = 7

    order = GraB(None, 4, balancer=Unknown())
    list(order.sampler)
    with pytest.raises(InputError, match="kind=7; expected the kind of a built-in balancer"):
        order.observe(torch.ones(4, 2))


# --- a gradient source ----------------------------------------------------------------------------


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_a_source_from_outside(centering: Any) -> None:
    field = gradient_field(N, DIM)
    wanted = run(GraB(None, N, centering=centering), field, 3, batch_size=4)
    order = GraB(nn.Linear(1, 1), N, centering=centering, gradients=GivenSource.of(d=DIM))
    source = GivenSource.last
    assert source.options.keys() == {"params", "loss_reduction", "batch_dim"}
    for epoch in range(3):
        for batch in batches(order, 4):
            source.give(torch.from_numpy(np.stack([field(i, epoch) for i in batch])))
            order.step()
    next(iter(order.sampler))
    assert [order.history(epoch).tolist() for epoch in range(4)] == wanted
    order.detach()
    assert not source.attached


# --- a schedule -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Multiples:
    """Learn in epochs 0, k, 2k, ... of the first ``epochs``."""

    k: int
    epochs: int

    def __call__(self, epoch: int) -> bool:
        return epoch % self.k == 0

    def ends(self, epoch: int) -> bool:
        return epoch >= self.epochs


def test_a_schedule_says_in_which_epochs_to_learn() -> None:
    assert isinstance(Multiples(2, 9), Schedule)
    field = gradient_field(N, DIM)
    order = GraB(nn.Linear(1, 1), N, gradients=GivenSource.of(d=DIM), learn=Multiples(2, 9))
    source, attached = GivenSource.last, []
    for epoch in range(6):
        for batch in batches(order, 4):
            attached.append(source.attached)
            source.give(torch.from_numpy(np.stack([field(i, epoch) for i in batch])))
            order.step()
            source.waiting.clear()
    next(iter(order.sampler))
    orders = [order.history(epoch).tolist() for epoch in range(7)]
    assert attached == ([True] * 5 + [False] * 5) * 3  # hooks are off where nothing is learned
    assert orders[1] == orders[2] != orders[0]
    assert orders[3] == orders[4] != orders[2]
    assert all(is_permutation(one, N) for one in orders)

    plain = GraB(None, N)
    assert run(plain, field, 1, batch_size=4)[1] == orders[1]


@pytest.mark.parametrize("stop", [2, 3, 4])
@pytest.mark.parametrize("learn", [Multiples(3, 9), lambda epoch: epoch % 3 == 0])
def test_a_schedule_is_saved_and_resumed(learn: Any, stop: int) -> None:
    field = gradient_field(N, DIM)
    whole = GraB(None, N, learn=learn)
    wanted = run(whole, field, 7, batch_size=4)
    assert wanted == run(GraB(None, N, learn=Every(3)), field, 7, batch_size=4)
    order = GraB(None, N, learn=learn)
    for epoch in range(stop):
        run_epoch(order, field, epoch, 4)
    other = GraB(None, N, learn=learn)
    other.load_state_dict(reloaded(order.state_dict()))
    for epoch in range(stop, 7):
        assert run_epoch(other, field, epoch, 4) == wanted[epoch]
    assert [other.history(epoch).tolist() for epoch in range(7)] == wanted[:7]
    with pytest.raises(StateError, match=r"learn='(Multiples\(k=3, epochs=9\)|<lambda>)'; expected learn='Until\("):
        GraB(None, N, learn=Until(3)).load_state_dict(order.state_dict())


def test_the_saved_name_of_a_schedule_is_no_address() -> None:
    """Each process has its own: the state could not be loaded in another."""

    class Nameless:
        def __call__(self, epoch: int) -> bool:
            return True

    def functions() -> list[Any]:
        def even(epoch: int) -> bool:
            return epoch % 2 == 0

        return [even, lambda epoch: True, partial(operator.lt, 2), Nameless(), Nameless().__call__, Until(2)]

    for learn, same in zip(functions(), functions(), strict=True):
        saved = GraB(None, N, learn=learn).state_dict()["learn"]
        assert "0x" not in saved
        assert saved == GraB(None, N, learn=same).state_dict()["learn"]
        assert any(name in saved for name in ("even", "lambda", "partial", "Nameless", "Until(epochs=2)"))


@pytest.mark.parametrize("bad", ["always", Multiples, Every, 3, lambda epoch: epoch, lambda epoch: None])
def test_what_is_no_schedule_is_refused(bad: Any) -> None:
    with pytest.raises(InputError, match="learn="):
        GraB(None, N, learn=bad)


def test_a_schedule_that_fails_later_changes_nothing() -> None:
    field = gradient_field(N, DIM)
    order = GraB(None, N, learn=lambda epoch: True if epoch < 2 else "no")
    wanted = run(GraB(None, N), field, 1, batch_size=4)
    for epoch in range(2):
        assert run_epoch(order, field, epoch, 4) == wanted[epoch]
    before = order.state_dict()
    for _ in range(2):
        with pytest.raises(InputError, match="which returned 'no' for epoch 2; expected True or False"):
            next(iter(order.sampler))
        assert same_state(order.state_dict(), before)
    fresh = GraB(None, N, learn=lambda epoch: True if epoch < 2 else "no")
    start = fresh.state_dict()
    with pytest.raises(InputError, match="epoch 2"):
        fresh.load_state_dict(before | {"epoch": 2})
    assert same_state(fresh.state_dict(), start)


# --- an order -------------------------------------------------------------------------------------


class Rotated(Order):
    """Looks at no gradient: each epoch begins one further on."""

    def __init__(self, n: Any, *, seed: int = 0) -> None:
        super().__init__(n, seed=seed, arrange=lambda epoch, units: np.roll(np.arange(units), -epoch))


class LargestLast:
    """Orders the examples by the length of their gradients."""

    def begin(self, arrangement: Arrangement, *, seed: int, dim: int | None) -> None:
        self.arrangement = arrangement
        self.lengths = np.zeros(arrangement.units.count)

    def log(self, units: int, settle: Settle) -> OrderLog:
        return OrderLog(units, settle)

    def learn(self, batch: Gradients, slots: Any, *, whole_units: bool, epoch: int) -> Decision:
        self.lengths[slots] = batch.gram().diagonal().sqrt().numpy()
        return Decision(slots, np.ones(len(slots), dtype=np.int8))

    def choose(self) -> Any:
        return self.arrangement.order[np.argsort(self.lengths, kind="stable")]

    def next_epoch(self) -> None:
        self.lengths[:] = 0

    def abandoned(self) -> list[int]:
        return []

    def skip(self, slots: Any) -> None:
        pass

    def release(self) -> None:
        pass

    def identity(self) -> dict[str, Any]:
        return {}

    def save(self, *, vectors: bool) -> dict[str, Any]:
        return {"lengths": self.lengths.tolist()}

    def check(self, state: dict[str, Any]) -> None:
        pass

    def load(self, state: dict[str, Any]) -> list[int]:
        self.lengths = np.array(state["lengths"])
        return []

    def marks(self) -> Any:
        return self.lengths.astype(np.int64)


def test_an_order_that_looks_at_no_gradient() -> None:
    order = Rotated(5, seed=2)
    first = list(order.sampler)
    order.step()
    assert list(order.sampler) == first[1:] + first[:1]
    with pytest.raises(InputError, match=r"an arrangement of shape \(3,\)"):
        list(Order(4, arrange=lambda epoch, units: np.arange(3)).sampler)
    with pytest.raises(InputError, match="neither arrange= nor learner="):
        Order(4)


def test_an_order_that_learns() -> None:
    field = gradient_field(N, DIM)
    wanted = run(Order(N, learner=LargestLast(), seed=3), field, 3, batch_size=4)
    for epoch in range(3):
        lengths = [float(np.linalg.norm(field(i, epoch))) for i in wanted[epoch + 1]]
        assert lengths == sorted(lengths)
    order = Order(N, learner=LargestLast(), seed=3)
    run_epoch(order, field, 0, 4)
    for batch, _ in zip(batches(order, 4), range(2), strict=False):
        order.observe(np.stack([field(i, 1) for i in batch]))
    other = Order(N, learner=LargestLast(), seed=3)
    other.load_state_dict(reloaded(order.state_dict()))
    other.resume()
    assert run_epoch(other, field, 1, 4) == wanted[1][8:]
    assert run_epoch(other, field, 2, 4) == wanted[2]
    assert [other.history(epoch).tolist() for epoch in range(3)] == wanted[:3]
