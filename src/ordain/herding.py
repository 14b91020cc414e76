"""The herding problem on plain vectors: its objective, and the paper's ways to solve it.

Given z_1 .. z_n in R^d, find an order in which every prefix sum of the centred vectors is small
(Eq. 3). Functions take NumPy arrays (including memory-mapped ones) or torch tensors ``[n, d]`` and return the
same type; they work on the CPU, read the input in place, and copy it only to change dtype, device or layout.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

from ordain import _rng
from ordain.balancing.balancers import (
    Balancer,
    Deterministic,
    SelfBalancingWalk,
    check_balancer,
    check_signs,
    compiled_rule,
    walk_failure,
)
from ordain.errors import BalancingFailedError, InputError

__all__ = ["balance", "greedy", "herd", "herding_objective", "prefix_norms", "reorder"]

Array = TypeVar("Array", NDArray[Any], torch.Tensor)
Centering = Literal["mean", "pair"]
Progress = Callable[[int, int], None]

_BLOCK_NUMBERS = 2**21  # 16 MB of float64: what is held besides the input
_GREEDY_GRAM_BYTES = 2**28
_GRAM_ROWS = 256  # vectors at a time for balancers that are not built in
_WALK_ATTEMPTS = 100
LARGEST = 1e140
SAME = 1e-6  # norms that differ by less, relatively, count as equal: an order and its reverse have the same


def prefix_norms(z: Array, order: Any = None, *, norm: float = 2) -> Array:
    """Norms of all prefix sums of the centred vectors: ``[n]``, the curve of Figure 1(b).

    >>> prefix_norms(np.array([[0.0], [1.0], [2.0], [3.0]])).tolist()
    [1.5, 2.0, 1.5, 0.0]
    """
    rows, mean = _read(z)
    sigma = _check_order(order, len(rows))
    if norm not in (1, 2, math.inf):
        raise InputError(f"norm={norm!r}", expected="1, 2 or math.inf", remedy="Eq. 3 uses math.inf.")
    carry = np.zeros(rows.shape[1])
    norms = np.empty(len(rows))
    for start, stop in _blocks(*rows.shape):
        sums = np.cumsum(rows[sigma[start:stop]] - mean, axis=0)
        sums += carry
        norms[start:stop] = np.linalg.norm(sums, ord=norm, axis=1)
        carry = sums[-1]
    return _like(z, norms)


def herding_objective(z: Array, order: Any = None, *, norm: float = math.inf) -> float:
    """The largest norm of a prefix sum of the centred vectors (Eq. 3).

    >>> herding_objective(np.array([[0.0], [1.0], [2.0], [3.0]]), order=[0, 3, 1, 2])
    1.5
    """
    return float(prefix_norms(z, order, norm=norm).max())


def balance(z: Array, *, balancer: Balancer | None = None, order: Any = None, seed: int = 0) -> Array:
    """Return signs that keep every signed prefix sum of ``z``, in the given ``order``, small.

    Args:
        z: ``[n, d]``; they are not centred (see :func:`herd`).
        balancer: :class:`~ordain.balancing.Deterministic` by default.
        order: visit the rows in this order; the t-th sign belongs to row ``order[t]``.
        seed: for balancers that draw random numbers.

    Returns:
        ``[n]`` of +1 and -1 (int8), in visiting order.

    Raises:
        BalancingFailedError: the self-balancing walk left its bound.
    """
    rows, mean = _read(z)
    sigma = _check_order(order, len(rows))
    check_balancer(balancer)
    signs, _ = _signs(rows, sigma, balancer or Deterministic(), np.zeros_like(mean), seed=_rng.check_seed(seed))
    return _like(z, signs)


@overload
def reorder(signs: torch.Tensor, order: Any = None) -> torch.Tensor: ...
@overload
def reorder(signs: Any, order: Any = None) -> NDArray[np.int64]: ...
def reorder(signs: Any, order: Any = None) -> Any:
    """Algorithm 3: +1 rows in their order, then 0 rows in theirs, then -1 rows reversed.

    A 0 (which the paper does not have) marks a row without a sign: it goes in the middle,
    so that the result is always a permutation.

    >>> reorder([+1, -1, +1, -1]).tolist()
    [0, 2, 3, 1]
    """
    e = np.asarray(signs)
    sigma = _check_order(order, len(e))
    if e.ndim != 1 or not np.isin(e, (-1, 0, 1)).all():
        raise InputError(f"signs of shape {e.shape}", expected="[n] of +1, -1 (or 0)", remedy="See balance().")
    return _like(signs, rearranged(e, sigma))


def rearranged(e: NDArray[Any], sigma: NDArray[np.int64]) -> NDArray[np.int64]:
    """:func:`reorder` of valid arrays, a part at a time, to save memory with large orders."""
    new = np.empty_like(sigma)
    front, back = int(np.count_nonzero(e > 0)), int(np.count_nonzero(e < 0))
    new[:front] = sigma[e > 0]
    new[front : len(new) - back] = sigma[e == 0]
    new[len(new) - back :] = sigma[e < 0][::-1]
    return new


def greedy(z: Array, *, centre: bool = True, progress: Progress | None = None) -> Array:
    """Algorithm 1: always take the vector that leaves the prefix sum smallest. O(n^2 d) work.

    It can be far worse than random (Statement 1); it is included as the field's baseline.

    Args:
        z: ``[n, d]``.
        centre: centre the vectors (line 2 of Algorithm 1); False does not, as in the proof of Statement 1.
        progress: called with (vectors placed, total vectors).
    """
    rows, mean = _read(z)
    mean = mean if centre else np.zeros_like(mean)
    n = len(rows)
    whole = n * n * 8 <= _GREEDY_GRAM_BYTES
    gram, squares = np.zeros((n, n) if whole else (0, 0)), np.zeros(n)
    for start, stop in _blocks(*rows.T.shape):  # columns of z, so that no centred copy is made
        part = rows[:, start:stop] - mean[start:stop]
        squares += np.square(part).sum(axis=1)
        if whole:
            gram += part @ part.T
    # |s + z_j|^2 - |s|^2 of each vector that is left, and infinity of the others.
    growth, sigma = squares, np.empty(n, dtype=np.int64)
    for i in range(n):
        chosen = int(growth.argmin())  # the first of equals
        sigma[i] = chosen
        if whole:
            growth += 2.0 * gram[chosen]
        else:
            row = rows[chosen] - mean
            for start, stop in _blocks(*rows.shape):
                growth[start:stop] += 2.0 * ((rows[start:stop] - mean) @ row)
        growth[chosen] = math.inf
        if progress and (i + 1) % max(1, n // 200) == 0:
            progress(i + 1, n)
    return _like(z, sigma)


def herd(
    z: Array,
    *,
    rounds: int = 10,
    balancer: Balancer | None = None,
    centering: Centering = "mean",
    order: Any = None,
    seed: int = 0,
    tolerance: float = 0.0,
    progress: Progress | None = None,
) -> Array:
    """Balance, reorder (Algorithm 3), repeat: each round brings Eq. 3 closer to the balancing bound.

    Theorem 2: a round lowers the herding objective from H to at most (A+H)/2. A failed walk is
    restarted with new random numbers.

    Args:
        z: ``[n, d]``.
        rounds: the maximum number of rounds of balancing and reordering.
        balancer: :class:`~ordain.balancing.Deterministic` by default.
        centering: ``"mean"`` balances the centred vectors; ``"pair"`` the differences of consecutive
            ones: +1 puts the first of a pair at the front and the second at the back, -1 the other way round.
        order: the order to start from; ``range(n)`` by default.
        seed: for balancers that draw random numbers.
        tolerance: stop once a round lowers the largest 2-norm of a prefix sum by less than this fraction, and return
            the better of the last two orders. 0 runs all rounds.
        progress: called with (signs found, total signs).

    Returns:
        ``[n]``, a permutation (int64).

    >>> z = np.random.default_rng(0).random((1000, 16))
    >>> herding_objective(z) / herding_objective(z, herd(z)) > 5
    True
    """
    rows, mean = _read(z)
    n, sigma = len(rows), _check_order(order, len(rows))
    check_balancer(balancer)
    balancer = balancer or Deterministic()
    seed = _rng.check_seed(seed)
    check_rounds(rounds)
    if centering not in ("mean", "pair"):
        raise InputError(f"centering={centering!r}", expected="'mean' or 'pair'", remedy="'mean' is the paper's.")
    check_tolerance(tolerance)
    _check_stopping(tolerance, balancer, centering)
    centre, count, number = (None, n // 2, 0) if centering == "pair" else (mean, n, 0)
    before, bound = sigma, math.inf

    def tell(done: int) -> None:
        if progress:
            progress(number * count + done, rounds * count)

    for number in range(rounds):
        for attempt in range(_WALK_ATTEMPTS):
            stream = number * _WALK_ATTEMPTS + attempt
            try:
                signs, largest = _signs(rows, sigma, balancer, centre, seed=seed, stream=stream, tell=tell)
                break
            except BalancingFailedError:
                if attempt == _WALK_ATTEMPTS - 1:
                    raise
        if tolerance and largest > (1.0 - tolerance) * bound:
            return _like(z, sigma if largest < (1.0 - SAME) * bound else before)
        before, bound = sigma, largest
        if centre is None:  # of pairs: an odd last vector gets 0
            signs = np.append(np.stack([signs, -signs], axis=1), np.zeros(n % 2, dtype=np.int8))
        sigma = rearranged(signs, sigma)
    return _like(z, sigma)


def check_rounds(rounds: Any) -> int:
    """Return a number of rounds, or raise."""
    if isinstance(rounds, bool) or not isinstance(rounds, (int, np.integer)) or rounds < 0:
        raise InputError(f"rounds={rounds!r}", expected="an integer >= 0", remedy="Ten rounds are usually enough.")
    return int(rounds)


def check_tolerance(tolerance: Any) -> None:
    """Raise unless this is a share."""
    if not isinstance(tolerance, (int, float)) or not 0.0 <= tolerance < 1.0:
        raise InputError(f"tolerance={tolerance!r}", expected="a fraction from 0 to 1", remedy="0.02 means 2 %.")


def _check_stopping(tolerance: float, balancer: Balancer, centering: str) -> None:
    if tolerance and (centering != "mean" or compiled_rule(balancer, n=1, d=1) is None):
        raise InputError(
            f"tolerance={tolerance!r} with centering={centering!r} and {balancer!r}",
            expected="centering='mean' and a built-in balancer",
            remedy="Omit tolerance to run all rounds.",
        )


def _signs(
    rows: NDArray[Any],
    sigma: NDArray[np.int64],
    balancer: Balancer,
    centre: NDArray[np.float64] | None,
    *,
    seed: int,
    stream: int = 0,
    tell: Callable[[int], None] = lambda done: None,
) -> tuple[NDArray[np.int8], float]:
    """Signs of the vectors minus ``centre`` or, where that is None, of the differences of consecutive ones.

    And the largest 2-norm of a prefix sum of the vectors minus ``centre``, where a compiled loop finds the signs.
    One pass over the vectors, streamed: on the CPU this beats Gram blocks (``python -m benchmarks herd``).
    """
    d, paired = rows.shape[1], centre is None
    count = len(sigma) // 2 if paired else len(sigma)

    def vectors(start: int, stop: int) -> NDArray[np.float64]:
        chosen = sigma[2 * start : 2 * stop] if centre is None else sigma[start:stop]
        z = rows[chosen].astype(np.float64)
        return z[0::2] - z[1::2] if centre is None else z - centre

    state, s, row = balancer.start(), np.zeros(d), np.empty(d)
    prefix, largest = np.zeros(d), np.zeros(1)

    def ask(z: NDArray[np.float64], u: NDArray[np.float64]) -> NDArray[np.int8]:
        def sup(signs: NDArray[Any]) -> float:
            return float(np.abs(s + signs @ z[: len(signs)]).max())

        found = balancer.signs(z @ s, z @ z.T, n=count, d=d, state=state, u=u, sup=sup, fallback=False)
        return check_signs(found, len(z), balancer)

    if type(balancer) is SelfBalancingWalk:  # all vectors are here: the bound is exact
        squares = (np.square(vectors(*block)).sum(axis=1).max() for block in _blocks(count, d))
        state[2] = math.sqrt(max(squares, default=0.0))
    rule = compiled_rule(balancer, n=count, d=d)
    signs = np.zeros(count, dtype=np.int8)
    for start, stop in _blocks(count, d, most=count if rule else _GRAM_ROWS):
        u = np.zeros(stop - start)
        if balancer.random:
            u = _rng.uniforms(stop - start, seed=seed, stream=stream, start=start)
        if rule is not None:
            from ordain.kernels.signs import stream_signs

            mean = np.zeros(d) if centre is None else centre
            into = signs[start:stop]
            kind, parameter = rule
            done = stream_signs(
                kind, rows, sigma, start, stop, paired, mean, s, row, u, state, parameter, prefix, largest, into
            )
            if done < 0:
                raise walk_failure(-1 - done, parameter)
        else:
            z = vectors(start, stop)
            signs[start:stop] = ask(z, u)
            s += signs[start:stop] @ z
        tell(stop)
    return signs, math.sqrt(largest[0])


def _blocks(count: int, width: int, *, most: int = sys.maxsize) -> Iterator[tuple[int, int]]:
    """Ranges of at most ``most`` of ``count`` vectors of ``width`` numbers."""
    size = max(1, min(most, _BLOCK_NUMBERS // width))
    return ((start, min(start + size, count)) for start in range(0, count, size))


def _read(z: Any) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """The rows as a C-ordered float array, and their mean; clear errors for what cannot be herded."""
    if isinstance(z, torch.Tensor):
        z = z.detach().cpu()
        z = (z if z.dtype in (torch.float32, torch.float64) else z.double()).numpy()
    rows = np.asanyarray(z)
    if rows.ndim != 2 or 0 in rows.shape:
        raise InputError(
            f"vectors of shape {tuple(rows.shape)}",
            expected="[n, d] with n >= 1 and d >= 1",
            remedy="Put one vector in each row; flatten gradients with g.reshape(n, -1).",
        )
    if rows.dtype.kind not in "fiub":
        raise InputError(f"vectors of dtype {rows.dtype}", expected="real numbers", remedy="Convert to float64 first.")
    if rows.dtype not in (np.float32, np.float64):
        rows = rows.astype(np.float64)
    rows = np.ascontiguousarray(rows)
    total, largest = np.zeros(rows.shape[1]), 0.0
    for start, stop in _blocks(*rows.shape):
        with np.errstate(invalid="ignore", over="ignore"):
            total += rows[start:stop].sum(axis=0, dtype=np.float64)
        largest = max(largest, float(rows[start:stop].max()), -float(rows[start:stop].min()))
        if not np.isfinite(total).all():
            bad = np.flatnonzero(~np.isfinite(rows[start:stop]).all(axis=1)) + start
            what = f"NaN or infinity in row {bad[0]}" if len(bad) else f"sums beyond float64 near row {start}"
            raise InputError(what, expected="finite vectors", remedy="Drop or repair such rows before herding.")
    if largest > LARGEST:
        raise InputError(
            f"numbers as large as {largest:.3g}",
            expected=f"at most {LARGEST:g}, so that their squares can be summed",
            remedy="Divide all vectors by the largest entry: the order does not depend on the scale.",
        )
    return rows, total / len(rows)


def _check_order(order: Any, n: int) -> NDArray[np.int64]:
    if order is None:
        return np.arange(n)
    sigma = np.asarray(order)
    if sigma.shape != (n,) or sigma.dtype.kind not in "iu" or (np.sort(sigma) != np.arange(n)).any():
        raise InputError(
            f"an order of shape {sigma.shape} and dtype {sigma.dtype}",
            expected=f"a permutation of range({n})",
            remedy="Each row must appear exactly once.",
        )
    return sigma.astype(np.int64)


def _like(example: Array, answer: NDArray[Any]) -> Array:
    return torch.from_numpy(answer) if isinstance(example, torch.Tensor) else answer
