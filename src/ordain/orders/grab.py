"""GraB (Algorithm 4): online gradient balancing. O(d) memory, O(n) work."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import nn

from ordain.balancing import Balancer, BalanceState, Decision, Deterministic, balance, check_balancer
from ordain.balancing.state import broken
from ordain.errors import GradientError, InputError
from ordain.gradients import Gradients
from ordain.gradients.memory import shrinking
from ordain.orders.arrangement import Arrangement
from ordain.orders.order import Order
from ordain.orders.saved_state import State
from ordain.orders.schedule import Schedule, Until, check_epochs
from ordain.orders.sign_log import Settle, SignLog
from ordain.orders.units import Indices

__all__ = ["GraB"]


class GraB(Order):
    """GraB (Algorithm 4): sign each example's gradient so that the signed sum stays small; reorder by the signs.

    +1 examples come first in the next epoch, -1 examples last and reversed (Algorithm 3). Signs are
    exactly those of the one-example-at-a-time algorithm, at any batch size. With a loss that mixes examples, such as a
    contrastive one, an example's gradient is that of the whole loss through its own outputs, times B.

    Args:
        model: the model to watch (it is never wrapped); ``None`` if gradients are passed to ``observe()``.
        n: the number of examples, or the dataset.
        centering: ``"mean"`` subtracts the last epoch's mean gradient (Algorithm 4); ``"pair"`` balances
            differences of consecutive examples, which needs no mean and works from the first epoch on.
        balancer: :class:`~ordain.Deterministic` (Algorithm 5) by default.
        learn: the epochs in which to learn: :class:`~ordain.Always` by default, ``Until(1)`` (the paper's *1-step
            GraB*), ``Every(k)``, or any function of the epoch.
        freeze_after: short for ``learn=Until(freeze_after)``.
        **options: see :class:`~ordain.Order`: gradients, params, loss_reduction, batch_dim, group, sketch,
            precondition, seed, distributed.

    >>> import torch
    >>> order = GraB(None, 4, seed=1)
    >>> first = list(order.sampler)
    >>> order.observe(torch.tensor([[1.0], [2.0], [-1.0], [1.0]]))
    >>> [first.index(i) for i in order.sampler]
    [1, 2, 3, 0]
    """

    def __init__(
        self,
        model: nn.Module | None,
        n: Any,
        *,
        centering: Literal["mean", "pair"] = "mean",
        balancer: Balancer | None = None,
        learn: Schedule | None = None,
        freeze_after: int | None = None,
        **options: Any,
    ) -> None:
        if centering not in ("mean", "pair"):
            raise InputError(f"centering={centering!r}", expected="'mean' or 'pair'", remedy="'mean' is Algorithm 4.")
        check_balancer(balancer)
        if freeze_after is not None:
            check_epochs(freeze_after, f"freeze_after={freeze_after!r}")
            if learn is not None:
                raise InputError(
                    "both learn= and freeze_after=", expected="one of them", remedy="freeze_after=k is Until(k)."
                )
            learn = Until(freeze_after)
        self._balancing = BalancingLearner(balancer or Deterministic(), paired=centering == "pair")
        super().__init__(n, model=model, learner=self._balancing, learn=learn, **options)

    @property
    def failures(self) -> int:
        """How many vectors the balancer failed on and Algorithm 5 decided instead, over all epochs."""
        return self._balancing.state.failures

    @property
    def frozen(self) -> bool:
        """Has the order stopped learning?"""
        return self._schedule.ended(self.epoch)


class BalancingLearner:
    """Signs from balancing; its only state is a :class:`~ordain.balancing.BalanceState`."""

    def __init__(self, balancer: Balancer, *, paired: bool) -> None:
        self._balancer, self._paired = balancer, paired
        self._abandoned: list[int] = []

    def log(self, units: int, settle: Settle) -> SignLog:
        return SignLog(units, settle)

    def begin(self, arrangement: Arrangement, *, seed: int, dim: int | None) -> None:
        self._arrangement = arrangement
        units = arrangement.units.count
        count = units // 2 if self._paired else units
        self.state = BalanceState(self._balancer, paired=self._paired, count=count, seed=seed)

    def learn(self, batch: Gradients, slots: Indices, *, whole_units: bool, epoch: int) -> Decision:
        table = self.state.table
        # A table of float64 takes float32 too: it may have been widened.
        if table is not None and (table.dtype.itemsize < batch.dtype.itemsize or table.device != batch.device):
            raise GradientError(
                f"gradients of {batch.dtype} on {batch.device}",
                expected=f"{table.dtype} on {table.device}, as before",
                remedy="Convert them, or create a new order; a saved state has one dtype.",
            )
        sizes = None
        if not whole_units and self._arrangement.units.group > 1:
            sizes = self._arrangement.sizes(slots)
        decision = shrinking(partial(self._balance, batch, slots, sizes, epoch))
        return decision.with_aside(self.abandoned(), decision.not_finite) if self._abandoned else decision

    def _balance(self, batch: Gradients, slots: Indices, sizes: Indices | None, epoch: int) -> Decision:
        try:
            return balance(self.state, batch, slots, sizes=sizes, stream=epoch)
        except BaseException:
            if self.state.changing:  # a batch was partially accumulated
                self._abandoned += self.state.reset()
            raise

    def abandoned(self) -> list[int]:
        found, self._abandoned = self._abandoned, []
        return found

    def skip(self, slots: Indices) -> None:
        if self.state.part_slot in slots:
            self.state.drop_part()

    def choose(self) -> None:
        return None

    def next_epoch(self) -> None:
        self.state.next_pass()

    def release(self) -> None:
        self.state.release()

    def identity(self) -> dict[str, Any]:
        return {"centering": "pair" if self._paired else "mean", "balancer": repr(self._balancer)}

    def save(self, *, vectors: bool) -> State:
        return self.state.save(vectors=vectors)

    def check(self, state: State) -> None:
        self.state.check(state, state["dim"])
        units = self._arrangement.units
        first, part, examples = state["counters"][-3:]
        if max(first, part) >= units.count or examples >= units.group:
            raise broken("counters", f"units {first} and {part} of {units.count}", "units that there are")

    def load(self, state: State) -> list[int]:
        return self.state.load(state)

    def marks(self) -> Indices:
        return self.state.marks()
