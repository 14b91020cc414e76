"""One batch: signs for what it completes, and the sums that the next signs need.

Signs need only inner products (docs/architecture.md has the algebra), so a batch is known by a few operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain import _rng
from ordain.balancing.balancers import check_signs, compiled_rule
from ordain.balancing.grouping import Grouping, Indices, Matrix, differences
from ordain.balancing.prepended import Prepended, Rows
from ordain.balancing.state import BalanceState

Signs = NDArray[np.int8]
Layer = tuple[NDArray[Any], NDArray[Any], bool, float]

# Places of a unit besides +1 (front) and -1 (back). All three put it in the middle of the next order.
UNSEEN, ASIDE, WAITING = 0, 2, 3  # not observed; not finite or incomplete; the first of a pair
_NO_UNIFORMS = np.zeros(4096)  # for balancers that are not random


class Batch(Rows, Protocol):
    """What balancing asks of a batch, besides products and sums."""

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`products` of the differences g_1 - g_2, g_3 - g_4, ..., for an even B."""

    def add_signed(self, signs: Signs, signed: Tensor, total: Tensor | None) -> None:
        """Add sum_i e_i g_i to ``signed`` ``[d]`` and sum_i g_i to ``total`` ``[d]``, for ``[B]`` of +1 and -1."""

    def select(self, rows: Tensor) -> Batch:
        """These vectors only."""

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
    state.allocate(batch.dim, batch.dtype, batch.device)
    if not state.waiting and sizes is None:
        signs = _sign_layer(state, batch, stream)
        if signs is not None:
            return _decided(state, signs, slots, summed=len(slots))
    return _balance(state, batch, slots, sizes, stream)


def _balance(state: BalanceState, batch: Batch, slots: Indices, sizes: Indices | None, stream: int) -> Decision:
    table = state.allocate(batch.dim, batch.dtype, batch.device)
    known = table[:1] if state.paired else table[:2]
    rows, row_slots, counts = _with_waiting(state, batch, slots)
    carried = rows.size - batch.size
    plain = not carried and sizes is None and not (state.paired and batch.size % 2)
    found = batch.paired_products(known) if plain and state.paired else rows.products(known)
    gram, dots = (part.to("cpu", torch.float64).numpy() for part in found)
    if not np.isfinite(gram.diagonal()).all():
        return _without_bad(state, batch, slots, sizes, stream)

    grouping = None
    if sizes is not None:
        row_sizes = np.concatenate([np.full(carried, sizes[0]), sizes]) if carried else sizes
        grouping = Grouping.cut(row_slots, counts, row_sizes, carried=carried)
    unit_slots = row_slots if grouping is None else grouping.slots
    weights = None if plain else _weights(state, grouping, rows.size, len(unit_slots))
    if weights is not None:
        gram = np.triu(gram) + np.triu(gram, 1).T
        gram, dots = weights @ gram @ weights.T, dots @ weights.T
    signs, rule = _signs(state, rows, gram, dots, weights, stream)

    # All signs are known, and nothing has changed before this line.
    waiting = _left_over(state, rows, grouping, unit_slots)
    by_row = _by_row(signs, weights, paired=state.paired)
    state.changing = True
    if not state.paired:
        state.surplus += float(signs.sum())
        state.mean_inner += float(signs @ dots[1])
    if plain:
        batch.add_signed(by_row.astype(np.int8), table[0], None if state.paired else table[2])
    else:
        wanted = [by_row]
        if not state.paired:
            wanted.append(np.ones(rows.size) if grouping is None else grouping.weights.sum(axis=0))
        coefficients = torch.from_numpy(np.stack(wanted)).to(rows.device, rows.dtype)
        rows.weighted_sum(coefficients, out=table[:1] if state.paired else table[0:3:2])
    state.waiting, state.rule = waiting, rule
    state.first_slot = int(unit_slots[-1]) if "first" in waiting else -1
    state.part_slot, state.part_count = (grouping.open_slot, grouping.open_count) if grouping else (-1, 0)
    return _decided(state, signs, unit_slots, summed=len(unit_slots))


def _decided(state: BalanceState, signs: Signs, slots: Indices, *, summed: int) -> Decision:
    """Count what was signed. In pairs, the second unit gets the opposite sign, and an odd last one waits."""
    state.signed += len(signs)
    if not state.paired:
        state.summed += summed
        state.changing = False
        return Decision(slots, signs)
    places = np.full(len(slots), WAITING, dtype=np.int8)
    places[0 : 2 * len(signs) : 2] = signs
    places[1 : 2 * len(signs) : 2] = -signs
    state.changing = False
    return Decision(slots, places)


def _signs(
    state: BalanceState, rows: Rows, gram: Matrix, dots: Matrix, weights: Matrix | None, stream: int
) -> tuple[Signs, NDArray[np.float64]]:
    """The balancer's signs, and what it keeps after them."""
    inner = dots[0]
    if not state.paired:
        # <s, z_t> and <z_i, z_j> for s = P - E m and z = g - m, from products of P, g and m.
        means, square = dots[1], state.mean_square
        inner = inner - state.mean_inner - state.surplus * (means - square)
        gram = gram - means[:, None] - means[None, :] + square
    elsewhere = compiled_rule(state.balancer, n=state.count, d=rows.dim) is None
    if elsewhere:
        gram = np.triu(gram) + np.triu(gram, 1).T  # it may look below the diagonal
    rule = state.rule.copy()
    signs = state.balancer.signs(
        inner,
        gram,
        n=state.count,
        d=rows.dim,
        state=rule,
        u=_uniforms(state, len(inner), stream) if state.balancer.random else None,
        sup=_sup(state, rows, weights),
    )
    return (check_signs(signs, len(inner), state.balancer) if elsewhere else signs), rule


def _uniforms(state: BalanceState, count: int, stream: int) -> NDArray[np.float64]:
    return _rng.uniforms(count, seed=state.seed, stream=stream, start=state.signed)


def _sup(state: BalanceState, rows: Rows, weights: Matrix | None) -> Callable[[Signs], float]:
    """A function from the first few signs of a batch to |s|_inf after them."""

    def sup(signs: Signs) -> float:
        table = state.allocate(rows.dim, rows.dtype, rows.device)
        by_row = np.zeros((1, rows.size))
        first = _by_row(signs, None if weights is None else weights[: len(signs)], paired=state.paired)
        by_row[0, : len(first)] = first
        s = table[:1] + rows.weighted_sum(torch.from_numpy(by_row).to(rows.device, rows.dtype))
        if not state.paired:
            s.sub_(table[1], alpha=state.surplus + float(signs.sum()))
        return float(s.abs().max())

    return sup


def _by_row(signs: Signs, weights: Matrix | None, *, paired: bool) -> Matrix:
    """The weight with which each row enters P."""
    each = signs.astype(np.float64)
    if weights is not None:
        return each @ weights
    return np.stack([each, -each], axis=1).ravel() if paired else each


def _weights(state: BalanceState, grouping: Grouping | None, rows: int, units: int) -> Matrix | None:
    """What is signed as combinations of rows, ``[vectors, rows]``; None is the identity."""
    weights = None if grouping is None else grouping.weights
    if not state.paired:
        return weights
    pairs = differences(units)
    return pairs if weights is None else pairs @ weights


def _with_waiting(state: BalanceState, batch: Batch, slots: Indices) -> tuple[Rows, Indices, Indices]:
    """The batch behind what waits for it; the slot of each row, and how many examples it stands for."""
    ones = np.ones(len(slots), dtype=np.int64)
    if not state.waiting:
        return batch, slots, ones
    slot_of = {"first": state.first_slot, "part": state.part_slot}
    count_of = {"first": 1, "part": state.part_count}
    names = [name for name in ("first", "part") if name in state.waiting]
    rows = Prepended(torch.stack([state.waiting[name] for name in names]), batch)
    return (
        rows,
        np.concatenate([[slot_of[name] for name in names], slots]),
        np.concatenate([[count_of[name] for name in names], ones]),
    )


def _left_over(state: BalanceState, rows: Rows, grouping: Grouping | None, slots: Indices) -> dict[str, Tensor]:
    """What the next batch must complete: the first of a pair, part of a unit."""
    left: dict[str, Matrix] = {}
    if state.paired and len(slots) % 2:
        left["first"] = np.eye(rows.size)[-1] if grouping is None else grouping.weights[-1]
    if grouping is not None and grouping.open_weights is not None:
        left["part"] = grouping.open_weights
    if not left:
        return {}
    sums = rows.weighted_sum(torch.from_numpy(np.stack(list(left.values()))).to(rows.device, rows.dtype))
    return dict(zip(left, sums, strict=True))


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
        rows = torch.from_numpy(kept).to(batch.device)
        decided = _balance(state, batch.select(rows), slots[kept], None if sizes is None else sizes[kept], stream)
    return Decision(
        np.concatenate([decided.slots, lost]),
        np.concatenate([decided.places, np.full(len(lost), ASIDE, dtype=np.int8)]),
        int(bad.sum()),
    )


def _sign_layer(state: BalanceState, batch: Batch, stream: int) -> Signs | None:
    """The same in one compiled pass where one small linear layer is the whole model; None where that will not do."""
    layer, paired, table = batch.linear_layer(), state.paired, state.table
    if layer is None or table is None or (paired and batch.size % 2):
        return None
    rule = compiled_rule(state.balancer, n=state.count, d=batch.dim)
    if rule is None:
        return None
    from ordain.kernels.linear_layer import layer_signs

    a, b, biased, scale = layer
    signs = np.empty(len(a) // 2 if paired else len(a), dtype=np.int8)
    u = _NO_UNIFORMS
    if state.balancer.random or len(u) < len(signs):
        u = _uniforms(state, len(signs), stream)
    kept = state.rule.copy()
    sums = np.array([state.surplus, state.mean_inner, state.mean_square])
    signed, mean, total = (table.numpy()[0],) * 3 if paired else table.numpy()
    state.changing = True
    done = layer_signs(rule[0], a, b, scale, biased, paired, signed, mean, total, sums, u, kept, rule[1], signs)
    if not done:
        state.changing = False
        return None
    state.rule, state.surplus, state.mean_inner = kept, float(sums[0]), float(sums[1])
    return signs
