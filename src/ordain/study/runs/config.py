"""The configuration of a run, which is saved with the records and required to resume; and the paper's ablations."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from ordain.errors import InputError
from ordain.study.files import validated

Protocol = Literal["tuned", "each", "paper"]
Optimizer = Literal["sgd", "adamw"]
Decay = Literal["constant", "cosine", "step"]
_GROWING = ("arms", "rates", "seeds")  # settings that may be extended later


@dataclass(config=ConfigDict(strict=True, extra="forbid"), frozen=True)
class RunConfig:
    """Every setting that the records depend on."""

    task: str  # a name in ordain.study.tasks.TASKS
    arms: tuple[str, ...]  # orders by name; "grab@8" orders units of 8 examples
    rates: tuple[float, ...]  # learning rates
    seeds: tuple[int, ...]  # seeds of the initial weights and the orders
    epochs: int  # passes over the training set
    batch_size: int  # examples per step
    momentum: float  # SGD only; AdamW uses torch's default betas
    weight_decay: float  # of the optimizer
    plateau: bool = False  # use the paper's schedule for WikiText-2
    clip: float | None = None  # maximum gradient norm
    study: str = "training"  # "training", or the ablation that chose the arms
    # "tuned": every arm at every rate; "each": the first two seeds at every rate, the others at the arm's best rate;
    # "paper": RR at every rate, other arms only at the best rate of RR with the same unit size.
    protocol: Protocol = "tuned"
    group: int = 1  # default unit size
    limit: int | None = None  # use at most this many examples of each set
    herding: bool = False  # measure herding objective and gradient staleness after each epoch
    threads: int = 1  # torch and BLAS threads per worker
    memory_limit: int = 2 * 2**30  # bytes that Greedy and Herding may store
    greedy_hours: float = 1.0  # refuse Greedy if its estimated herding time exceeds this
    weights: str | None = None  # initial BERT weights: a folder, or a model on the hub
    # Orders always balance the raw gradients, whatever the optimizer.
    optimizer: Optimizer = "sgd"
    decay: Decay = "constant"  # of the learning rate, over all steps; replaces the plateau schedule

    @classmethod
    def from_json(cls, saved: dict[str, Any], *, where: str = "a saved configuration") -> RunConfig:
        """From JSON values; ``where`` names the source in errors. Missing settings get their defaults."""
        found: RunConfig = validated(
            cls, json.dumps(saved).encode(), where, remedy="Repair the file, or use a new folder with --out."
        )
        return found


def merged(saved: RunConfig, asked: RunConfig) -> RunConfig:
    """Add the arms, rates and seeds of ``asked`` to ``saved``; any other difference raises InputError."""
    differing = [
        f"{field.name} ({getattr(saved, field.name)!r} there, {getattr(asked, field.name)!r} here)"
        for field in fields(RunConfig)
        if field.name not in _GROWING and getattr(saved, field.name) != getattr(asked, field.name)
    ]
    if differing:
        raise InputError(
            f"a folder whose run differs in {'; '.join(differing)}",
            expected="the configuration that the run was started with; only orders, rates and seeds may be added",
            remedy="Use a new folder with --out.",
        )
    grown: dict[str, Any] = {
        name: tuple(dict.fromkeys((*getattr(saved, name), *getattr(asked, name)))) for name in _GROWING
    }
    return replace(saved, **grown)


class Ablation(NamedTuple):
    """An ablation of the paper: which orders and units are compared on a task."""

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
