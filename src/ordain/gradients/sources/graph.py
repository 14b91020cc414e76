"""The autograd graph of a forward, and which part of it lies between the batch and parameters that no rule explains.

A position table that all examples share, a weight that is computed from others or used by a function, an expert that
gets some of the tokens: between such a parameter and the batch lies a small part of the graph. Where that part meets
the batch, the gradient is still one example's beside another's: see ``graph_rows.py`` for what is done from there on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ordain.gradients.layout import Layout, layouts

Node = Any  # torch.autograd.graph.Node, with attributes that only the C++ classes behind it have


# Operations that may put the rows of a batch in another order, or pick some of them.
_REARRANGING = frozenset(
    f"{name}Backward{number}"
    for name in (
        *(f"Index{kind}" for kind in ("", "Select", "Put", "PutImpl", "Add", "Copy")),
        *("Gather", "Take", "TakeAlongDim", "Scatter", "ScatterAdd", "ScatterReduce", "MaskedSelect", "MaskedScatter"),
        *("Flip", "Roll", "Sort", "Topk", "PackPaddedSequence", "Stack", "Cat"),
    )
    for number in (0, 1)
)


class Graph:
    """The nodes of one forward, by number, without a reference to any of them: a node's hook must not keep it alive.

    Attributes:
        names: of the nodes.
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
        self.children = tuple(tuple((self.nodes.get(child, -1), number) for child, number in edges) for edges in below)
        self.may_rearrange = not _REARRANGING.isdisjoint(self.names)
        self.sinks = {p: self.nodes[node] for node, p in sinks.items() if node in self.nodes}

    @property
    def structure(self) -> tuple[Any, ...]:
        """What tells it from the graphs of other forwards, whatever the shapes in it."""
        return self.names, self.children, tuple(self.sinks.values())

    def rearranges(self, size: int) -> bool:
        """May this forward have put its ``size`` examples in another order, one that another forward does not have?"""
        risky = [node for node, name in zip(self.nodes, self.names, strict=True) if name in _REARRANGING]
        return any(not is_view_of_parameter(node) and not _keeps_order(node, size) for node in risky)

    def shapes(self) -> list[list[tuple[int, ...]]]:
        """Of the outputs of each node."""
        return [[tuple(one.shape) for one in getattr(node, "_input_metadata")] for node in self.nodes]  # noqa: B009

    def parents(self) -> dict[int, list[int]]:
        """The nodes that each of them is an input of."""
        found: dict[int, list[int]] = {}
        for number, edges in enumerate(self.children):
            for child, _ in edges:
                found.setdefault(child, []).append(number)
        return found

    def above_sinks(self) -> list[Node]:
        """The nodes that a backward to the parameters goes through."""
        parents, todo = self.parents(), list(self.sinks.values())
        found = set(todo)
        while todo:
            further = [parent for parent in parents.get(todo.pop(), ()) if parent not in found]
            found.update(further)
            todo.extend(further)
        return [node for node, number in self.nodes.items() if number in found]

    def release(self) -> None:
        """Forget the nodes; their numbers stay."""
        self.nodes = {}


def shape_at(node: Node, output: int) -> tuple[int, ...]:
    """Of a node's output."""
    return tuple(getattr(node, "_input_metadata")[output].shape)  # noqa: B009


def is_view_of_parameter(node: Node) -> bool:
    """Whether nothing but one parameter lies below, and no ids that look up a part of it."""
    while node is not None and len(node.next_functions) == 1:
        if node.name().startswith("Embedding"):
            return False
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
        kinds: of the shapes of those outputs.
    """

    border: dict[int, dict[int, Layout]] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    certain: bool = True
    kinds: dict[tuple[int, int], tuple[int, bool] | None] = field(default_factory=dict)

    def fits(self, graph: Graph, size: int) -> bool:
        """Does it hold for a graph of the same structure, with shapes of its own?"""
        nodes = list(graph.nodes)
        return all(
            self.kinds[number, output] == _kind(shape_at(nodes[number], output), way, size)
            for number, ways in self.border.items()
            for output, way in ways.items()
        )


def _kind(shape: Sequence[int], way: Layout, size: int) -> tuple[int, bool] | None:
    """In how many dimensions, and has each example several rows? None if the layout does not fit."""
    return (len(shape), shape[way.axis] > size) if way.fits(shape, size) else None


class Sightings:
    """Which layouts of a node's outputs agree with the gradients of some examples alone that came by."""

    def __init__(self, size: int, batch_dim: int) -> None:
        self._size, self._batch_dim = size, batch_dim
        self.possible: dict[tuple[Any, int], list[Layout]] = {}  # by anything hashable, and output number
        self.seen: set[tuple[Any, int]] = set()
        self.shapes: dict[tuple[Any, int], Sequence[int]] = {}
        self._others: dict[tuple[int, bool], Tensor] = {}  # rows, of the examples that were chosen last
        self._chosen: Tensor | None = None

    def see(self, key: Any, number: int, grad: Tensor, chosen: Tensor) -> None:
        """The gradient at output ``number`` when only the chosen examples have one."""
        name = key, number
        if name not in self.possible:
            self.shapes[name], self.possible[name] = grad.shape, layouts(grad.shape, self._size, self._batch_dim)
        sizes = grad.detach().abs()
        largest = float(sizes.max()) if grad.numel() else 0.0
        if 0.0 < largest < float("inf"):
            self.seen.add(name)
            ways = [(way, self._rows_of_others(way, sizes.shape[way.axis], chosen)) for way in self.possible[name]]
            self.possible[name] = [way for way, others in ways if way.separates(sizes, largest, others)]

    def _rows_of_others(self, way: Layout, length: int, chosen: Tensor) -> Tensor:
        """The same for all nodes that have as many rows: there may be thousands."""
        if chosen is not self._chosen:
            self._chosen, self._others = chosen, {}
        key = length, way.interleaved
        if key not in self._others:
            self._others[key] = way.others(chosen, length)
        return self._others[key]

    def narrow(self, earlier: Mapping[tuple[Any, int], Sequence[Layout]]) -> None:
        """Leave out layouts that an earlier graph of the same structure has shown to be wrong."""
        for name in self.possible.keys() & earlier.keys():
            self.possible[name] = [way for way in self.possible[name] if way in earlier[name]]

    def layout(self, key: Any, number: int) -> Layout | None:
        """The likeliest layout that is left; None if there is none."""
        return next(iter(self.possible.get((key, number), ())), None)


def make_plan(graph: Graph, sightings: Sightings, params: Sequence[Tensor], size: int) -> Plan:
    """From the parameters up to the first nodes at whose outputs ``size`` examples lie side by side."""
    plan, parents = Plan(), graph.parents()
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
                for output, way in found.items():
                    plan.kinds[parent, output] = _kind(sightings.shapes[parent, output], way, size)
            else:
                plan.inside.add(parent)
                todo.append(parent)
    return plan
