"""Arms: an order by name, the size of its units, and what it is called."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import nn

from ordain import FixedOrder, Order
from ordain.errors import InputError
from ordain.orders import ORDERS

__all__ = [
    "BASELINE",
    "RETRAIN",
    "SOURCE",
    "STORING",
    "Arm",
    "baseline_of",
    "build_order",
    "check_units",
    "is_baseline",
]
__all__ += ["parse", "stored_bytes"]

BASELINE = "rr"
SOURCE, RETRAIN = "grab", "retrain"  # whose last order "retrain" keeps
_DIGITS = 9  # of a unit's size
STORING = ("greedy", "herding")  # keep n gradients


def is_baseline(name: str) -> bool:
    """Is it random reshuffling, in units of whatever size?

    >>> is_baseline("rr"), is_baseline("rr@8"), is_baseline("grab@8")
    (True, True, False)
    """
    return name.partition("@")[0] == BASELINE


def baseline_of(name: str, arms: Container[str]) -> str | None:
    """What an arm is compared with: RR in units of the same size if that is one of ``arms``, otherwise ``rr``.

    >>> baseline_of("grab@8", ["rr", "rr@8"]), baseline_of("grab@8", ["rr"]), baseline_of("grab", ["rr@8"])
    ('rr@8', 'rr', None)
    """
    _, at, units = name.partition("@")
    return next((found for found in (f"{BASELINE}{at}{units}", BASELINE) if found in arms), None)


@dataclass(frozen=True)
class Arm:
    """One line of a figure.

    Attributes:
        name: in records and on the command line, ``"grab@8"``.
        order: in ``ordain.orders.ORDERS``, or ``"fixed"``.
        label: for people.
        group: examples to a unit.
        shares_first: does its first epoch visit the examples as that of every other order of its seed?
    """

    name: str
    order: str
    label: str
    group: int
    shares_first: bool


def parse(name: str, *, group: int = 1) -> Arm:
    """The arm of a name; ``group`` where the name does not say.

    >>> parse("grab@8").label
    'GraB, units of 8'
    """
    if name == RETRAIN:
        return Arm(name, "fixed", "retrain from GraB", 1, shares_first=False)
    order, at, size = name.partition("@")
    if order not in ORDERS:
        raise InputError(
            f"the order {name!r}",
            expected=f"one of {', '.join(ORDERS)}",
            remedy="Separate several by commas; write grab@8 for units of 8 examples.",
        )
    if at:
        if not size.isascii() or not size.isdigit() or len(size) > _DIGITS or int(size) < 1:
            raise InputError(
                f"the order {name[:40]!r}",
                expected=f"a whole number after @, of at most {_DIGITS} digits",
                remedy="Write grab@8, say.",
            )
        group = int(size)
    if not ORDERS[order].is_permutation and group > 1:
        raise InputError(f"{order!r} in units of {group}", expected="units of 1", remedy="Leave it out.")
    label = ORDERS[order].label + (f", units of {group}" if at else "")
    return Arm(name, order, label, group, shares_first=ORDERS[order].is_permutation)


def check_units(arm: Arm, n: int) -> None:
    """Refuse one unit of all examples: there would be nothing to order."""
    if arm.group > 1 and n <= arm.group:
        raise InputError(
            f"{arm.name} in units of {arm.group:,} on {n:,} examples",
            expected="two units at least",
            remedy="Take smaller units, after @ or with --group.",
        )


def build_order(
    arm: Arm, model: nn.Module, n: int, *, seed: int, memory_limit: int, fixed: NDArray[Any] | None = None
) -> Order:
    """The order of an arm; ``fixed`` is the permutation that ``"retrain"`` keeps."""
    if fixed is not None:
        return FixedOrder(fixed)
    more = {"memory_limit": memory_limit} if arm.order in STORING else {}
    return ORDERS[arm.order].build(model, n, seed=seed, group=arm.group, **more)


def stored_bytes(arm: Arm, n: int, d: int) -> int:
    """Bytes of the float32 gradients that Greedy and Herding store: one of length d for each unit (Alg. 2)."""
    return -(-n // arm.group) * d * 4
