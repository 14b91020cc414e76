"""A batch of one row that is a unit, as a micro-batch is: its sign from a few products, without a Gram matrix.

Products and sums are taken part by part (a part is a parameter's gradient), so that nothing is flattened and what one
operation has read is in the cache for the next. The host waits once, for the products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain.balancing.deciding import Signs, uniforms
from ordain.balancing.grouping import Indices
from ordain.balancing.state import BalanceState
from ordain.kernels import CANCELLED

Parts = Sequence[Tensor]
Rule = NDArray[np.float64]

_LOST = CANCELLED * torch.finfo(torch.float32).eps


def sign_row(
    state: BalanceState, table: Tensor, row: Parts, slots: Indices, stream: int
) -> tuple[Signs, Indices] | None:
    """Sign the unit of ``row``, given in parts one after the other, and bring the sums up to date.

    Returns the signs (none, where the row has to wait for its partner) and the slots they are about; None, with
    nothing changed, where the general way must be taken: not finite, digits lost, or |s|_inf must be known.
    """
    if not state.paired:
        sign = _sign_centred(state, table, row, stream)
    elif (first := state.waiting.get("first")) is not None:
        sign = _sign_pair(state, table, first, row, stream)
        slots = np.array([state.first_slot, slots[0]])
    else:
        if not math.isfinite(_products((row, row))[0]):
            return None
        state.wait(torch.cat(list(row), out=state.spare()), slots[0])
        return np.empty(0, dtype=np.int8), slots
    if sign is None:
        return None
    state.waiting, state.first_slot = {}, -1
    return np.array([sign], dtype=np.int8), slots


def _sign_centred(state: BalanceState, table: Tensor, row: Parts, stream: int) -> int | None:
    """With z = g - m and s = P - E m."""
    signed, total = _in_parts(row, table[0], table[2])
    # Both products in one pass: half the time of two.
    known = zip(table[:2].split_with_sizes([part.numel() for part in row], dim=1), row, strict=True)
    products = [product for both, part in known for product in (torch.mv(both, part), torch.dot(part, part)[None])]
    found = torch.cat(products).cpu().tolist()
    inner, along, raw = (sum(found[number::3]) for number in range(3))
    inner -= state.mean_inner + state.surplus * (along - state.mean_square)
    square = raw - 2.0 * along + state.mean_square
    if not state.mean_square:
        raw = 0.0  # without m yet, nothing is subtracted
    decided = _decide(state, table, inner, square, raw + state.mean_square, stream)
    if decided is None:
        return None
    state.changing = True
    sign, state.rule = decided
    for s, t, part in zip(signed, total, row, strict=True):
        s.add_(part, alpha=sign)
        t.add_(part)
    state.surplus += sign
    state.mean_inner += sign * along
    return sign


def _sign_pair(state: BalanceState, table: Tensor, first: Tensor, row: Parts, stream: int) -> int | None:
    """With z = first - g."""
    signed, waited = _in_parts(row, table[0], first)
    before, after, own, both, raw = _products(
        (signed, waited), (signed, row), (waited, waited), (waited, row), (row, row)
    )
    lengths = math.sqrt(own) + math.sqrt(raw)
    decided = _decide(state, table, before - after, own - 2.0 * both + raw, lengths**2, stream)
    if decided is None:
        return None
    state.changing = True
    sign, state.rule = decided
    for s, one, part in zip(signed, waited, row, strict=True):
        s.add_(one, alpha=sign).sub_(part, alpha=sign)
    return sign


def _in_parts(row: Parts, *vectors: Tensor) -> list[Parts]:
    """Vectors cut as the row is."""
    sizes = [part.numel() for part in row]
    return [vector.split_with_sizes(sizes) for vector in vectors]


def _products(*pairs: tuple[Parts, Parts]) -> list[float]:
    """<x, y> of each pair of vectors, part by part."""
    by_part = zip(*(zip(x, y, strict=True) for x, y in pairs), strict=True)
    found = torch.stack([torch.dot(x, y) for parts in by_part for x, y in parts]).cpu().tolist()
    return [sum(found[number :: len(pairs)]) for number in range(len(pairs))]


def _decide(
    state: BalanceState, table: Tensor, inner: float, square: float, raw: float, stream: int
) -> tuple[int, Rule] | None:
    """The sign from <s,z> and |z|^2, and what the balancer keeps; ``raw``: |z|^2 if nothing had cancelled."""
    from ordain.kernels.signs import FAILED, UNSURE, decide

    lost = table.dtype is torch.float32 and square < _LOST * raw
    if lost or not math.isfinite(square) or state.compiled is None:
        return None
    rule, (kind, parameter) = state.rule.copy(), state.compiled
    u = float(uniforms(state, 1, stream)[0]) if state.balancer.random else 0.0
    sign = decide(kind, inner, square, math.sqrt(max(rule[0], 0.0)), False, u, rule, parameter)
    if sign == UNSURE:
        return None
    if sign == FAILED:
        rule[1] += 1.0
        sign = 1 if inner < 0.0 else -1
    rule[0] += 2.0 * sign * inner + square
    return sign, rule
