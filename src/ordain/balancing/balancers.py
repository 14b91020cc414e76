"""Balancers: Algorithms 5 and 6, kernel halving, and the base class of custom balancers.

A balancer gives each vector z a sign that keeps the signed sum s small. It never sees a vector:
only <s,z>, the Gram matrix of the batch and, rarely, |s|_inf. So one implementation serves plain
arrays, gradients that exist only as layer factors, and sketches.

Balancers are immutable. What a pass learns lives in a small ``state`` array owned by the caller,
and random numbers come from a counter-based stream, so equal inputs give equal signs at any batch size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ordain.errors import BalancingFailedError, InputError

__all__ = ["Balancer", "Deterministic", "KernelHalving", "SelfBalancingWalk", "check_balancer", "compiled_rule"]


class Balancer(ABC):
    """Decides signs. Subclass it, override :meth:`signs`, and pass an instance as ``balancer=``.

    ``repr(balancer)`` is saved with an order's state, and a state saved under another one is refused: give it a repr
    that names its settings (a frozen dataclass has one).

    Attributes:
        random: whether :meth:`signs` is given uniform random numbers.
    """

    random: ClassVar[bool] = True

    def start(self) -> NDArray[np.float64]:
        """The state of a new pass, float64[k]; by default three numbers: |s|^2, failures, and one of the rule's own."""
        return np.zeros(3)

    @abstractmethod
    def signs(
        self,
        dots: NDArray[np.float64],
        gram: NDArray[np.float64],
        *,
        n: int,
        d: int,
        state: NDArray[np.float64],
        u: NDArray[np.float64] | None = None,
        sup: Callable[[NDArray[np.int8]], float] | None = None,
        fallback: bool = True,
    ) -> NDArray[np.int8]:
        """Signs for a batch of b vectors, exactly those of one vector at a time.

        Args:
            dots: ``[b]`` inner products <s, z_t> with s as it stands before the batch.
            gram: ``[b, b]`` inner products <z_i, z_j>.
            n: the number of vectors in the whole pass.
            d: the dimension of the vectors.
            state: the state that :meth:`start` returned, changed in place. ``state[1]`` counts failures.
            u: ``[b]`` uniform numbers, for balancers that are ``random``.
            sup: returns |s|_inf after the signs found so far; called only if |s|_2 does not decide.
            fallback: a vector that fails takes Algorithm 5's sign and is counted; otherwise an error is raised.

        Returns:
            ``[b]`` of +1 and -1.
        """


class _Compiled(Balancer):
    """A rule of the compiled loop, by its ``kind`` there."""

    kind: ClassVar[int]

    @abstractmethod
    def parameter(self, *, n: int, d: int) -> float:
        """The rule's one number for a pass over ``n`` vectors of dimension ``d``."""

    def signs(
        self,
        dots: NDArray[np.float64],
        gram: NDArray[np.float64],
        *,
        n: int,
        d: int,
        state: NDArray[np.float64],
        u: NDArray[np.float64] | None = None,
        sup: Callable[[NDArray[np.int8]], float] | None = None,
        fallback: bool = True,
    ) -> NDArray[np.int8]:
        from ordain.kernels.signs import RULES, batch_signs

        if self.kind not in RULES:
            raise InputError(
                f"kind={self.kind!r}",
                expected="the kind of a built-in balancer",
                remedy="Override signs() in a custom balancer: the compiled loop supports only the built-in ones.",
            )
        parameter = self.parameter(n=n, d=d)
        signs, done = batch_signs(self.kind, dots, gram, u, state, parameter, fallback, sup)
        if done < 0:
            raise walk_failure(-1 - done, parameter)
        return signs


@dataclass(frozen=True)
class Deterministic(_Compiled):
    """Algorithm 5: +1 if |s+z| < |s-z|, else -1. Needs no scale and no random numbers.

    >>> z = np.array([[1.0], [2.0], [4.0]])
    >>> Deterministic().signs(np.zeros(3), z @ z.T, n=3, d=1, state=np.zeros(3)).tolist()
    [-1, 1, -1]
    """

    kind: ClassVar[int] = 0  # kernels.signs.DETERMINISTIC
    random: ClassVar[bool] = False

    def parameter(self, *, n: int, d: int) -> float:
        return 0.0


@dataclass(frozen=True)
class SelfBalancingWalk(_Compiled):
    """Algorithm 6: +1 with probability 1/2 - <s,z>/2c, on vectors scaled to norm at most 1.

    Vectors are divided by the largest norm seen so far in the pass. The walk fails if
    |<s,z>| > c or |s|_inf > c: :func:`ordain.herding.herd` then starts again with new random
    numbers; an online order takes Algorithm 5's sign for that vector and counts it.

    Args:
        c: the bound; by default Theorem 4's 30 log(nd/delta). That is a worst-case constant, several
            hundred in practice, at which signs are nearly a coin toss; a smaller one keeps s smaller and
            fails more often.
        delta: the probability of failure that Theorem 4 allows, for the default ``c``.
    """

    c: float | None = None
    delta: float = 0.01

    kind: ClassVar[int] = 1  # kernels.signs.WALK

    def __post_init__(self) -> None:
        if self.c is not None and not 0 < self.c < math.inf:
            raise InputError(f"c={self.c!r}", expected="a positive number or None", remedy="None uses Theorem 4's c.")
        _check_delta(self.delta)

    def parameter(self, *, n: int, d: int) -> float:
        return self.c if self.c is not None else 30.0 * math.log(max(n * d, 1) / self.delta)  # Theorem 4


@dataclass(frozen=True)
class KernelHalving(_Compiled):
    """Kernel halving's self-balancing walk: a threshold that adapts to the vectors seen so far.

    +1 with probability (1 - <s,z>/a)/2 clipped to [0, 1], where a = max(|z| sigma sqrt(2 log(2n/delta)),
    |z|^2) and sigma^2 is a running bound on the walk's variance (Dwivedi and Mackey, *Kernel Thinning*;
    Carrell et al., *Low-Rank Thinning*, order SGD's examples with it). Never fails.

    Args:
        delta: the probability, over the whole pass, that the sign is ever clipped.
    """

    delta: float = 0.5

    kind: ClassVar[int] = 2  # kernels.signs.HALVING

    def __post_init__(self) -> None:
        _check_delta(self.delta)

    def parameter(self, *, n: int, d: int) -> float:
        return 2.0 * math.log(2.0 * max(n, 1) / self.delta)


def compiled_rule(balancer: Balancer, *, n: int, d: int) -> tuple[int, float] | None:
    """The (kind, parameter) of a built-in balancer in the compiled loops; None where only ``signs()`` may decide.

    A subclass may have overridden anything, so it does not count as built in.
    """
    if isinstance(balancer, _Compiled) and type(balancer) in (Deterministic, SelfBalancingWalk, KernelHalving):
        return balancer.kind, balancer.parameter(n=n, d=d)
    return None


def walk_failure(t: int, parameter: float) -> BalancingFailedError:
    """The error for a walk that left its bound at vector ``t``."""
    return BalancingFailedError(
        f"a signed sum larger than c = {parameter:.6g} at vector {t}",
        expected="the walk to stay within c",
        remedy="Pass a larger c, or balance with Deterministic().",
    )


def check_balancer(balancer: Any) -> None:
    """Accept None or a balancer: not its name and not its class."""
    if balancer is not None and not isinstance(balancer, Balancer):
        raise InputError(
            f"balancer={balancer!r}",
            expected="a Balancer, or None for Deterministic()",
            remedy="Write balancer=SelfBalancingWalk(), for example.",
        )


def check_signs(signs: Any, count: int, balancer: Balancer) -> NDArray[np.int8]:
    """What a balancer's ``signs()`` returned, as ``[count]`` of +1 and -1."""
    found = np.asarray(signs)
    if found.shape != (count,) or not np.isin(found, (-1, 1)).all():
        raise InputError(
            f"signs of shape {found.shape} with values {np.unique(found)[:5].tolist()} from {balancer!r}",
            expected=f"[{count}] of +1 and -1",
            remedy="signs() must return one sign for each vector it was given.",
        )
    return found.astype(np.int8)


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InputError(f"delta={delta!r}", expected="a probability in (0, 1)", remedy="Leave it at its default.")
