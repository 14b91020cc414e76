"""The loop of :mod:`ordain.kernels.signs` as a torch program, for products that are not on the CPU.

Signs stay tensors, and whatever depends on one is a ``torch.where``: the host waits for nothing. One case is left to
the caller: where |s|_2 does not settle whether the walk is within its bound, the signs are not to be used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ordain.kernels.signs import DETERMINISTIC, WALK


def torch_signs(
    kind: int, dots: Tensor, gram: Tensor, u: Tensor | None, state: Sequence[float], param: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Signs of a batch from dots = <s,z_t> and gram = <z_i,z_j> where j >= i; a failure takes Algorithm 5's sign.

    Returns ``[b]`` of +1 and -1, the state after them ``[3]``, and whether |s|_inf must be known to tell.
    """
    dots, squares, signs = dots.clone(), gram.diagonal().clone(), torch.empty_like(dots)
    own, failed = dots.new_full((), state[2]), torch.zeros_like(dots)
    bounds = torch.zeros_like(dots)  # of the walk: the largest norm so far, this vector's among them
    for t in range(len(dots)):
        inner = dots[t]
        sign = _sign(inner < 0.0)
        if kind == WALK:
            bounds[t] = bound = torch.maximum(own, squares[t].clamp(min=0.0).sqrt())
            scaled = torch.where(bound > 0.0, inner / (bound * bound), 0.0)
            failed[t] = outside = scaled.abs() > param
            own = torch.where(outside, own, bound)
            sign = torch.where(outside, sign, _sign(_at(u, t) < 0.5 - scaled / (2.0 * param)))
        elif kind != DETERMINISTIC:
            square = squares[t]
            threshold = torch.maximum(square.clamp(min=0.0).sqrt() * (own * param).sqrt(), square)
            growth = 1.0 + (square - 2.0 * threshold) * own / (threshold * threshold)
            own = torch.where(threshold > 0.0, own + square * growth.clamp(min=0.0), own)
            sign = _sign(_at(u, t) < 0.5 * (1.0 - torch.where(threshold > 0.0, inner / threshold, 0.0)))
        signs[t] = sign
        dots[t + 1 :].addcmul_(gram[t, t + 1 :], sign.to(dots.dtype))
    # dots[t] is <s, z_t> as it was when z_t had its turn: |s|^2 before and after each vector follows.
    changes = 2.0 * signs * dots + squares
    norms = torch.cat([dots.new_full((1,), state[0]), changes]).cumsum(0)
    unsure = (norms[:-1].clamp(min=0.0).sqrt() > param * bounds).logical_and(failed == 0.0).any()
    after = torch.stack([norms[-1], state[1] + failed.sum(), own])
    return signs, after, unsure if kind == WALK else torch.zeros_like(unsure)


def _sign(plus: Tensor) -> Tensor:
    return torch.where(plus, 1.0, -1.0)


def _at(u: Tensor | None, t: int) -> Tensor:
    assert u is not None  # noqa: S101  # only Algorithm 5 draws no number
    return u[t]
