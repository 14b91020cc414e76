"""What a run is: a typed configuration that is saved with its records and must be met to go on."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from ordain.errors import InputError
from ordain.study.strict_json import validated

Protocol = Literal["tuned", "paper"]
Optimizer = Literal["sgd", "adamw"]
_GROWING = ("arms", "rates", "seeds")  # more of these only adds jobs


@dataclass(config=ConfigDict(strict=True, extra="forbid"), frozen=True)
class RunConfig:
    """Everything that records depend on."""

    task: str  # a name in ordain.study.tasks.TASKS
    arms: tuple[str, ...]  # orders by name; "grab@8" orders units of 8 examples
    rates: tuple[float, ...]  # learning rates
    seeds: tuple[int, ...]  # of the initial weights and of the orders
    epochs: int  # passes over the training set
    batch_size: int  # examples to a step
    momentum: float  # of SGD; AdamW has torch's betas
    weight_decay: float  # of the optimizer
    plateau: bool = False  # the paper's schedule of WikiText-2
    clip: float | None = None  # the largest norm of a batch's gradient
    study: str = "training"  # "training", or the ablation that chose the arms
    # "tuned": every arm at every rate; "paper": the others only at the best of RR in their units.
    protocol: Protocol = "tuned"
    group: int = 1  # examples to a unit, for arms that do not say
    limit: int | None = None  # use at most this many examples of each set
    herding: bool = False  # measure the herding objective and how stale gradients are, after each epoch
    threads: int = 1  # of torch and of BLAS, in each worker
    memory_limit: int = 2 * 2**30  # bytes that Greedy and Herding may store
    greedy_hours: float = 1.0  # refuse Greedy where a job's herding would take longer, as estimated
    weights: str | None = None  # what a BERT starts from: a folder, or a model of the hub
    # What steps with the gradients; orders balance the gradients themselves, whatever it is.
    optimizer: Optimizer = "sgd"

    def to_json(self) -> dict[str, Any]:
        """Numbers, strings and lists."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, saved: dict[str, Any], *, where: str = "a saved configuration") -> RunConfig:
        """What :meth:`to_json` gave; ``where`` is what errors call it. Older runs lack what now has a default."""
        found: RunConfig = validated(
            cls, json.dumps(saved).encode(), where, remedy="Mend the file, or run into a new folder with --out."
        )
        return found


def merged(saved: RunConfig, asked: RunConfig) -> RunConfig:
    """``saved`` with what ``asked`` adds to it; refused if more than arms, rates and seeds differ."""
    differing = [
        f"{field.name} ({getattr(saved, field.name)!r} there, {getattr(asked, field.name)!r} here)"
        for field in fields(RunConfig)
        if field.name not in _GROWING and getattr(saved, field.name) != getattr(asked, field.name)
    ]
    if differing:
        raise InputError(
            f"a folder whose run differs in {'; '.join(differing)}",
            expected="the configuration it was started with; orders, rates and seeds may be added",
            remedy="Run into a new folder with --out.",
        )
    grown: dict[str, Any] = {
        name: tuple(dict.fromkeys((*getattr(saved, name), *getattr(asked, name)))) for name in _GROWING
    }
    return replace(saved, **grown)
