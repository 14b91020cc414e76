"""The vectors that get signs, known by their inner products: combinations of rows, less the stale mean."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ordain.balancing.state import BalanceState
from ordain.kernels import CANCELLED


class Vectors(NamedTuple):
    """Vectors z_1 .. z_b that get signs; all tensors are on the device of the gradients.

    Attributes:
        dots: ``[b]`` of <s, z_t>.
        gram: ``[b, b]`` of <z_i, z_j>, right where j >= i.
        means: ``[b]`` of <m, g_t>; zeros in pairs, which have no mean.
        finite: whether all gradients are.
        cancels: whether the vectors have lost too many digits in float32.
    """

    dots: Tensor
    gram: Tensor
    means: Tensor
    finite: Tensor
    cancels: Tensor


def exact_dtype(device: torch.device) -> torch.dtype:
    """What products are added up in."""
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64


def signed_vectors(state: BalanceState, gram: Tensor, dots: Tensor, weights: Tensor | None, *, narrow: bool) -> Vectors:
    """From the products of rows with each other, and with P and m.

    Args:
        state: has E, <P, m> and |m|^2.
        gram: ``[rows, rows]``, right where j >= i.
        dots: ``[1 or 2, rows]``, products with P and, unless paired, m.
        weights: ``[b, rows]``, the vectors as combinations of rows; None: each row is one.
        narrow: the products were computed in float32.
    """
    gram, dots = (products.to(exact_dtype(products.device)) for products in (gram, dots))
    squares = gram.diagonal()
    finite, norms = squares.isfinite().all(), squares.abs().sqrt()
    if weights is not None:
        gram = gram.triu() + gram.triu(1).T
        gram, dots, norms = weights @ gram @ weights.T, dots @ weights.T, weights.abs() @ norms
    inner = dots[0]
    cancels = _cancels(state, norms, gram, dots) if narrow else torch.zeros_like(finite)
    if state.paired:
        return Vectors(inner, gram, torch.zeros_like(inner), finite, cancels)
    # <s, z_t> and <z_i, z_j> for s = P - E m and z = g - m, from products of P, g and m.
    means, square = dots[1], state.mean_square
    inner = inner - state.mean_inner - state.surplus * (means - square)
    return Vectors(inner, gram - means[:, None] - means + square, means, finite, cancels)


def _cancels(state: BalanceState, norms: Tensor, gram: Tensor, dots: Tensor) -> Tensor:
    """Are the vectors that get signs much shorter than those they are differences of, so that float32 loses digits?"""
    raw, squares, count = norms @ norms, gram.diagonal().sum(), len(norms)
    lost = CANCELLED * torch.finfo(torch.float32).eps
    if state.paired:
        return squares < lost * raw
    if state.mean_square:
        square = count * state.mean_square
        return squares + square - 2.0 * dots[1].sum() < lost * (raw + square)
    # Without m yet only sums of what the batch has in common cancel, and they lose half as many digits.
    if count <= 3:
        return torch.zeros_like(raw, dtype=torch.bool)
    return squares - (2.0 * gram.triu().sum() - squares) / count < lost**2 * raw
