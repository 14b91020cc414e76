"""Balancing, one batch at a time: signs for what a batch completes, and the sums that the next signs need.

The common case is one compiled pass. Whatever else may come (pairs and units that a batch cuts in two, gradients that
are not finite, balancers of one's own) goes the general way, to the same signs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ordain import _rng
from ordain.balancing import Balancer
from ordain.gradients import ExactSource, Gradients
from ordain.gradients.carried import Carried
from ordain.gradients.factored import Factored
from ordain.orders.base import Indices
from ordain.orders.batched import BatchedOrder
from ordain.orders.placed import ASIDE, WAITING
from ordain.orders.units import Units, differences

Matrix = NDArray[np.float64]
Signs = NDArray[np.int8]
_NO_UNIFORMS = np.zeros(4096)  # for balancers that toss no coin


class BalancedOrder(BatchedOrder):
    """Gives each unit, or each pair of units, a sign that keeps the signed sum small.

    What follows from the signs is a subclass's business, as is the end of an epoch.

    Args:
        model: as in :class:`~ordain.orders.learned.LearnedOrder`.
        n: as there.
        paired: balance differences of consecutive units, instead of units less the last epoch's mean.
        balancer: decides the signs.
        **options: as there.
    """

    _sums = True

    def __init__(self, model: nn.Module | None, n: Any, *, paired: bool, balancer: Balancer, **options: Any) -> None:
        super().__init__(model, n, paired=paired, **options)
        if paired and isinstance(self._source, ExactSource):
            self._source.forget_sums()
        self._balancer = balancer
        self._failures = 0
        self._vectors: dict[str, Tensor] = {}  # the table (see _allocate), and what waits: first, part
        self._mean_square = 0.0  # |m|^2
        self._parameter = 0.0  # the balancer's, for this n and d
        self._state: Matrix
        self._summed: int
        self._surplus: float
        self._mean_inner: float
        self._begin_epoch()

    @property
    def failures(self) -> int:
        """How many vectors the balancer failed on and Algorithm 5 decided instead, over all epochs."""
        return self._failures + int(self._state[1])

    def _pass_over(self, slots: Indices) -> None:
        super()._pass_over(slots)
        if self._slot_part >= 0 and self._places[self._slot_part] == ASIDE:
            self._drop_part()

    def _begin_epoch(self) -> None:
        self._state = self._balancer.start()
        self._signed = 0  # vectors given a sign in this epoch
        self._summed = 0  # units in this epoch's mean
        self._surplus = 0.0  # E
        self._mean_inner = 0.0  # <P, m>
        self._slot_first = -1  # the unit that waits for its partner, in vectors["first"]
        self._slot_part, self._part_count = -1, 0  # the incomplete unit, in vectors["part"]
        self._changing = False  # is a batch being added to the sums?

    # --- one batch --------------------------------------------------------------------------------

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
        if self._slot_first < 0 and not cut and self._learn_plain(batch, slots):
            return
        rows, row_slots, counts = self._with_carried(batch, slots)
        products = rows.products(self._known())
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

    def _known(self) -> Tensor:
        """P, or P and m."""
        return self._vectors["table"][: 1 if self._paired else 2]

    def _learn_plain(self, batch: Gradients, slots: Indices) -> bool:
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
            signs = self._sign_batch(batch, u, state)
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

    def _sign_batch(self, batch: Gradients, u: Matrix, state: Matrix) -> NDArray[Any] | None:
        """The same from products of any batch."""
        gram, dots = (batch.paired_products if self._paired else batch.products)(self._known())
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
        self._changing = True
        if isinstance(batch, Factored) and self._paired:
            batch.add_paired(signs, table[:1])
        elif isinstance(batch, Factored):
            batch.add_signed(signs, table[0], table[2])
        else:
            each = torch.from_numpy(signs).to(batch.device).unsqueeze(0)
            wanted = each if self._paired else torch.cat([each, torch.ones_like(each)])
            batch.weighted_sum(wanted, out=table[:1] if self._paired else table[::2])
        if self._paired:
            return signs
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
        lost = np.unique(slots[bad])
        if self._slot_part >= 0 and (self._slot_part in lost or self._places[self._slot_part] == ASIDE):
            self._drop_part()
        kept = np.flatnonzero((self._places[slots] != ASIDE) & ~np.isin(slots, lost))
        if len(kept):
            self._learn(batch.select(torch.from_numpy(kept).to(batch.device)), slots[kept], cut=cut)
        if bad.any():  # last, so that a second start (memory ran out) counts nothing twice
            self._put_aside(lost, int(bad.sum()))

    def _drop_part(self) -> None:
        """The incomplete unit keeps the middle: what waits for its rest is let go."""
        self._slot_part, self._part_count = -1, 0
        self._vectors = {name: vector for name, vector in self._vectors.items() if name != "part"}

    def _let_go(self) -> None:
        """What waits for its rest keeps the middle: there will be no rest."""
        for slot in (self._slot_first, self._slot_part):
            if slot >= 0:
                self._places[slot] = ASIDE
        self._slot_first, self._slot_part, self._part_count = -1, -1, 0
        self._vectors = {"table": self._vectors["table"]}

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
