"""GraB (Algorithm 4): online gradient balancing. O(d) memory, O(n) work."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ordain import _rng, herding
from ordain.balancing import Balancer, Deterministic
from ordain.errors import InputError
from ordain.gradients import Gradients
from ordain.gradients.carried import Carried
from ordain.orders.base import Indices
from ordain.orders.herding_order import check_epoch
from ordain.orders.learned import ASIDE, WAITING, LearnedOrder
from ordain.orders.units import Units, differences

Matrix = NDArray[np.float64]
Signs = NDArray[np.int8]


class GraB(LearnedOrder):
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
            group, seed.

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
        if freeze_after is not None and (not isinstance(freeze_after, int) or freeze_after < 1):
            raise InputError(f"freeze_after={freeze_after!r}", expected="epochs >= 1 or None", remedy="Try 1.")
        super().__init__(model, n, **options)
        self._paired = centering == "pair"
        self._balancer = balancer or Deterministic()
        self._freeze_after = freeze_after
        self._log: list[NDArray[np.uint8]] = []  # each past epoch's places, two bits a unit
        self._failures = 0
        self._vectors: dict[str, Tensor] = {}  # all of length d: s, sum, m, and what waits: first, part
        self._state: Matrix
        self._signed: int
        self._summed: int
        self._begin_epoch()

    # --- what a user sees -------------------------------------------------------------------------

    @property
    def failures(self) -> int:
        """How many vectors the balancer failed on and Algorithm 5 decided instead, over all epochs."""
        return self._failures + int(self._state[1])

    @property
    def frozen(self) -> bool:
        """Has the order stopped learning?"""
        return self._freeze_after is not None and self._epoch >= self._freeze_after

    def step(self) -> None:
        if self.frozen:
            self._touched = True
        else:
            super().step()

    def observe(self, grads: Any, indices: Any = None) -> None:
        if self.frozen:
            self._touched = True
        else:
            super().observe(grads, indices)

    def history(self, epoch: int) -> Indices:
        check_epoch(epoch, self._epoch)
        if epoch == self._epoch:
            return self._expand(self._arrangement)
        arrangement = np.arange(self._units)
        for places in self._log[:epoch]:
            arrangement = herding.reorder(_unpack(places, self._units), arrangement)
        return self._expand(arrangement)

    # --- one batch --------------------------------------------------------------------------------

    def _take(self, batch: Gradients, slots: Indices) -> None:
        rows, row_slots, counts = self._with_carried(batch, slots)
        gram = rows.gram().to("cpu", torch.float64).numpy()
        good = np.isfinite(gram.diagonal())
        if self.group > 1:
            good &= self._places[row_slots] != ASIDE
        if not good.all():
            self._take_finite(batch, slots)
            return

        units = Units.single(row_slots)
        if self.group > 1:
            units = Units.cut(row_slots, counts, self._sizes()[row_slots], carried=rows.size - batch.size)
        weights = units.weights  # of the vectors to sign, in terms of rows; None is the identity
        if self._paired:
            pairs = differences(len(units.slots))
            weights = pairs if weights is None else pairs @ weights

        v = self._vectors or self._allocate(batch)
        dots = rows.dot(torch.stack([v["s"]] if self._paired else [v["s"], v["m"]])).to("cpu", torch.float64).numpy()
        if weights is not None:
            gram, dots = weights @ gram @ weights.T, dots @ weights.T
        inner = dots[0]
        if not self._paired:  # <s, g-m> and <g_i-m, g_j-m>, from the products of s, g and m
            gram = gram - dots[1][:, None] - dots[1][None, :] + float(v["m"] @ v["m"])
            inner = inner - float(v["s"] @ v["m"])

        def moved(signs: Signs, *more: Matrix) -> tuple[Tensor, list[Tensor]]:
            """The signed sum after these signs, and further weighted sums of the rows."""
            known = signs.astype(np.float64)
            by_row = known if weights is None else known @ weights[: len(signs)]
            table = np.zeros((1 + len(more), rows.size))
            table[0, : len(by_row)] = by_row
            table[1:] = more if more else 0.0
            s, *others = rows.weighted_sum(torch.from_numpy(table).to(rows.device, rows.dtype))
            s = s.add_(v["s"])
            return (s if self._paired else s.sub_(v["m"], alpha=float(known.sum()))), others

        u = None
        if self._balancer.random:
            u = _rng.uniforms(len(inner), seed=self.seed, stream=self._epoch, start=self._signed)
        state = self._state.copy()
        signs = self._balancer.signs(
            inner,
            gram,
            n=self._units // 2 if self._paired else self._units,
            d=rows.dim,
            state=state,
            u=u,
            sup=lambda found: float(moved(found)[0].abs().max()),
        )

        each = np.eye(rows.size) if units.weights is None else units.weights
        wanted: dict[str, Matrix] = {}
        if self._paired and len(units.slots) % 2:
            wanted["first"] = each[-1]  # waits for its partner
        if not self._paired:
            wanted["sum"] = each.sum(axis=0)
        if units.open_weights is not None:
            wanted["part"] = units.open_weights
        s, sums = moved(signs, *wanted.values())

        # All is known, and nothing was changed before this line.
        new = dict(zip(wanted, sums, strict=True))
        if "sum" in new:
            new["sum"] += v["sum"]
        self._vectors = {name: v[name] for name in ("sum", "m") if name in v} | new | {"s": s}
        self._state = state
        self._signed += len(signs)
        self._summed += 0 if self._paired else len(units.slots)
        self._places[units.slots[: len(signs) * (2 if self._paired else 1)]] = (
            np.stack([signs, -signs], axis=1).ravel() if self._paired else signs
        )
        self._slot_first = int(units.slots[-1]) if "first" in new else -1
        if "first" in new:
            self._places[self._slot_first] = WAITING
        self._slot_part, self._part_count = units.open_slot, units.open_count

    def _with_carried(self, batch: Gradients, slots: Indices) -> tuple[Gradients, Indices, Indices]:
        """The batch behind what waits for it; the slot of each row, and how many examples it stands for."""
        waiting = [("first", self._slot_first, self.group), ("part", self._slot_part, self._part_count)]
        waiting = [one for one in waiting if one[1] >= 0]
        if not waiting:
            return batch, slots, np.ones(len(slots), dtype=np.int64)
        names, carried, counts = zip(*waiting, strict=True)
        rows = Carried(torch.stack([self._vectors[name] for name in names]), batch)
        return rows, np.concatenate([carried, slots]), np.concatenate([counts, np.ones(len(slots), dtype=np.int64)])

    def _take_finite(self, batch: Gradients, slots: Indices) -> None:
        """Set bad examples aside (and the whole of their unit), and take the others."""
        bad = ~np.isfinite(batch.gram().diagonal().cpu().numpy())
        if bad.any():
            self._put_aside(np.unique(slots[bad]), int(bad.sum()))
        if self._slot_part >= 0 and self._places[self._slot_part] == ASIDE:
            self._slot_part, self._part_count = -1, 0
        kept = np.flatnonzero(self._places[slots] != ASIDE)
        if len(kept):
            self._take(batch.select(torch.from_numpy(kept).to(batch.device)), slots[kept])

    def _allocate(self, batch: Gradients) -> dict[str, Tensor]:
        names = ("s",) if self._paired else ("s", "sum", "m")
        self._vectors = {name: torch.zeros(batch.dim, dtype=batch.dtype, device=batch.device) for name in names}
        return self._vectors

    # --- one epoch --------------------------------------------------------------------------------

    def _begin_epoch(self) -> None:
        self._state = self._balancer.start()
        self._signed = 0  # vectors given a sign in this epoch
        self._summed = 0  # units in this epoch's mean
        self._slot_first = -1  # the unit that waits for its partner, in vectors["first"]
        self._slot_part, self._part_count = -1, 0  # the incomplete unit, in vectors["part"]
        self._vectors = {
            name: vector if name == "m" else torch.zeros_like(vector)
            for name, vector in self._vectors.items()
            if name in ("s", "sum", "m")
        }

    def _advance(self) -> None:
        if not self.frozen:
            places = np.where(np.abs(self._places) == 1, self._places, 0)
            self._arrangement = herding.reorder(places, self._arrangement)  # Alg. 3; Alg. 4's sigma_{k+1}
            self._log.append(_pack(places))
            if self._summed:
                self._vectors["m"] = self._vectors["sum"] / self._summed  # Alg. 4's m_{k+1}
            self._failures += int(self._state[1])
            self._begin_epoch()
        super()._advance()
        if self.frozen:
            self.detach()
            self._vectors = {}

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        width = 2 * (-(-self._units // 8))
        return super().state_dict() | {
            "vectors": {name: vector.clone() for name, vector in self._vectors.items()},
            "balancer_state": self._state.tolist(),
            "counters": [getattr(self, name) for name in _COUNTERS],
            "log": torch.from_numpy(np.array(self._log, dtype=np.uint8).reshape(-1, width)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._vectors = {name: vector.clone() for name, vector in state["vectors"].items()}
        self._state = np.array(state["balancer_state"])
        for name, value in zip(_COUNTERS, state["counters"], strict=True):
            setattr(self, name, value)
        self._log = list(state["log"].numpy().copy())
        if self.frozen:
            self.detach()

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {
            "centering": "pair" if self._paired else "mean",
            "balancer": repr(self._balancer),
            "freeze_after": self._freeze_after,
        }


_COUNTERS = ("_failures", "_signed", "_summed", "_slot_first", "_slot_part", "_part_count")


def _pack(places: Signs) -> NDArray[np.uint8]:
    """Signs in {-1, 0, +1} at two bits each: a thousand epochs of a million examples in 250 MB."""
    return np.concatenate([np.packbits(places > 0), np.packbits(places < 0)])


def _unpack(packed: NDArray[np.uint8], count: int) -> Signs:
    front, back = (np.unpackbits(half, count=count).astype(np.int8) for half in np.split(packed, 2))
    return front - back
