"""One batch: signs for what it completes, and the sums that the next signs need.

Signs need only inner products (docs/architecture.md has the algebra), so a batch is known by a few operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain.balancing.deciding import Signs, decide, exact_dtype, put, signed_vectors, uniforms
from ordain.balancing.grouping import Grouping, Indices, Matrix, Prepended, Rows, differences
from ordain.balancing.one_row import sign_row
from ordain.balancing.state import BalanceState

Layer = tuple[NDArray[Any], NDArray[Any], bool, float]

# Places of a unit besides +1 (front) and -1 (back). All three put it in the middle of the next order.
UNSEEN, ASIDE = 0, 2  # not observed; not finite or incomplete
WAITING = np.int8(3)  # the first of a pair
_PAIR = np.array([1, -1], dtype=np.int8)


class Batch(Rows, Protocol):
    """What balancing asks of a batch, besides products and sums."""

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`products` of the differences g_1 - g_2, g_3 - g_4, ..., for an even B."""

    def add_signed(self, signs: Tensor, out: Tensor) -> None:
        """Add sum_i e_i g_i to out[0] and, if there is one, sum_i g_i to out[1], for ``[B]`` of +1.0 and -1.0."""

    def select(self, rows: Tensor) -> Batch:
        """These vectors only."""

    def double(self) -> Batch | None:
        """The same vectors in float64; None if that cannot be had."""

    def one_row(self) -> Sequence[Tensor] | None:
        """The parts of the one vector, flat and one after the other; None unless B is 1 and it is held like that."""

    def linear_layer(self) -> Layer | None:
        """Inputs ``[B, in]``, output gradients ``[B, out]``, biased, scale; None unless that is one small layer."""


@dataclass(frozen=True)
class Decision:
    """What a batch decided.

    Attributes:
        slots: the units that are decided, or wait for a partner.
        places: the place of each: +1, -1, ``ASIDE`` or ``WAITING``.
        not_finite: how many examples had a gradient that is not finite.
    """

    slots: Indices
    places: Signs
    not_finite: int = 0

    def with_aside(self, lost: Sequence[int] | Indices, not_finite: int) -> Decision:
        """The same, and these units are set aside; so many examples are not finite."""
        slots = np.append(self.slots, np.asarray(lost, dtype=np.int64))
        places = np.append(self.places, np.full(len(lost), ASIDE, dtype=np.int8))
        return Decision(slots, places, not_finite)


def balance(
    state: BalanceState, batch: Batch, slots: Indices, *, sizes: Indices | None = None, stream: int = 0
) -> Decision:
    """Sign what the batch completes; ``state`` changes only once all signs are known.

    Args:
        state: see :class:`BalanceState`.
        batch: the vectors; a row is an example, and a unit's vector is the mean of its examples'.
        slots: ``[B]``, the unit that each row belongs to.
        sizes: ``[B]``, how many examples that unit has. None: each row is a unit.
        stream: the stream of random numbers, one for each pass.
    """
    paired = state.paired
    table = state.table
    if table is None or table.dtype is not batch.dtype:
        table = state.allocate(batch.dim, batch.dtype, batch.device)
    if table.dtype is not batch.dtype:
        batch = batch.double() or batch
    # In a plain batch nothing is left over from before or for later, and each row is a unit.
    plain = not state.waiting and sizes is None and not (paired and batch.size % 2)
    if plain and state.compiled is not None and (layer := batch.linear_layer()) is not None:
        layer_signs = _sign_layer(state, table, layer, state.compiled, stream)
        if layer_signs is not None:
            return _decided(state, layer_signs, slots)
    whole = sizes is None and "part" not in state.waiting
    if whole and batch.size == 1 and state.compiled is not None and (row := batch.one_row()) is not None:
        row_signs = sign_row(state, table, row, slots, stream)
        if row_signs is not None:
            return _decided(state, *row_signs)
    rows, grouping, weights = (batch, None, None) if plain else _combined(state, batch, slots, sizes)
    known = table[:1] if paired else table[:2]
    gram, dots = batch.paired_products(known) if plain and paired else rows.products(known)
    combined = None if weights is None else put(weights, like=gram.new_empty(0, dtype=exact_dtype(gram.device)))
    vectors = signed_vectors(state, gram, dots, combined, narrow=batch.dtype is torch.float32)
    found = decide(state, vectors, dim=rows.dim, stream=stream, sup=partial(_sup, state, rows, weights))
    if not found.finite:
        return _without_bad(state, batch, slots, sizes, stream)
    if found.cancels and (wide := batch.double()) is not None:
        state.widen()
        return balance(state, wide, slots, sizes=sizes, stream=stream)
    by_row = found.weights
    if paired and combined is None:
        by_row = torch.stack([by_row, -by_row], dim=1).flatten()
    unit_slots, waiting = (slots, {}) if grouping is None else (grouping.slots, _left_over(state, rows, grouping))

    # All signs are known, and nothing has changed before this line.
    state.changing = True
    if not paired:
        state.surplus += float(found.signs.sum())
        state.mean_inner += found.along
    if grouping is None or combined is None:
        batch.add_signed(by_row.to(batch.dtype), table[0::2])
    else:
        units = put(grouping.weights.sum(axis=0), like=by_row)
        coefficients = torch.stack([by_row @ combined, units][: len(known)])
        rows.weighted_sum(coefficients.to(rows.dtype), out=table[0::2])
    state.rule, state.waiting = found.rule, waiting
    state.first_slot = int(unit_slots[-1]) if "first" in waiting else -1
    state.part_slot, state.part_count = (grouping.open_slot, grouping.open_count) if grouping else (-1, 0)
    return _decided(state, found.signs, unit_slots)


def _decided(state: BalanceState, signs: Signs, slots: Indices) -> Decision:
    """Count what was signed. In pairs, the second unit gets the opposite sign, and an odd last one waits."""
    places = signs
    if state.paired:
        places = np.multiply.outer(signs, _PAIR).ravel()
        if len(places) < len(slots):
            places = np.append(places, WAITING)
    else:
        state.summed += len(slots)
    state.signed += len(signs)
    state.changing = False
    return Decision(slots, places)


def _sup(state: BalanceState, rows: Rows, weights: Matrix | None, signs: Signs) -> float:
    """|s|_inf once the first few vectors of the batch have these signs."""
    table = state.allocate(rows.dim, rows.dtype, rows.device)
    first = signs if weights is None else signs @ weights[: len(signs)]
    if state.paired and weights is None:
        first = np.stack([signs, -signs], axis=1).ravel()
    by_row = np.zeros((1, rows.size))
    by_row[0, : len(first)] = first
    s = table[:1] + rows.weighted_sum(put(by_row, like=table))
    if not state.paired:
        s.sub_(table[1], alpha=state.surplus + float(signs.sum()))
    return float(s.abs().max())


def _combined(
    state: BalanceState, batch: Batch, slots: Indices, sizes: Indices | None
) -> tuple[Rows, Grouping, Matrix]:
    """The batch behind what waits for it, the units that rows make up, and what is signed.

    What is signed is given as combinations of rows, ``[vectors, rows]``.
    """
    waiting = [
        (state.waiting[name], slot, count)
        for name, slot, count in (("first", state.first_slot, 1), ("part", state.part_slot, state.part_count))
        if name in state.waiting
    ]
    rows: Rows = batch
    counts = np.ones(len(slots), dtype=np.int64)
    if waiting:
        heads, head_slots, head_counts = zip(*waiting, strict=True)
        rows = Prepended(torch.stack(heads), batch)
        slots, counts = np.concatenate([head_slots, slots]), np.concatenate([head_counts, counts])
    sizes = np.ones_like(counts) if sizes is None else np.concatenate([np.full(len(waiting), sizes[0]), sizes])
    grouping = Grouping.cut(slots, counts, sizes, carried=len(waiting))
    signed = differences(len(grouping.slots)) @ grouping.weights if state.paired else grouping.weights
    return rows, grouping, signed


def _left_over(state: BalanceState, rows: Rows, grouping: Grouping) -> dict[str, Tensor]:
    """What the next batch must complete: the first of a pair, part of a unit."""
    left: dict[str, Matrix] = {}
    if state.paired and len(grouping.slots) % 2:
        left["first"] = grouping.weights[-1]
    if grouping.open_weights is not None:
        left["part"] = grouping.open_weights
    if not left:
        return {}
    like = torch.empty(0, dtype=rows.dtype, device=rows.device)
    return dict(zip(left, rows.weighted_sum(put(np.stack(list(left.values())), like=like)), strict=True))


def _without_bad(state: BalanceState, batch: Batch, slots: Indices, sizes: Indices | None, stream: int) -> Decision:
    """Set the units of examples that are not finite aside, and learn from the others."""
    nothing = torch.zeros(0, batch.dim, dtype=batch.dtype, device=batch.device)
    bad = ~np.isfinite(batch.products(nothing)[0].diagonal().cpu().numpy())
    lost = np.unique(slots[bad])
    if state.part_slot in lost:
        state.drop_part()
    kept = np.flatnonzero(~np.isin(slots, lost))
    decided = Decision(slots[:0], np.empty(0, dtype=np.int8))
    if len(kept):
        good = batch.select(torch.from_numpy(kept).to(batch.device))
        decided = balance(state, good, slots[kept], sizes=None if sizes is None else sizes[kept], stream=stream)
    return decided.with_aside(lost, int(bad.sum()))


def _sign_layer(
    state: BalanceState, table: Tensor, layer: Layer, compiled: tuple[int, float], stream: int
) -> Signs | None:
    """The same in one compiled pass where one small linear layer is the whole model; None if it is not finite."""
    from ordain.kernels.linear_layer import layer_signs

    a, b, biased, scale = layer
    signs = np.empty(len(a) // 2 if state.paired else len(a), dtype=np.int8)
    u = uniforms(state, len(signs), stream) if state.balancer.random else np.zeros(len(signs))
    rule, sums = state.rule.copy(), np.array([state.surplus, state.mean_inner, state.mean_square])
    signed, mean, total = (table.numpy()[0],) * 3 if state.paired else table.numpy()
    kind, parameter = compiled
    state.changing = True
    if not layer_signs(kind, a, b, scale, biased, state.paired, signed, mean, total, sums, u, rule, parameter, signs):
        state.changing = False
        return None
    state.rule, state.surplus, state.mean_inner = rule, float(sums[0]), float(sums[1])
    return signs
