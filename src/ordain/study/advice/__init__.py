"""Whether to order, from a short pilot: a heuristic, checked against the outcomes of recorded runs."""

from ordain.study.advice.pilot import Advice, Pilot, advise, run_pilot

__all__ = ["Advice", "Pilot", "advise", "run_pilot"]
