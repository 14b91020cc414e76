"""Per-example gradients out of the autograd graph itself, for parameters that no layer rule explains.

From where the graph meets the batch on down, one gradient for each example is sent through the graph's own nodes, with
the values that they saved in the forward. The graph is not changed, and nothing is run again but checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ordain.gradients.layout import Layout
from ordain.gradients.memory import chunk_numbers
from ordain.gradients.sources.graph import Graph, Node, Plan, shape_at
from ordain.gradients.sources.saved_tensors import COMPILED, has_unpack_hooks, in_own_backward

# By kind of node: is a vmapped backward what a loop gives? Torch's own of cdist, for one, is not.
_vmap_agrees: dict[str, bool] = {COMPILED: False}


class Rows:
    """Sends one gradient for each example through the nodes of a plan, while a backward runs.

    Args:
        graph: of the forward.
        plan: which nodes to go through.
        size: B.
        again: makes a context in which checkpoints may run parts of the model again.
    """

    def __init__(
        self, graph: Graph, plan: Plan, size: int, again: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.plan, self._graph, self._size, self._again = plan, graph, size, again
        self._waiting: dict[int, dict[int, Tensor]] = {}

    def reset(self) -> None:
        """A backward through the graph begins."""
        self._waiting = {}

    def arrive(self, number: int, grads: Sequence[Tensor | None]) -> None:
        """For a hook of node ``number``: the gradients that a backward brings to its outputs."""
        node: Node = torch._C._current_autograd_node()
        plan, edges = self.plan, self._graph.children[number]
        wanted = [place for place, (child, _) in enumerate(edges) if child in plan.inside]
        if not wanted:
            return  # a parameter's own node, whose backward would add to its gradient
        if number not in plan.border and number not in self._waiting:
            return  # nothing of the examples came this way
        found: Sequence[Tensor | None] | dict[int, Tensor | None]
        with self._again() if has_unpack_hooks(node) else nullcontext():
            if number in plan.border:
                found = _at_border(node, grads, plan.border[number], wanted, self._size)
            else:
                found = _inside(node, self._waiting.pop(number), len(grads))
        for place in wanted:
            each = found[place]
            if each is not None:
                child, output = edges[place]
                rows = self._waiting.setdefault(child, {})
                each = _summed_to(each, _shape(node, place))
                rows[output] = rows[output] + each if output in rows else each

    def of(self, p: Tensor) -> Tensor | None:
        """``[B, *shape]``, or None if no gradient came to it."""
        return self._waiting.get(self._graph.sinks.get(p, -1), {}).get(0)


def _shape(node: Node, place: int) -> tuple[int, ...]:
    """Of the tensor that was input ``place`` of a node."""
    child, number = node.next_functions[place]
    return shape_at(child, number)


def _called(node: Node, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """A node's backward, without hooks. Unpacks what it saved: see :func:`_unpacking`."""
    found = node(*grads) if callable(node) else node.apply(*grads)
    return [found] if found is None or isinstance(found, Tensor) else list(found)


def _inside(node: Node, rows: dict[int, Tensor], outputs: int) -> list[Tensor | None]:
    """The node's backward of ``[B, *]`` at its outputs, one example at a time."""

    def one(grads: list[Tensor]) -> list[Tensor | None]:
        given = dict(zip(rows, grads, strict=True))
        return _called(node, [given.get(number) for number in range(outputs)])

    return _for_each(node, one, list(rows.values()))


def _at_border(
    node: Node, grads: Sequence[Tensor | None], ways: dict[int, Layout], wanted: list[int], size: int
) -> dict[int, Tensor | None]:
    """``[B, *]`` for each wanted input of a node whose outputs have the examples side by side."""
    name, first = node.name(), grads[0]
    way = ways.get(0)
    if first is not None and way is not None and len(grads) == 1:
        if name in ("MmBackward0", "AddmmBackward0") and way.axis == 0:
            weight = 1 if name == "MmBackward0" else 2
            saved = "_saved_self" if name == "MmBackward0" else "_saved_mat1"
            inputs = _unpacking(node, partial(getattr, node, saved))
            if inputs is not None and set(wanted) <= {weight, weight - 2} and _unscaled(node):
                a, b = way.split(inputs, size), way.split(first, size)
                return {0: b, weight: torch.einsum("bti,bto->bio", a, b)}
        if name == "ExpandBackward0":
            return {0: way.split(first, size)}
        plain = _unpacking(node, partial(_called, node, grads))
        # The backward of an elementwise operation leaves it to the engine to add up what was broadcast.
        full = {place: one for place in wanted if (one := plain[place]) is not None and one.shape == first.shape}
        if len(full) == len(wanted) and all(_shape(node, place) != first.shape for place in wanted):
            return {place: way.split(one, size) for place, one in full.items()}
    given = {number: grad for number, grad in enumerate(grads) if grad is not None and number in ways}
    each = max(1, chunk_numbers() // max(1, sum(grad.numel() for grad in given.values())))
    parts: list[list[Tensor | None]] = []
    for lo in range(0, size, each):
        chosen = torch.eye(size, dtype=torch.bool, device=next(iter(given.values())).device)[lo : lo + each]
        masked = {n: torch.stack([ways[n].keep(grad, one) for one in chosen]) for n, grad in given.items()}
        parts.append(_inside(node, masked, len(grads)))
    return {
        place: None if parts[0][place] is None else torch.cat([part[place] for part in parts])  # type: ignore[misc]
        for place in wanted
    }


def _unscaled(node: Node) -> bool:
    return getattr(node, "_saved_alpha", 1) == 1 and getattr(node, "_saved_beta", 1) == 1


def _unpacking(node: Node, function: Callable[[], Any]) -> Any:
    """``function()``, which unpacks what ``node`` saved, before the backward that is running does so itself.

    A checkpoint hands out what it has computed again once in a backward, therefore in one of its own.
    """
    return in_own_backward(function) if has_unpack_hooks(node) else function()


def _for_each(
    node: Node, function: Callable[[list[Tensor]], list[Tensor | None]], rows: list[Tensor]
) -> list[Tensor | None]:
    """``function`` of each example, which calls ``node`` once: vmapped, or in a loop where torch cannot."""
    places: list[int] = []

    def tensors(grads: list[Tensor]) -> list[Tensor]:
        found = function(grads)
        places[:] = [place for place, one in enumerate(found) if one is not None]
        places.append(len(found))
        return [one for one in found if one is not None]

    outs = _vmapped(node, tensors, rows) if _vmap_agrees.get(node.name(), True) else None
    if outs is None or node.name() not in _vmap_agrees:
        each = [_unpacking(node, partial(tensors, [row[i] for row in rows])) for i in range(len(rows[0]))]
        looped = [torch.stack(several) for several in zip(*each, strict=True)]
        if outs is not None and all(bool(one.isfinite().all()) for one in looped) and any(map(torch.any, looped)):
            _vmap_agrees[node.name()] = all(map(_close, outs, looped))
        outs = looped
    found: list[Tensor | None] = [None] * places.pop()
    for place, out in zip(places, outs, strict=True):
        found[place] = out
    return found


def _vmapped(node: Node, function: Callable[[list[Tensor]], list[Tensor]], rows: list[Tensor]) -> list[Tensor] | None:
    """``function`` vmapped over rows; None where torch cannot."""
    warn = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled")  # noqa: B009
    warn(False)  # it would say that it loops
    try:
        return _unpacking(node, lambda: vmap(function)(rows))  # type: ignore[no-any-return]
    except (RuntimeError, ValueError):
        return None
    finally:
        warn(True)


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and float((one - other).norm()) <= 1e-2 * float(other.norm())


def _summed_to(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``[B, *]`` to ``[B, *shape]``: what broadcasting repeated is added up."""
    extra = rows.ndim - 1 - len(shape)
    if extra > 0:
        rows = rows.sum(dim=tuple(range(1, 1 + extra)))
    repeated = [i + 1 for i, n in enumerate(shape) if n == 1 and rows.shape[i + 1] != 1]
    return rows.sum(dim=repeated, keepdim=True) if repeated else rows
