"""Whether to order, from a short pilot: a heuristic, checked against the outcomes of recorded runs."""

from ordain.study.advice.pilot import Pilot, run_pilot
from ordain.study.advice.rule import Advice, advise

__all__ = ["Advice", "Pilot", "advise", "run_pilot"]
