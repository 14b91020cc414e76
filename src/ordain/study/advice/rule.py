"""From a pilot to a recommendation. A heuristic: what it got right and wrong is in the results."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ordain.study.advice.pilot import Pilot

USE, DO_NOT, CANNOT_TELL = "use it", "do not use it", "cannot tell"
WORTH = 0.01  # the least gain, as a share of the training loss
_BEGUN = 0.02  # the least fall of RR's loss, as a share, that shows that training has begun
_CHEAP = 1.5  # above this cost, learn in every third epoch only
_SETTING = 'Herding(model, n, params="head", sketch=1024'


@dataclass(frozen=True)
class Advice:
    """A verdict, the reason in one sentence, and the order to use (empty unless the verdict is to use it)."""

    verdict: str  # USE, DO_NOT or CANNOT_TELL
    reason: str
    setting: str = ""


def gain(pilot: Pilot) -> float:
    """By how much the order's loss was lower than RR's, as a share of RR's: mean over seeds."""
    return 1 - sum(pilot.ordered) / sum(pilot.rr)


def advise(pilot: Pilot) -> Advice:
    """What to do, given a pilot."""
    if not all(map(math.isfinite, pilot.rr)):
        return Advice(DO_NOT, "training with random reshuffling diverged: lower the rate first.")
    if not all(map(math.isfinite, pilot.ordered)):
        return Advice(DO_NOT, "training diverged with the order, at a rate that random reshuffling stands.")
    fall = 1 - sum(pilot.rr) / len(pilot.rr) / pilot.start if pilot.start > 0 else 0.0
    if fall < _BEGUN:
        return Advice(
            CANNOT_TELL,
            f"in these steps the training loss fell by {100 * fall:.1f} % only; try again with more --steps.",
        )
    found = gain(pilot)
    said = f"the training loss ended {100 * abs(found):.1f} % {'lower' if found >= 0 else 'higher'} than RR's"
    if found < WORTH:
        noise = f"sampling noise is {100 * pilot.noise:.1f} % of it, which is what an order can remove"
        return Advice(DO_NOT, f"{said}; {noise}." if pilot.noise < WORTH else f"{said}, and a gain of 1 % is needed.")
    if any(ours >= theirs for ours, theirs in zip(pilot.ordered, pilot.rr, strict=True)):
        return Advice(CANNOT_TELL, f"{said}, but not with every seed; try again with more --seeds.")
    more = "" if pilot.cost <= _CHEAP else ", learn=Every(3, after=2)"
    extra = 100 * max(0.0, pilot.cost - 1)
    weigh = f"it pays unless {extra:.0f} % more epochs of RR gain as much" if extra >= 1 else "at no measurable cost"
    return Advice(USE, f"{said}, with every seed; {weigh}.", f"{_SETTING}{more})")
