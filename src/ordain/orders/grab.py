"""GraB (Algorithm 4): online gradient balancing. O(d) memory, O(n) work."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ordain import _rng, herding
from ordain.balancing import Balancer, Deterministic, check_balancer
from ordain.errors import InputError
from ordain.gradients import ExactSource, Gradients
from ordain.gradients.carried import Carried
from ordain.gradients.factored import Factored
from ordain.orders.base import Indices
from ordain.orders.learned import ASIDE, WAITING, LearnedOrder
from ordain.orders.places import pack, unpack
from ordain.orders.state import State, array, broken, check_vectors
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
        super().__init__(model, n, **options)
        self._paired = centering == "pair"
        if self._paired and isinstance(self._source, ExactSource):
            self._source.forget_sums()
        self._balancer = balancer or Deterministic()
        self._freeze_after = freeze_after
        # The places of each epoch since _origin, two bits a unit. Replaced and never changed: states share it.
        self._log = np.empty((0, 2 * (-(-self._units // 8))), dtype=np.uint8)
        self._failures = 0
        self._vectors: dict[str, Tensor] = {}  # the table (see _allocate), and what waits: first, part
        self._mean_square = 0.0  # |m|^2
        self._parameter = 0.0  # the balancer's, for this n and d
        self._state: Matrix
        self._signed: int
        self._summed: int
        self._surplus: float
        self._mean_inner: float
        self._slot_first: int
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
            self._touched = self._uncounted = True
        else:
            super().step()

    def observe(self, grads: Any, indices: Any = None) -> None:
        if self.frozen:
            self._touched = self._uncounted = True
        else:
            super().observe(grads, indices)

    def history(self, epoch: int) -> Indices:
        self._check_epoch(epoch)
        if epoch == self._epoch:
            return self._expand(self._arrangement)
        arrangement = self._origin_arrangement
        for places in self._log[: epoch - self._origin]:
            arrangement = self._settled(herding.rearranged(unpack(places, self._units), arrangement))
        return self._expand(arrangement)

    # --- one batch --------------------------------------------------------------------------------

    def _take(self, batch: Gradients, slots: Indices) -> None:
        self._learn_or_mend(batch, slots, cut=self.group > 1)

    def _take_units(self, batch: Gradients, slots: Indices) -> None:
        self._learn_or_mend(batch, slots, cut=False)

    def _learn_or_mend(self, batch: Gradients, slots: Indices, *, cut: bool) -> None:
        try:
            self._learn(batch, slots, cut=cut)
        except BaseException:
            if self._changing:
                self._start_anew()
            raise

    def _start_anew(self) -> None:
        """Some of a batch is in the sums and nobody knows how much: balance from zero, as an epoch begins.

        Signs that were given stay. A unit or pair that waits for its rest keeps the middle, as does the batch.
        """
        if self._slot_part >= 0:
            self._places[self._slot_part] = ASIDE
        table = self._vectors["table"]
        table[0::2].zero_()
        self._vectors = {"table": table}
        self._failures += int(self._state[1])
        signed = self._signed
        self._begin_epoch()
        self._signed = signed  # a random balancer goes on with its numbers

    def _learn(self, batch: Gradients, slots: Indices, *, cut: bool) -> None:
        """Sign what the batch completes; ``cut`` says that its rows are examples, several to a unit."""
        table = self._vectors.get("table")
        if table is None:
            table = self._allocate(batch)
        known = table[: 1 if self._paired else 2]  # P, or P and m
        if self._slot_first < 0 and not cut and self._learn_plain(batch, slots, known):
            return
        rows, row_slots, counts = self._with_carried(batch, slots)
        products = rows.products(known)
        gram, dots = (part.to("cpu", torch.float64).numpy() for part in products)
        gram = np.triu(gram) + np.triu(gram, 1).T
        if not np.isfinite(gram.diagonal()).all() or (cut and (self._places[row_slots] == ASIDE).any()):
            self._learn_finite(batch, slots, cut=cut)
            return

        units = Units.cut(row_slots, counts, self._sizes(row_slots), carried=rows.size - batch.size) if cut else None
        unit_slots = units.slots if units else row_slots
        weights = units.weights if units else None  # of what is signed, in terms of rows; None is the identity
        if self._paired:
            pairs = differences(len(unit_slots))
            weights = pairs if weights is None else pairs @ weights
        if weights is not None:
            gram, dots = weights @ gram @ weights.T, dots @ weights.T
        inner, surplus = dots[0], self._surplus
        if not self._paired:
            # <s, z_t> and <z_i, z_j> for s = P - E m and z = g - m, from products of P, g and m.
            means, square = dots[1], self._mean_square
            inner = dots[0] - self._mean_inner - surplus * (means - square)
            gram = gram - means[:, None] - means[None, :] + square

        u = None
        if self._balancer.random:
            u = _rng.uniforms(len(inner), seed=self.seed, stream=self._epoch, start=self._signed)
        state = self._state.copy()
        signs = self._balancer.signs(
            inner,
            gram,
            n=self._vectors_signed(),
            d=rows.dim,
            state=state,
            u=u,
            sup=lambda found: self._sup(rows, found, weights),
        )

        # All is known, and nothing was changed before this line.
        self._changing = True
        by_row = signs.astype(np.float64) if weights is None else signs @ weights
        wanted = [by_row]
        if not self._paired:
            wanted.append(np.ones(rows.size) if units is None else units.weights.sum(axis=0))
            self._surplus += float(signs.sum())
            self._mean_inner += float(signs @ means)
            self._summed += len(unit_slots)
        coefficients = torch.from_numpy(np.stack(wanted)).to(rows.device, rows.dtype)
        waiting = self._waiting(rows, units, unit_slots)
        rows.weighted_sum(coefficients, out=table[:1] if self._paired else table[0:3:2])
        self._vectors = {"table": table, **waiting}
        self._state = state
        self._signed += len(signs)
        if self._paired:
            self._places[unit_slots[: 2 * len(signs)]] = np.stack([signs, -signs], axis=1).ravel()
        else:
            self._places[unit_slots] = signs
        self._slot_first = int(unit_slots[-1]) if "first" in waiting else -1
        if "first" in waiting:
            self._places[self._slot_first] = WAITING
        self._slot_part, self._part_count = (units.open_slot, units.open_count) if units else (-1, 0)
        self._changing = False

    def _learn_plain(self, batch: Gradients, slots: Indices, known: Tensor) -> bool:
        """The common case, compiled: nothing carried or left over, every row a unit, all finite."""
        if self._paired and len(slots) % 2:
            return False
        count = len(slots) // 2 if self._paired else len(slots)
        u = _NO_UNIFORMS
        if self._balancer.random:
            u = _rng.uniforms(count, seed=self.seed, stream=self._epoch, start=self._signed)
        elif len(u) < count:
            u = np.zeros(count)
        state = self._state.copy()
        signs = self._sign_layer(batch, u, state)
        if signs is None:
            signs = self._sign_batch(batch, known, u, state)
        if signs is None:
            return False
        if not self._paired:
            self._summed += count
        self._vectors = {"table": self._vectors["table"]}
        self._state = state
        self._signed += count
        self._places[slots] = signs
        self._changing = False
        return True

    def _sign_layer(self, batch: Gradients, u: Matrix, state: Matrix) -> NDArray[Any] | None:
        """``[B]`` signs, with the table brought up to date, where one small linear layer is the whole model."""
        layer = batch.layer() if isinstance(batch, Factored) else None
        if layer is None:
            return None
        from ordain._layer import layer_signs

        a, b, biased, scale = layer
        signs = np.empty(len(a), dtype=a.dtype)
        table = self._vectors["table"].numpy()
        signed, mean, total = (table[0],) * 3 if self._paired else table
        self._changing = True
        done, self._surplus, self._mean_inner = layer_signs(
            self._balancer.kind,
            a,
            b,
            scale,
            biased,
            self._paired,
            signed,
            mean,
            total,
            self._surplus,
            self._mean_inner,
            self._mean_square,
            u,
            state,
            self._parameter,
            signs,
        )
        self._changing = done
        if isinstance(self._source, ExactSource):
            self._source.forget_sums()
        return signs if done else None

    def _sign_batch(self, batch: Gradients, known: Tensor, u: Matrix, state: Matrix) -> NDArray[Any] | None:
        """The same from products of any batch."""
        gram, dots = batch.paired_products(known) if self._paired else batch.products(known)
        products = dots.cpu().numpy()
        signs = self._balancer.batch(
            gram.cpu().numpy(),
            products,
            paired=self._paired,
            surplus=self._surplus,
            mean_inner=self._mean_inner,
            mean_square=self._mean_square,
            parameter=self._parameter,
            state=state,
            u=u,
        )
        if signs is None:
            return None
        table = self._vectors["table"]
        each = torch.from_numpy(signs).to(batch.device).unsqueeze(0)
        self._changing = True
        if self._paired:
            batch.weighted_sum(each, out=table[:1])
            return signs
        if isinstance(batch, Factored):
            batch.add_signed(signs, table[0], table[2])
        else:
            batch.weighted_sum(torch.cat([each, torch.ones_like(each)]), out=table[::2])
        self._surplus += float(signs.sum())
        self._mean_inner += float(signs @ products[1])
        return signs

    def _sup(self, rows: Gradients, signs: Signs, weights: Matrix | None) -> float:
        """|s|_inf once the first few vectors of the batch have these signs."""
        table = self._vectors["table"]
        by_row = np.zeros((1, rows.size))
        if weights is None:
            by_row[0, : len(signs)] = signs
        else:
            by_row[0] = signs @ weights[: len(signs)]
        s = table[:1] + rows.weighted_sum(torch.from_numpy(by_row).to(rows.device, rows.dtype))
        if not self._paired:
            s.sub_(table[1], alpha=self._surplus + float(signs.sum()))
        return float(s.abs().max())

    def _waiting(self, rows: Gradients, units: Units | None, slots: Indices) -> dict[str, Tensor]:
        """What the next batch must complete: the first of a pair, part of a unit."""
        left: dict[str, Matrix] = {}
        if self._paired and len(slots) % 2:
            left["first"] = np.eye(rows.size)[-1] if units is None else units.weights[-1]
        if units is not None and units.open_weights is not None:
            left["part"] = units.open_weights
        if not left:
            return {}
        sums = rows.weighted_sum(torch.from_numpy(np.stack(list(left.values()))).to(rows.device, rows.dtype))
        return dict(zip(left, sums, strict=True))

    def _with_carried(self, batch: Gradients, slots: Indices) -> tuple[Gradients, Indices, Indices]:
        """The batch behind what waits for it; the slot of each row, and how many examples it stands for."""
        ones = np.ones(len(slots), dtype=np.int64)
        if self._slot_first < 0 and self._slot_part < 0:
            return batch, slots, ones
        waiting = [("first", self._slot_first, self.group), ("part", self._slot_part, self._part_count)]
        names, carried, counts = zip(*(one for one in waiting if one[1] >= 0), strict=True)
        rows = Carried(torch.stack([self._vectors[name] for name in names]), batch)
        return rows, np.concatenate([carried, slots]), np.concatenate([counts, ones])

    def _learn_finite(self, batch: Gradients, slots: Indices, *, cut: bool) -> None:
        """Set bad examples aside (and the whole of their unit), and learn from the others."""
        bad = ~np.isfinite(batch.gram().diagonal().cpu().numpy())
        if bad.any():
            self._put_aside(np.unique(slots[bad]), int(bad.sum()))
        if self._slot_part >= 0 and self._places[self._slot_part] == ASIDE:
            self._slot_part, self._part_count = -1, 0
        kept = np.flatnonzero(self._places[slots] != ASIDE)
        if len(kept):
            self._learn(batch.select(torch.from_numpy(kept).to(batch.device)), slots[kept], cut=cut)

    def _allocate(self, batch: Gradients) -> Tensor:
        """``[1, d]`` of P, or ``[3, d]`` of P, m and the sum that becomes the next m.

        P is the sum of e_t g_t. Alg. 4's s is P - E m with E the sum of the signs ("surplus"): kept apart, s
        costs no pass over memory for m.
        """
        table = torch.zeros(1 if self._paired else 3, batch.dim, dtype=batch.dtype, device=batch.device)
        self._vectors = {"table": table}
        self._parameter = self._balancer.parameter(n=self._vectors_signed(), d=batch.dim)
        return table

    def _vectors_signed(self) -> int:
        """How many vectors an epoch gives a sign to."""
        return self._units // 2 if self._paired else self._units

    # --- one epoch --------------------------------------------------------------------------------

    def _begin_epoch(self) -> None:
        self._state = self._balancer.start()
        self._signed = 0  # vectors given a sign in this epoch
        self._summed = 0  # units in this epoch's mean
        self._surplus = 0.0  # E
        self._mean_inner = 0.0  # <P, m>
        self._slot_first = -1  # the unit that waits for its partner, in vectors["first"]
        self._slot_part, self._part_count = -1, 0  # the incomplete unit, in vectors["part"]
        self._changing = False  # is a batch being added to the sums?

    def _advance(self) -> None:
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
        if self.frozen:
            self.detach()

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


_NO_UNIFORMS = np.zeros(4096)  # for balancers that toss no coin

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
