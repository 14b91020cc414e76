"""The paper's ablations: which orders and units are compared on a task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ablation:
    """A choice of arms."""

    name: str  # as given on the command line
    title: str  # the question it answers
    arms: tuple[str, ...]  # the arms to compare
    epochs: int | None = None  # overrides the task's default
    one_rate: bool = False  # run only the first of the task's rates


_UNITS = (1, 2, 8, 64)

ABLATIONS: dict[str, Ablation] = {
    ablation.name: ablation
    for ablation in (
        Ablation(
            "fixed-orders",
            "Are good permutations fixed? 1-step GraB and retraining on GraB's last order.",
            ("rr", "so", "grab", "grab-1step", "retrain"),
        ),
        Ablation(
            "granularity",
            "Units of 1, 2, 8 and 64 examples.",
            tuple(f"{order}@{unit}" for unit in _UNITS for order in ("rr", "grab")),
        ),
        # One epoch is enough: memory does not grow after it, and Greedy herds only between epochs. The paper's 224.6 MB
        # and 1.44 GB for Greedy are for units of 8 examples.
        Ablation(
            "memory",
            "What orders store: n gradients (Greedy, herding) or a few vectors (GraB).",
            ("rr", "grab", "grab-pair", "herding", "greedy", "greedy@8"),
            epochs=1,
            one_rate=True,
        ),
    )
}
