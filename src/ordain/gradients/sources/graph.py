"""Per-example gradients out of the autograd graph itself, for parameters that no layer rule explains.

A position table that all examples share, a weight that is computed from others or used by a function, an expert that
gets some of the tokens: between such a parameter and the batch lies a small part of the graph. Where that part meets
the batch, the gradient is still one example's beside another's. From there on down, one gradient for each example is
sent through the graph's own nodes, with the values that they saved in the forward. The graph is not changed, and
nothing is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ordain.gradients.layout import Layout, layouts
from ordain.gradients.memory import chunk_numbers
from ordain.gradients.sources.saved_tensors import has_unpack_hooks, in_own_backward

Node = Any  # torch.autograd.graph.Node, with attributes that only the C++ classes behind it have


# Operations that may put the rows of a batch in another order, or pick some of them.
_REARRANGING = frozenset(
    f"{name}Backward{number}"
    for name in (
        *(
            "Index",
            "IndexSelect",
            "IndexPut",
            "IndexPutImpl",
            "IndexAdd",
            "IndexCopy",
            "Gather",
            "Take",
            "TakeAlongDim",
        ),
        *("Scatter", "ScatterAdd", "ScatterReduce", "MaskedSelect", "MaskedScatter", "Flip", "Roll", "Sort", "Topk"),
        *("PackPaddedSequence", "Stack", "Cat"),
    )
    for number in (0, 1)
)


class Graph:
    """The nodes of one forward, by number, without a reference to any of them: a node's hook must not keep it alive.

    Attributes:
        names: of the nodes, which tell one structure of the graph from another.
        may_rearrange: whether any node may put examples in another order.
        children: of each node, (number, output number) for each of its inputs; (-1, 0) for an input without gradient.
        sinks: the number of each parameter's node.
    """

    def __init__(self, roots: Sequence[Node], sinks: dict[Node, Tensor]) -> None:
        self.nodes: dict[Node, int] = {}
        todo = list(reversed(roots))
        below = []
        while todo:
            node = todo.pop()
            if node not in self.nodes:
                self.nodes[node] = len(self.nodes)
                below.append(node.next_functions)
                todo.extend(child for child, _ in reversed(below[-1]) if child is not None)
        self.names = tuple(node.name() for node in self.nodes)
        self.children = [[(self.nodes.get(child, -1), number) for child, number in edges] for edges in below]
        self.may_rearrange = not _REARRANGING.isdisjoint(self.names)
        self.sinks = {p: self.nodes[node] for node, p in sinks.items() if node in self.nodes}

    def rearranges(self, size: int) -> bool:
        """May this forward have put its ``size`` examples in another order, one that another forward does not have?"""
        risky = [node for node, name in zip(self.nodes, self.names, strict=True) if name in _REARRANGING]
        return any(not is_view_of_parameter(node) and not _keeps_order(node, size) for node in risky)

    def shapes(self) -> list[list[tuple[int, ...]]]:
        """Of the outputs of each node."""
        return [[tuple(one.shape) for one in getattr(node, "_input_metadata")] for node in self.nodes]  # noqa: B009

    def release(self) -> None:
        """Forget the nodes; their numbers stay."""
        self.nodes = {}


def shape_at(node: Node, output: int) -> tuple[int, ...]:
    """Of a node's output."""
    return tuple(getattr(node, "_input_metadata")[output].shape)  # noqa: B009


def is_view_of_parameter(node: Node) -> bool:
    """Whether nothing but one parameter lies below."""
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is None or not node.next_functions


def _keeps_order(node: Node, size: int) -> bool:
    """Whether a rearranging node leaves all dimensions alone in which ``size`` examples may lie."""
    if node.name() in ("StackBackward0", "CatBackward0"):  # of the examples themselves, if they are not in the pieces
        pieces = [shape_at(child, number) for child, number in node.next_functions if child is not None]
        return all(any(n and n % size == 0 for n in piece) for piece in pieces)
    child, number = node.next_functions[0]
    if child is None:
        return True
    shape = shape_at(child, number)
    touched = getattr(node, "_saved_indices", None)
    if touched is None:
        dims = getattr(node, "_saved_dims", None) or [getattr(node, "_saved_dim", None)]
        touched = [None] * len(shape)
        for dim in dims:
            if dim is None or not shape:
                return False
            dim = dim - 2**64 if dim >= 2**63 else dim
            touched[dim % len(shape)] = getattr(node, "_saved_index", ())
    in_order = [_in_order(index) for index in touched]
    if any(in_order[i] and touched[i] is not None and shape[i] == size for i in range(len(touched))):
        return True  # each example is asked for something of its own
    return all(in_order[i] or shape[i] % size for i in range(len(touched)))


def _in_order(index: Any) -> bool:
    """Does an index ask for all rows, in order?"""
    if not isinstance(index, Tensor) or index.dtype is torch.bool:
        return index is None
    flat = index.detach().reshape(-1)
    return bool(torch.equal(flat, torch.arange(len(flat), device=flat.device, dtype=flat.dtype)))


@dataclass
class Plan:
    """Which nodes one gradient an example is sent through.

    Attributes:
        border: those where the batch is met, and where the examples lie in each of their outputs.
        inside: those below, down to the parameters' own.
        certain: whether gradients have shown all of it.
    """

    border: dict[int, dict[int, Layout]] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    certain: bool = True


class Sightings:
    """Which layouts of a node's outputs agree with the gradients of some examples alone that came by."""

    def __init__(self, size: int, batch_dim: int) -> None:
        self._size, self._batch_dim = size, batch_dim
        self.possible: dict[tuple[Any, int], list[Layout]] = {}  # by anything hashable, and output number
        self.seen: set[tuple[Any, int]] = set()

    def see(self, key: Any, number: int, grad: Tensor, chosen: Tensor) -> None:
        """The gradient at output ``number`` when only the chosen examples have one."""
        name = key, number
        if name not in self.possible:
            self.possible[name] = layouts(grad.shape, self._size, self._batch_dim)
        largest = float(grad.detach().abs().max()) if grad.numel() else 0.0
        if 0.0 < largest < float("inf"):
            self.seen.add(name)
            self.possible[name] = [way for way in self.possible[name] if way.separates(grad, chosen)]

    def layout(self, key: Any, number: int) -> Layout | None:
        """The likeliest layout that is left; None if there is none."""
        return next(iter(self.possible.get((key, number), ())), None)


def make_plan(graph: Graph, sightings: Sightings, params: Sequence[Tensor]) -> Plan:
    """From the parameters up to the first nodes at whose outputs examples lie side by side."""
    parents: dict[int, list[int]] = {}
    for number, edges in enumerate(graph.children):
        for child, _ in edges:
            parents.setdefault(child, []).append(number)
    plan = Plan()
    todo = [graph.sinks[p] for p in params if p in graph.sinks]
    plan.inside.update(todo)
    while todo:
        for parent in parents.get(todo.pop(), ()):
            if parent in plan.border or parent in plan.inside:
                continue
            outputs = [number for key, number in sightings.possible if key == parent]
            ways = {number: sightings.layout(parent, number) for number in outputs}
            plan.certain &= bool(outputs) and all((parent, number) in sightings.seen for number in outputs)
            found = {number: way for number, way in ways.items() if way is not None}
            if outputs and len(found) == len(outputs):
                plan.border[parent] = found
            else:
                plan.inside.add(parent)
                todo.append(parent)
    return plan


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

    warn = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled")  # noqa: B009
    warn(False)  # it would say that it loops
    try:
        outs = _unpacking(node, lambda: vmap(tensors)(rows))
    except (RuntimeError, ValueError):
        each = [_unpacking(node, partial(tensors, [row[i] for row in rows])) for i in range(len(rows[0]))]
        outs = [torch.stack(several) for several in zip(*each, strict=True)]
    finally:
        warn(True)
    found: list[Tensor | None] = [None] * places.pop()
    for place, out in zip(places, outs, strict=True):
        found[place] = out
    return found


def _summed_to(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``[B, *]`` to ``[B, *shape]``: what broadcasting repeated is added up."""
    extra = rows.ndim - 1 - len(shape)
    if extra > 0:
        rows = rows.sum(dim=tuple(range(1, 1 + extra)))
    repeated = [i + 1 for i, n in enumerate(shape) if n == 1 and rows.shape[i + 1] != 1]
    return rows.sum(dim=repeated, keepdim=True) if repeated else rows
