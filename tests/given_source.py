"""A source of gradients written outside the package: whatever it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ordain.gradients import Collected, Dense


class GivenSource:
    """Rows that were handed to :meth:`give`, in turn."""

    name = "given"
    last: GivenSource  # the one that was built last

    def __init__(self, model: nn.Module, *, d: int, whole_units: bool = False, **options: Any) -> None:
        self.model, self.options = model, options
        self.dim, self.whole_units = d, whole_units
        self.parameters: list[str] = []
        self.like = torch.empty(0, dtype=torch.float64)
        self.waiting: list[Collected] = []
        self.attached = True
        GivenSource.last = self

    @classmethod
    def of(cls, **settings: Any) -> Any:
        """For ``gradients=``."""
        return lambda model, **options: cls(model, **settings, **options)

    def give(self, rows: Tensor, *, examples: int | None = None) -> None:
        self.waiting.append(Collected(Dense([rows]), len(rows) if examples is None else examples))

    def attach(self) -> None:
        self.attached = True

    def collect(self) -> list[Collected]:
        waiting, self.waiting = self.waiting, []
        return waiting

    def drop(self, size: int | None = None) -> bool:
        if size is None:
            self.waiting = []
        elif self.waiting and self.waiting[-1].examples == size:
            self.waiting.pop()
        return bool(self.waiting)

    def detach(self) -> None:
        self.attached = False
