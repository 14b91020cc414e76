"""A backward that came to its end, told from one that broke off: only the first has brought gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class Backwards:
    """Collects what the running backward brings, and hands it to ``finish`` once that backward is complete.

    A backward that raises (an error in it, an interrupt) leaves part of a batch's gradients, which nobody may take for
    a batch: it is forgotten.
    """

    def __init__(self, finish: Callable[[dict[Any, Any]], None]) -> None:
        self._finish = finish
        self._task = -1
        self.brought: dict[Any, Any] = {}  # by the backward that is running, or that broke off

    def here(self) -> dict[Any, Any]:
        """For hooks that a backward calls: what it has brought so far, to be added to."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self.brought = task, {}
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        return self.brought

    def forget(self) -> None:
        """Drop what a broken backward has left."""
        self._task, self.brought = -1, {}

    def _end(self, task: int) -> None:
        if task == self._task:
            brought = self.brought
            self.forget()
            self._finish(brought)
