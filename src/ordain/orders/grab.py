"""GraB (Algorithm 4): online gradient balancing. O(d) memory, O(n) work."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ordain import herding
from ordain.balancing import Balancer, Deterministic, check_balancer
from ordain.distributed.share import check_agreement
from ordain.errors import InputError
from ordain.orders.balanced import BalancedOrder
from ordain.orders.base import Indices
from ordain.orders.gathered import check_gathered
from ordain.orders.placed import ASIDE
from ordain.orders.places import pack, unpack
from ordain.orders.state import State, array, broken, check_vectors


class GraB(BalancedOrder):
    """Give each example's gradient a sign that keeps the signed sum small; reorder by the signs.

    +1 examples come first in the next epoch, -1 examples last and reversed (Algorithm 3). Signs are
    exactly those of one example at a time, whatever the batch size.

    Args:
        model: watched from now on (never wrapped); ``None`` if gradients come through ``observe()``.
        n: the number of examples, or the dataset.
        centering: ``"mean"`` subtracts the last epoch's mean gradient (Algorithm 4); ``"pair"`` balances
            differences of consecutive examples: no mean to keep, and good from the first epoch on.
        balancer: :class:`~ordain.balancing.Deterministic` (Algorithm 5) by default.
        freeze_after: learn for this many epochs, then keep the order; 1 is the paper's *1-step GraB*.
        **options: see :class:`~ordain.orders.learned.LearnedOrder`: gradients, params, loss_reduction,
            batch_dim, group, sketch, seed.

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
        freeze_after: int | None = None,
        **options: Any,
    ) -> None:
        if centering not in ("mean", "pair"):
            raise InputError(f"centering={centering!r}", expected="'mean' or 'pair'", remedy="'mean' is Algorithm 4.")
        if freeze_after is not None and (
            isinstance(freeze_after, bool) or not isinstance(freeze_after, int) or freeze_after < 1
        ):
            raise InputError(f"freeze_after={freeze_after!r}", expected="epochs >= 1 or None", remedy="Try 1.")
        check_balancer(balancer)
        super().__init__(model, n, paired=centering == "pair", balancer=balancer or Deterministic(), **options)
        self._freeze_after = freeze_after
        # The places of each epoch since _origin, two bits a unit. Replaced and never changed: states share it.
        self._log = np.empty((0, 2 * (-(-self._units // 8))), dtype=np.uint8)
        check_agreement(self._share, centering=centering, balancer=repr(self._balancer), freeze_after=freeze_after)

    # --- what a user sees -------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        """Has the order stopped learning?"""
        return self._freeze_after is not None and self._epoch >= self._freeze_after

    def step(self) -> None:
        if self.frozen:
            self._touched = self._uncounted = True
        else:
            super().step()

    def skip(self, count: int) -> None:
        if self.frozen and self._together is not None:
            self.step()  # nobody else may be asked: a step of a frozen order says nothing either
        else:
            super().skip(count)

    def _keep_company(self) -> None:
        if not self.frozen:
            super()._keep_company()

    def observe(self, grads: Any, indices: Any = None) -> None:
        if self.frozen:
            self._touched = self._uncounted = True
        else:
            super().observe(grads, indices)

    def history(self, epoch: int) -> Indices:
        self._check_epoch(epoch)
        if epoch == self._epoch:
            return self._expand(self._arrangement)
        arrangement = self._origin_arrangement if self._origin else np.arange(self._units)
        for places in self._log[: epoch - self._origin]:
            arrangement = self._settled(herding.rearranged(unpack(places, self._units), arrangement))
        return self._expand(arrangement)

    # --- one epoch --------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._settle()
        if not self.frozen:
            places = np.where(np.abs(self._places) == 1, self._places, 0)
            # Alg. 3; this is Alg. 4's sigma_{k+1}.
            self._arrangement = self._settled(herding.rearranged(places, self._arrangement))
            self._log = np.append(self._log, pack(places)[None], axis=0)
            table = self._vectors.get("table")
            if table is not None:
                if self._summed:
                    torch.div(table[2], self._summed, out=table[1])  # Alg. 4's m_{k+1}
                    self._mean_square = float(table[1] @ table[1])
                    table[2].zero_()
                table[0].zero_()
                self._vectors = {"table": table}
            self._failures += int(self._state[1])
            self._begin_epoch()
        super()._advance()
        if self.frozen:
            self.detach()
            self._vectors = {}

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self, *, vectors: bool = True, history: bool = True) -> State:
        return super().state_dict(vectors=vectors, history=history) | {
            "vectors": {name: vector.clone() for name, vector in self._vectors.items()} if vectors else None,
            "balancer_state": self._state.tolist(),
            "counters": [getattr(self, name) for name in _COUNTERS],
            "log": torch.from_numpy(self._log if history else self._log[:0]),
            **({"gathered": self._gathered.state()} if vectors and self._gathered.rows else {}),
        }

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        for name, length in {"balancer_state": len(self._state), "counters": len(_COUNTERS)}.items():
            if len(state[name]) != length or not all(type(one) in (int, float) for one in state[name]):
                raise broken(name, repr(state[name]), f"{length} numbers")
        learned = state["epoch"] if self._freeze_after is None else min(state["epoch"], self._freeze_after)
        if len(state["log"]) != max(learned - state["origin"], 0):
            raise broken("log", f"of {len(state['log'])} epochs", str(max(learned - state["origin"], 0)))
        if state["vectors"] is not None:
            shapes: dict[str, tuple[int, ...]] = {"table": (1 if self._paired else 3, state["dim"])}
            for name, slot in (("first", "_slot_first"), ("part", "_slot_part")):
                if state["counters"][_COUNTERS.index(slot)] >= 0:
                    shapes[name] = (state["dim"],)
            found = state["vectors"]
            if not isinstance(found, dict) or ((found or len(shapes) > 1) and found.keys() != shapes.keys()):
                raise broken("vectors", repr(found)[:80], f"a dict of {', '.join(shapes)}")
            for name, vector in found.items():
                check_vectors(name, vector, shapes[name])
        if state.get("gathered") is not None:
            table = state["vectors"].get("table") if state["vectors"] else None
            dtype = None if table is None else table.dtype
            check_gathered(state["gathered"], dim=state["dim"] or 0, units=self._units, dtype=dtype)

    def _load(self, state: State) -> None:
        super()._load(state)
        self._parameter = self._balancer.parameter(n=self._vectors_signed(), d=self._dim or 1)
        self._state = np.array(state["balancer_state"])
        for name, value in zip(_COUNTERS, state["counters"], strict=True):
            setattr(self, name, value)
        self._log = array(state["log"])
        if state["vectors"] is None:
            self._begin_again()
        else:
            self._vectors = {name: vector.clone() for name, vector in state["vectors"].items()}
        self._gathered.load(state.get("gathered"), self._dim or 0)
        if self._together is not None:
            self._settle()  # ranks gather nothing
        if self.frozen:
            self.detach()

    def _marks(self) -> list[Indices]:
        return [*super()._marks(), np.array([self._signed, self._summed, len(self._vectors)])]

    def _begin_again(self) -> None:
        """The vectors were left out: s = 0 and m = 0. Places already given stay; what waited keeps the middle."""
        signed = self._signed  # random numbers go on where they were
        if self._slot_part >= 0:
            self._places[self._slot_part] = ASIDE  # the rest of that unit is no whole unit
        self._vectors, self._mean_square = {}, 0.0
        self._failures += int(self._state[1])
        self._begin_epoch()
        self._signed = signed

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {
            "centering": "pair" if self._paired else "mean",
            "balancer": repr(self._balancer),
            "freeze_after": self._freeze_after,
        }


_COUNTERS = (
    "_failures",
    "_signed",
    "_summed",
    "_surplus",
    "_mean_inner",
    "_mean_square",
    "_slot_first",
    "_slot_part",
    "_part_count",
)
