"""From inner products to signs: the vectors that get signs are combinations of rows, less the stale mean.

A compiled loop gives the signs on the CPU, and a torch program on any other device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain import _rng
from ordain.balancing.balancers import check_signs
from ordain.balancing.state import BalanceState
from ordain.kernels import CANCELLED

Signs = NDArray[np.int8]


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


class Verdict(NamedTuple):
    """What the vectors of a batch get.

    Attributes:
        finite: whether all gradients are; there are no signs otherwise.
        cancels: whether too many digits were lost for these signs to be trusted.
        signs: ``[b]`` of +1 and -1.
        weights: the same as a tensor beside the vectors.
        rule: what the balancer keeps after them.
        along: the sum of e_t <m, g_t>.
    """

    finite: bool
    cancels: bool
    signs: Signs
    weights: Tensor
    rule: NDArray[np.float64]
    along: float


def decide(state: BalanceState, vectors: Vectors, *, dim: int, stream: int, sup: Callable[[Signs], float]) -> Verdict:
    """The balancer's signs; ``sup(signs)`` is |s|_inf after the first few of them.

    A balancer from elsewhere has only ``signs()``, which takes NumPy arrays: its products are copied to the host.
    """
    u = uniforms(state, len(vectors.dots), stream) if state.balancer.random else None
    if vectors.dots.device.type != "cpu" and state.compiled is not None:
        verdict = _on_device(state, vectors, u, state.compiled)
        if verdict is not None:
            return verdict
    return _on_host(state, vectors, u, dim, sup)


def _on_device(
    state: BalanceState, vectors: Vectors, u: NDArray[np.float64] | None, compiled: tuple[int, float]
) -> Verdict | None:
    """The host waits once, for all that it has to know; None where |s|_inf must be known."""
    from ordain.kernels.torch_signs import torch_signs

    dots, (kind, parameter) = vectors.dots, compiled
    given = None if u is None else put(u, like=dots)
    signs, rule, unsure = torch_signs(kind, dots, vectors.gram, given, state.rule.tolist(), parameter)
    flags = torch.stack([vectors.finite, vectors.cancels, unsure]).to(dots.dtype)
    found = torch.cat([flags, (signs @ vectors.means)[None], rule, signs]).cpu().double().numpy()
    if found[0] and found[2]:
        return None
    return Verdict(bool(found[0]), bool(found[1]), found[7:].astype(np.int8), signs, found[4:7], float(found[3]))


def _on_host(
    state: BalanceState, vectors: Vectors, u: NDArray[np.float64] | None, dim: int, sup: Callable[[Signs], float]
) -> Verdict:
    rule = state.rule.copy()
    if not bool(vectors.finite):
        return Verdict(False, False, np.empty(0, dtype=np.int8), vectors.dots[:0], rule, 0.0)
    dots, gram, means = (one.to("cpu", torch.float64).numpy() for one in vectors[:3])
    if state.compiled is not None:
        from ordain.kernels.signs import batch_signs

        kind, parameter = state.compiled
        signs, _ = batch_signs(kind, dots, gram, u, rule, parameter, True, sup)
    else:
        gram = np.triu(gram) + np.triu(gram, 1).T  # a balancer from elsewhere may look below the diagonal
        signs = state.balancer.signs(dots, gram, n=state.count, d=dim, state=rule, u=u, sup=sup)
        signs = check_signs(signs, len(dots), state.balancer)
    return Verdict(True, bool(vectors.cancels), signs, put(signs, like=vectors.dots), rule, float(signs @ means))


def uniforms(state: BalanceState, count: int, stream: int) -> NDArray[np.float64]:
    """The random numbers of the next ``count`` vectors."""
    return _rng.uniforms(count, seed=state.seed, stream=stream, start=state.signed)


def put(array: NDArray[np.float64] | Signs, *, like: Tensor) -> Tensor:
    """An array as a tensor of this dtype and device. On CUDA the host does not wait for the work before it."""
    return torch.from_numpy(array).to(like.device, like.dtype, non_blocking=like.device.type == "cuda")
