"""Arms: the orders under comparison, with unit size and number of ranks, and estimates of their cost."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ordain import FixedOrder, Order
from ordain.distributed import Distributed
from ordain.errors import InputError, did_you_mean
from ordain.orders import ORDERS
from ordain.study.runs.config import RunConfig
from ordain.study.runs.multi_rank import PATIENCE

BASELINE = "rr"
SOURCE, RETRAIN = "grab", "retrain"  # "retrain" reuses the last order of SOURCE
STORING = ("greedy", "herding")  # orders that store n gradients
_NAME = re.compile(
    r"(?P<order>.*?)(?P<precond>-precond)?(?P<ema>-ema)?(@(?P<size>[1-9][0-9]{0,8}))?"
    r"(\+(?P<ranks>[2-9]|[1-9][0-9]{1,3})(?P<alone>-independent)?)?",
    re.ASCII,
)
Mode = Literal["exact", "independent"]
_PER_SECOND = 2e9  # multiply-adds, measured on one thread of a 2.8 GHz Xeon, at n = 2,000 and d = 7,850


def is_baseline(name: str) -> bool:
    """Whether the arm is random reshuffling, for any unit size and number of ranks.

    >>> is_baseline("rr"), is_baseline("rr@8"), is_baseline("rr+2"), is_baseline("grab@8")
    (True, True, True, False)
    """
    return plain_name(name) == BASELINE


def plain_name(name: str) -> str:
    """The order's name, without unit size and ranks.

    >>> plain_name("grab-pair@8+2-independent")
    'grab-pair'
    """
    return name.partition("+")[0].partition("@")[0]


def baseline_of(name: str, arms: Container[str]) -> str | None:
    """The baseline of an arm: RR with the same unit size and number of ranks, or the closest RR in ``arms``.

    >>> baseline_of("grab@8", ["rr", "rr@8"]), baseline_of("grab@8", ["rr"]), baseline_of("grab", ["rr@8"])
    ('rr@8', 'rr', None)
    >>> baseline_of("grab+2-independent", ["rr", "rr+2"]), baseline_of("grab+4", ["rr", "rr+2"])
    ('rr+2', 'rr')
    """
    before, plus, ranks = name.partition("+")
    _, at, size = before.partition("@")
    units, processes = at + size, plus + ranks
    endings = (units + processes, units + processes.partition("-")[0], units, processes.partition("-")[0], "")
    return next((BASELINE + ending for ending in endings if BASELINE + ending in arms), None)


@dataclass(frozen=True)
class Arm:
    """One order as it is run: a line in every figure."""

    name: str  # in records and on the command line, "grab@8", "grab+2"
    order: str  # in ordain.orders.ORDERS, or "fixed"
    label: str  # display name
    group: int  # examples per unit
    shares_first: bool  # whether its first epoch is the one all orders of a seed share
    ranks: int = 1  # processes that train together
    mode: Mode = "exact"  # how the order works with the other ranks
    averaged: bool = False  # evaluate an exponential moving average of the weights
    preconditioned: bool = False  # order by gradients as the optimizer scales them

    @property
    def is_permutation(self) -> bool:
        """Whether its order names every example of the training set once."""
        return self.order == "fixed" or (ORDERS[self.order].is_permutation and self.mode != "independent")

    @property
    def needs_labels(self) -> bool:
        """Whether it can run only on a task with classes."""
        return self.order != "fixed" and ORDERS[self.order].needs_labels


def parse(name: str, *, group: int = 1) -> Arm:
    """Parse an arm's name; ``group`` is the unit size if the name has none.

    >>> parse("grab@8").label, parse("grab+2-independent").label, parse("rr-ema").label
    ('GraB, units of 8', 'GraB, 2 ranks (independent)', 'random reshuffling, averaged weights')
    """
    if name == RETRAIN:
        return Arm(name, "fixed", "retrain from GraB", 1, shares_first=False)
    found = _NAME.fullmatch(name)
    if found is None or found["order"] not in ORDERS:
        raise InputError(
            f"the order {name[:40]!r}",
            expected=f"one of {', '.join(ORDERS)}; with an integer after @ of at most 9 digits, or after + a number of "
            "ranks of at least 2, optionally followed by -independent",
            remedy=did_you_mean(
                name,
                ORDERS,
                otherwise="Separate orders by commas; write grab@8 for units of 8 examples, grab+2 for 2 ranks, rr-ema "
                "to evaluate averaged weights, grab-precond to order by gradients as AdamW scales them.",
            ),
        )
    order, recipe, group = found["order"], ORDERS[found["order"]], int(found["size"] or group)
    if group > 1 and (recipe.needs_labels or not recipe.is_permutation):
        raise InputError(f"{order!r} in units of {group}", expected="units of 1", remedy="Leave it out.")
    preconditioned, averaged, ranks = bool(found["precond"]), bool(found["ema"]), int(found["ranks"] or 1)
    mode: Mode = "independent" if found["alone"] else "exact"
    label = recipe.label + (", preconditioned" if preconditioned else "") + (", averaged weights" if averaged else "")
    label += f", units of {group}" if found["size"] else ""
    label += f", {ranks} ranks" if ranks > 1 else ""
    label += f" ({mode})" if found["alone"] else ""
    shares_first = recipe.is_permutation and not recipe.needs_labels and mode != "independent"
    return Arm(name, order, label, group, shares_first, ranks, mode, averaged, preconditioned)


def on_ranks(arms: Sequence[str], ranks: Sequence[int], mode: str = "exact") -> tuple[str, ...]:
    """Combine every arm with every number of ranks; arms that already name their ranks are kept unchanged.

    >>> on_ranks(["rr", "grab", "grab+3"], [1, 2], "independent")
    ('rr', 'grab', 'rr+2-independent', 'grab+2-independent', 'grab+3')
    """
    ending = "" if mode == "exact" else f"-{mode}"
    single = [arm for arm in arms if "+" not in arm]
    found = [arm if count == 1 else f"{arm}+{count}{ending}" for count in ranks for arm in single]
    return (*found, *(arm for arm in arms if "+" in arm))


def build_order(
    arm: Arm,
    model: nn.Module,
    n: int,
    *,
    seed: int,
    memory_limit: int,
    labels: Tensor | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    fixed: NDArray[Any] | None = None,
) -> Order:
    """Build the order of an arm for ``n`` examples.

    ``labels`` are the examples' classes, ``optimizer`` is for arms that order by gradients as it scales them, and
    ``fixed`` is the permutation of ``"retrain"``.
    """
    if fixed is not None:
        return FixedOrder(fixed)
    more: dict[str, Any] = {"memory_limit": memory_limit} if arm.order in STORING else {}
    more |= {"labels": labels} if arm.needs_labels else {}
    more |= {"precondition": optimizer} if arm.preconditioned else {}
    more["distributed"] = Distributed(mode=arm.mode, timeout=PATIENCE) if arm.ranks > 1 else False
    return ORDERS[arm.order].build(model, n, seed=seed, group=arm.group, **more)


def stored_bytes(arm: Arm, n: int, d: int) -> int:
    """Bytes of the float32 gradients that Greedy and Herding store: one d-vector per unit (Alg. 2)."""
    return -(-n // arm.group) * d * 4


def greedy_seconds(units: int, d: int) -> float:
    """Estimated time of greedy herding for one epoch: n^2 d / 2 multiply-adds in all (Alg. 1).

    This is an upper estimate: when the n x n Gram matrix fits in memory, Greedy is several times faster.
    """
    return units * units * d / 2 / _PER_SECOND


def too_slow(arm: Arm, config: RunConfig, n: int, d: int) -> str | None:
    """The reason to refuse a Greedy job whose herding would exceed ``config.greedy_hours``, or None.

    No herding follows the last epoch.
    """
    if arm.order != "greedy":
        return None
    units = -(-n // arm.group)
    hours = greedy_seconds(units, d) / 3600
    if hours * (config.epochs - 1) <= config.greedy_hours:
        return None
    most = config.greedy_hours
    return (
        f"greedy herding of {units:,} gradients of {d:,} numbers would take about {hours:.2g} hours per epoch; "
        f"expected at most {most:g} hour{'s' * (most != 1)} for the {config.epochs - 1} epochs that herd. Raise "
        "--greedy-hours, order larger units (greedy@64), train on fewer examples with --limit, or use GraB, whose "
        "work is O(nd)."
    )
