"""A backward that came to its end, told from one that broke off: only the first has brought gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

T = TypeVar("T")
_thread = threading.local()  # a backward inside a backward runs in the same thread
# A stance is the process's: two threads that set and restore it in turn would leave it set.
_stance = threading.RLock()


def send(on: bool) -> None:
    """Say that the gradient of some examples alone is being sent down a graph, or is no longer."""
    _thread.sending = on


def sending() -> bool:
    """Is such a gradient on its way? It is nothing to learn from."""
    return getattr(_thread, "sending", False)


@contextmanager
def own_run() -> Iterator[None]:
    """For a forward that a source makes itself: no source learns from it."""
    before, _thread.running = running(), True
    try:
        yield
    finally:
        _thread.running = before


def eagerly(function: Callable[[], T]) -> T:
    """An own run of a model that may be compiled: for a batch of another size it would be compiled again."""
    stance = getattr(torch.compiler, "set_stance", None)  # from torch 2.6 on

    def run() -> T:
        # A checkpoint around the model counts the tensors that its forward saves: these are not among them.
        with own_run(), saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
            if stance is None:
                return function()
            with _stance, stance("force_eager"):
                return function()

    # A stance may not change where compiled code has called us.
    result: T = torch.compiler.disable(run)()  # type: ignore[no-untyped-call]
    return result


@cache
def keep_out_of_compiled() -> None:
    """torch.compile calls our hooks as they are. It would trace them, and compile again whenever they remember more."""
    from torch._dynamo import trace_rules  # two seconds, for whoever has made no optimizer yet

    trace_rules.add("ordain")


def is_compiled(model: nn.Module) -> bool:
    """Has compiled code called us, or will the model call some?"""
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)()  # not in torch 2.5
    return callback not in (None, False) or any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )


def running() -> bool:
    """Is a source running the model itself?"""
    return getattr(_thread, "running", False)


class Backwards:
    """Collects what the running backward brings, and hands it to ``finish`` once that backward is complete.

    A backward that raises (an error in it, an interrupt) leaves part of a batch's gradients, which nobody may take for
    a batch: it is forgotten.
    """

    def __init__(self, finish: Callable[[dict[Any, Any]], None], model: nn.Module | None) -> None:
        self._finish, self._model = finish, model
        self._task = -1
        self._counts = False
        self._node: Any = None  # of a parameter that the last backward brought a gradient
        self.accumulate = model is None  # has any backward added to p.grad?
        self.brought: dict[Any, Any] = {}  # by the backward that is running, or that broke off

    def here(self) -> dict[Any, Any] | None:
        """For hooks that a backward calls: what it has brought so far, to be added to.

        None in a backward that trains nothing: one that brings the parameters nothing, and ``torch.autograd.grad``
        for some of them or in a loop that trains by ``backward()``.
        """
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self.brought = task, {}
            self._counts = self._model is None or self._trains(self._model)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        return self.brought if self._counts else None

    def _trains(self, model: nn.Module) -> bool:
        if self._node is not None and _is_reached(self._node):  # asking for a parameter's node takes longer
            return True
        asked = []
        for p in model.parameters():
            if p.requires_grad:
                reached = _is_reached(node := get_gradient_edge(p).node)
                if reached:
                    self._node, self.accumulate = node, True
                    return True
                asked.append(reached is None)
        return not self.accumulate and bool(asked) and all(asked)

    @property
    def under_way(self) -> bool:
        """Is it the running backward that has brought something, rather than one that broke off?"""
        return bool(self.brought) and torch._C._current_graph_task_id() == self._task

    def forget(self) -> None:
        """Drop what a broken backward has left."""
        self._task, self.brought = -1, {}

    def _end(self, task: int) -> None:
        if task == self._task:
            brought = self.brought
            self.forget()
            self._finish(brought)


def _is_reached(node: Any) -> bool | None:
    """Will the backward that is running come to this node? None if ``torch.autograd.grad`` is asked for it."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None
