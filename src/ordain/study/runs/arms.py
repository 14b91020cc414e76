"""Arms: an order by name, the size of its units, over how many ranks it runs, and what it is called."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from numpy.typing import NDArray
from torch import nn

from ordain import FixedOrder, Order
from ordain.distributed import Distributed
from ordain.distributed.share import Mode
from ordain.errors import InputError
from ordain.orders import ORDERS
from ordain.study.runs.ranks import PATIENCE

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
__all__ += ["on_ranks", "parse", "plain_name", "stored_bytes"]

BASELINE = "rr"
SOURCE, RETRAIN = "grab", "retrain"  # whose last order "retrain" keeps
_DIGITS = 9  # of a unit's size
_RANK_DIGITS = 4
_MODES: tuple[Mode, ...] = get_args(Mode)
STORING = ("greedy", "herding")  # keep n gradients


def is_baseline(name: str) -> bool:
    """Is it random reshuffling, in units of whatever size, on however many ranks?

    >>> is_baseline("rr"), is_baseline("rr@8"), is_baseline("rr+2"), is_baseline("grab@8")
    (True, True, True, False)
    """
    return plain_name(name) == BASELINE


def plain_name(name: str) -> str:
    """The order of an arm, without its units and ranks.

    >>> plain_name("grab-pair@8+2-sum")
    'grab-pair'
    """
    return name.partition("+")[0].partition("@")[0]


def baseline_of(name: str, arms: Container[str]) -> str | None:
    """What an arm is compared with: RR in units of the same size and on as many ranks, as far as ``arms`` has it.

    >>> baseline_of("grab@8", ["rr", "rr@8"]), baseline_of("grab@8", ["rr"]), baseline_of("grab", ["rr@8"])
    ('rr@8', 'rr', None)
    >>> baseline_of("grab+2-sum", ["rr", "rr+2"]), baseline_of("grab+4", ["rr", "rr+2"])
    ('rr+2', 'rr')
    """
    before, plus, ranks = name.partition("+")
    _, at, size = before.partition("@")
    units, processes = at + size, plus + ranks
    endings = (units + processes, units + processes.partition("-")[0], units, processes.partition("-")[0], "")
    return next((BASELINE + ending for ending in endings if BASELINE + ending in arms), None)


@dataclass(frozen=True)
class Arm:
    """One line of a figure.

    Attributes:
        name: in records and on the command line, ``"grab@8"``, ``"grab+2-sum"``.
        order: in ``ordain.orders.ORDERS``, or ``"fixed"``.
        label: for people.
        group: examples to a unit.
        shares_first: does its first epoch visit the examples as that of every other order of its seed?
        ranks: processes that train together.
        mode: how the order works with the other ranks.
    """

    name: str
    order: str
    label: str
    group: int
    shares_first: bool
    ranks: int = 1
    mode: Mode = "exact"


def parse(name: str, *, group: int = 1) -> Arm:
    """The arm of a name; ``group`` where the name does not say.

    >>> parse("grab@8").label, parse("grab+2-sum").label
    ('GraB, units of 8', 'GraB, 2 ranks (sum)')
    """
    if name == RETRAIN:
        return Arm(name, "fixed", "retrain from GraB", 1, shares_first=False)
    units, plus, processes = name.partition("+")
    order, at, size = units.partition("@")
    if order not in ORDERS:
        raise InputError(
            f"the order {name!r}",
            expected=f"one of {', '.join(ORDERS)}",
            remedy="Separate several by commas; write grab@8 for units of 8 examples, grab+2 for 2 ranks.",
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
    ranks, mode = _ranks(name, order, processes) if plus else (1, "exact")
    label = ORDERS[order].label + (f", units of {group}" if at else "")
    if ranks > 1:
        label += f", {ranks} ranks" + ("" if mode == "exact" else f" ({mode})")
    shares_first = ORDERS[order].is_permutation and mode != "independent"
    return Arm(name, order, label, group, shares_first, ranks, mode)


def _ranks(name: str, order: str, words: str) -> tuple[int, Mode]:
    """``"2"`` and ``"2-sum"``, after the plus."""
    count, dash, mode = words.partition("-")
    well = count.isascii() and count.isdigit() and len(count) <= _RANK_DIGITS and str(int(count)) == count
    if not well or int(count) < 2 or (dash and mode not in _MODES[1:]):
        raise InputError(
            f"the order {name[:40]!r}",
            expected="a number of ranks from 2 on after the plus, and then perhaps -sum or -independent",
            remedy="Write grab+2 or grab+2-sum; without a plus it is one process.",
        )
    if mode == "sum" and not order.startswith("grab"):
        raise InputError(f"{name!r}", expected="GraB: nothing else is a sum over examples", remedy=f"{order}+{count}.")
    return int(count), next((known for known in _MODES if known == mode), "exact")


def on_ranks(arms: Sequence[str], ranks: Sequence[int], mode: str = "exact") -> tuple[str, ...]:
    """Every arm on every number of ranks; one that names its ranks stays as it is.

    The sum mode is for orders that send something: the others are the same in it as in the exact one.

    >>> on_ranks(["rr", "grab", "grab+3"], [1, 2], "sum")
    ('rr', 'grab', 'rr+2', 'grab+2-sum', 'grab+3')
    """
    found: list[str] = []
    for count in ranks:
        for arm in (arm for arm in arms if "+" not in arm):
            sends = arm.startswith("grab") or plain_name(arm) in STORING
            ending = "" if mode == "exact" or (mode == "sum" and not sends) else f"-{mode}"
            found.append(arm if count == 1 else f"{arm}+{count}{ending}")
    return (*found, *(arm for arm in arms if "+" in arm))


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
    more: dict[str, Any] = {"memory_limit": memory_limit} if arm.order in STORING else {}
    more["distributed"] = Distributed(mode=arm.mode, timeout=PATIENCE) if arm.ranks > 1 else False
    return ORDERS[arm.order].build(model, n, seed=seed, group=arm.group, **more)


def stored_bytes(arm: Arm, n: int, d: int) -> int:
    """Bytes of the float32 gradients that Greedy and Herding store: one of length d for each unit (Alg. 2)."""
    return -(-n // arm.group) * d * 4
