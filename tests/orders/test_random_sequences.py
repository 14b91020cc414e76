"""Random sequences of draws, gradients, faults, saves and loads, beside an order that nothing ever happens to.

A machine drives two orders at once. The *subject* is saved, loaded into a new object and gone on with, given gradients
that are refused, and (the second machine) trained through a model that fails. The *shadow* is fed by ``observe()`` what
the subject should have learned. After every step they must agree, and nothing may be lost.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    PERMUTATIONS,
    Regression,
    build,
    gradient_field,
    is_permutation,
    loop_gradients,
    reloaded,
    same_state,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn
from torch.nn.functional import cross_entropy

from ordain import Always, Every, FixedOrder, GraB, Schedule, Until
from ordain.errors import GradientError, StepError
from ordain.orders import ORDERS

SEQUENCES = settings(stateful_step_count=30)
UNITS: dict[str, Callable[[int], Any]] = {
    "grab-units": lambda n: GraB(None, n, group=3),
    "grab-pair-units": lambda n: GraB(None, n, centering="pair", group=2),
    "grab-every-second": lambda n: GraB(None, n, learn=Every(2)),
    "grab-pair-later": lambda n: GraB(None, n, centering="pair", learn=later),
    "fixed": lambda n: FixedOrder(np.random.default_rng(n).permutation(n)),
}


def later(epoch: int) -> bool:
    return epoch in (1, 2, 4)


LEARN: dict[str, Schedule] = {  # of the orders above, where it is not Always()
    "grab-1step": Until(1),
    "grab-lazy": Every(3, after=2),
    "grab-head-lazy": Every(3, after=2),
    "herding-head-lazy": Every(3, after=2),
    "grab-every-second": Every(2),
    "grab-pair-later": later,
}


class Machine(RuleBasedStateMachine):
    """What both machines do; they differ in how gradients come about."""

    n: int
    order: Any  # the subject
    shadow: Any
    schedule: Schedule

    def start(self) -> None:
        self.pending: list[int] = []  # drawn, and neither observed nor passed over
        self.drawn: list[int] = []  # of this pass
        self.passes: tuple[Iterator[int], Iterator[int]] | None = None

    @property
    def blind(self) -> bool:
        return "places" not in self.order.state_dict()

    @property
    def learning(self) -> bool:
        return not self.blind and self.schedule(self.order.epoch)

    def fresh(self) -> Any:
        raise NotImplementedError

    # --- draws ---

    @rule(count=st.integers(1, 6))
    def draw(self, count: int) -> None:
        if self.passes is None:
            self.passes = iter(self.order.sampler), iter(self.shadow.sampler)
            self.pending, self.drawn = [], []
        for _ in range(count):
            one, other = (next(indices, None) for indices in self.passes)
            assert one == other
            if one is None:
                assert is_permutation(self.drawn, self.n)
                break
            self.pending.append(one)
            self.drawn.append(one)

    @rule()
    def end_pass(self) -> None:
        """An early break, an exception that leaves the loop, or just the end of the epoch."""
        if self.blind and self.pending == self.drawn != []:
            self.learn(1)  # an order that sees no gradients cannot tell an epoch cut short from a look at the data
        self.passes, self.pending = None, []

    @precondition(lambda self: self.pending)
    @rule(count=st.integers(1, 6))
    def pass_over(self, count: int) -> None:
        count = min(count, len(self.pending))
        self.order.skip(count)
        self.shadow.skip(count)
        del self.pending[:count]

    # --- saves ---

    @rule()
    def save_and_load(self) -> None:
        state = self.order.state_dict()
        self.order.detach()
        self.order = self.fresh()
        self.order.load_state_dict(reloaded(state))
        assert same_state(self.order.state_dict(), state)
        if self.passes is not None:  # in mid-epoch: what was drawn ahead is drawn again
            self.order.resume(len(self.drawn) - len(self.pending))
            if len(self.drawn) - len(self.pending) < self.n:
                again = iter(self.order.sampler)
                assert [next(again) for _ in self.pending] == self.pending
                self.passes = again, self.passes[1]
                self.draw(0 if self.pending else 1)  # the first draw is what goes on
            else:
                self.passes = None

    # --- what must hold ---

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.order.epoch == self.shadow.epoch
        for epoch in {0, self.order.epoch}:
            history = self.order.history(epoch).tolist()
            assert history == self.shadow.history(epoch).tolist()
            assert is_permutation(history, self.n)
        mine, other = self.order.state_dict(), self.shadow.state_dict()
        for name, vector in (mine.get("vectors") or {}).items():
            assert torch.isfinite(vector).all()
            torch.testing.assert_close(vector, other["vectors"][name], rtol=1e-6, atol=1e-9)
        if not self.blind:
            assert torch.equal(mine["places"], other["places"])

    def teardown(self) -> None:
        """Two more epochs, whole."""
        for _ in range(2 if hasattr(self, "order") else 0):
            self.end_pass()
            self.draw(self.n + 1)
            assert is_permutation(self.drawn, self.n)
            while self.pending:
                self.learn(3)
            self.nothing_is_lost()

    def learn(self, count: int) -> None:
        raise NotImplementedError


class Observed(Machine):
    """Gradients given by ``observe()``, to every order."""

    @initialize(name=st.sampled_from([*PERMUTATIONS, *UNITS]), n=st.integers(1, 11))
    def begin(self, name: str, n: int) -> None:
        self.n, self.name, self.schedule = n, name, LEARN.get(name, Always())
        self.field = gradient_field(n, 3)
        self.order, self.shadow = self.fresh(), self.fresh()
        self.start()

    def fresh(self) -> Any:
        return UNITS[self.name](self.n) if self.name in UNITS else build(self.name, self.n)

    def rows(self, count: int) -> np.ndarray:
        return np.stack([self.field(i, self.order.epoch) for i in self.pending[:count]])

    @precondition(lambda self: self.pending)
    @rule(count=st.integers(1, 6))
    def learn(self, count: int) -> None:
        rows = self.rows(count)
        self.order.observe(rows)
        self.shadow.observe(rows)
        del self.pending[: len(rows)]

    @precondition(lambda self: self.pending)
    @rule(count=st.integers(1, 6), bad=st.integers(0, 5), value=st.sampled_from([np.nan, np.inf, 1e300, 1e150]))
    def learn_what_is_not_finite(self, count: int, bad: int, value: float) -> None:
        rows = self.rows(count)
        rows[bad % len(rows)] = value
        self.order.observe(rows)
        self.shadow.observe(rows)
        del self.pending[: len(rows)]

    @precondition(lambda self: self.learning)
    @rule(kind=st.sampled_from(["length", "too many", "integers"]))
    def refused(self, kind: str) -> None:
        """Nothing may change: the shadow is not told."""
        if kind == "too many":
            with pytest.raises(StepError):
                self.order.observe(np.ones((self.n + 1, 3)))
        elif self.order.state_dict()["dim"] is not None:
            wrong = np.ones((1, 4)) if kind == "length" else np.ones((1, 3), dtype=np.int64)
            with pytest.raises(GradientError):
                self.order.observe(wrong)

    @precondition(lambda self: self.passes is not None)
    @rule()
    def older_iterator(self) -> None:
        """A draw from a pass that is over raises, and takes nothing from the pass that is not."""
        stale = self.passes[0]
        self.end_pass()
        self.draw(1)
        with contextlib.suppress(StepError):
            assert next(stale, None) is None  # it was drawn to its end


class Trained(Machine):
    """Gradients out of a model's backward, which may fail at any stage."""

    @initialize(
        centering=st.sampled_from(["mean", "pair"]),
        n=st.integers(2, 11),
        deep=st.booleans(),
        schedule=st.sampled_from([Always(), Every(2), later]),
    )
    def begin(self, centering: Any, n: int, deep: bool, schedule: Schedule) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)] if deep else [nn.Linear(5, 3)]
        self.n, self.centering, self.schedule = n, centering, schedule
        self.model, self.data = nn.Sequential(*layers).double(), Regression(n)
        self.order, self.shadow = self.fresh(), GraB(None, n, centering=centering, learn=schedule)
        self.start()

    def fresh(self) -> Any:
        return GraB(self.model, self.n, centering=self.centering, learn=self.schedule)

    def loss(self, batch: list[int]) -> torch.Tensor:
        return cross_entropy(self.model(self.data.x[batch]), self.data.y[batch])

    @precondition(lambda self: self.pending)
    @rule(count=st.integers(1, 6))
    def learn(self, count: int) -> None:
        batch = self.pending[:count]
        rows = loop_gradients(copy.deepcopy(self.model), cross_entropy, self.data.x[batch], self.data.y[batch])
        self.loss(batch).backward()
        self.order.step()
        self.shadow.observe(rows)
        with torch.no_grad():
            for p in self.model.parameters():
                p -= 0.1 * p.grad
        self.model.zero_grad()
        del self.pending[: len(batch)]

    @precondition(lambda self: self.pending)
    @rule(
        count=st.integers(1, 6),
        stage=st.sampled_from(["forward", "loss", "backward", "before step"]),
        error=st.sampled_from([RuntimeError, KeyboardInterrupt]),
        again=st.booleans(),
    )
    def fail(self, count: int, stage: str, error: type[BaseException], again: bool) -> None:
        batch = self.pending[:count]

        def raise_it(*_: Any) -> None:
            raise error("fault")

        hooked = {"forward": self.model[-1].register_forward_pre_hook, "backward": self.model[-1].weight.register_hook}
        handle = hooked[stage](raise_it) if stage in hooked else None

        def run() -> None:
            loss = self.loss(batch)
            if stage != "loss":
                loss.backward()
            raise_it()

        with pytest.raises(error, match="fault"):
            run()
        if handle is not None:
            handle.remove()
        self.model.zero_grad()
        if not again or stage == "before step":
            self.pass_over(len(batch))

    @precondition(lambda self: self.pending)
    @rule(where=st.sampled_from(["eval", "no_grad", "no backward"]))
    def evaluate(self, where: str) -> None:
        if where == "eval":
            self.model.eval()
            self.loss(self.pending).backward()
            self.model.train()
            self.model.zero_grad()
        elif where == "no_grad":
            with torch.no_grad():
                self.loss(self.pending)
        else:
            self.loss(self.pending)

    @precondition(lambda self: self.learning)
    @rule()
    def step_out_of_turn(self) -> None:
        with pytest.raises(StepError, match="no new gradients"):
            self.order.step()


@pytest.mark.filterwarnings("ignore::ordain.errors.OrdainWarning")
@pytest.mark.parametrize("machine", [Observed, Trained])
def test_random_sequences(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=SEQUENCES)


def test_recipes_say_when_they_learn() -> None:
    assert {name: recipe.learn for name, recipe in ORDERS.items()} == {
        name: LEARN.get(name, Always()) for name in ORDERS
    }
