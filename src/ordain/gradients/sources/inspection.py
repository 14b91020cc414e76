"""The gradient of some of the examples alone, by a backward inside the backward.

When the gradient arrives at the model's output, that of all but some examples is set to zero and sent down the graph
(which the backward that is running has not used up yet). What arrives at a layer's output shows where its examples
lie; what arrives at the parameters is what their rows must add up to. Nothing is run again, so random numbers and
counters of calls do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ordain.gradients.layout import Layout, layouts
from ordain.gradients.sources.backward import sending
from ordain.gradients.sources.graph import Graph, Node, Plan, Sightings, is_view_of_parameter, make_plan, shape_at
from ordain.gradients.sources.graph_rows import Rows
from ordain.gradients.sources.independence import Alone

Edge = tuple[Node, int]
Uses = dict[Any, Any]  # by call


class Inspection:
    """Of one forward pass, by hooks on the nodes of its graph.

    Args:
        graph: of the pass.
        outputs: the nodes of the model's outputs.
        size: B.
        batch_dim: of the model's inputs and outputs.
        chosen: sets of examples, ``[B]`` each, to send the gradient of; none to inspect nothing.
        counts: whether the backward that is running is one to learn from.
        divert: makes the layers' hooks write to the dictionary that it is given; None ends that.
        again: makes a context in which checkpoints may run parts of the model again, and hooks of the user's;
            ``parameters=False`` if these need not be put back, which takes a copy of them.
        alone: runs of some of the examples alone, whose graphs show where the examples lie.
        returned: what the model has returned, if it is still there; ``retain_grad()`` may have been called on it.
        thorough: whether the sets tell every two examples apart.
        inspected: called when the gradients of all sets have been sent down.

    Attributes:
        found: for each set, what arrived at each parameter.
        uses: for each set, what arrived at the layers' outputs.
        failed: why it could not be done; empty if it could.
        rows: one gradient an example of the parameters that layers do not explain.
    """

    def __init__(
        self,
        graph: Graph,
        outputs: Sequence[Edge],
        *,
        size: int,
        batch_dim: int,
        chosen: Sequence[Tensor],
        counts: Callable[[], bool],
        divert: Callable[[Uses | None], None],
        again: Callable[..., AbstractContextManager[Any]],
        alone: Sequence[Alone] = (),
        returned: Sequence[Callable[[], Tensor | None]] = (),
        thorough: bool = False,
        inspected: Callable[[Inspection], None] = lambda _: None,
    ) -> None:
        self.size, self.chosen, self.thorough = size, list(chosen), thorough
        self.found: list[dict[Tensor, Tensor]] = [{} for _ in chosen]
        self.uses: list[Uses] = [{} for _ in chosen]
        self.failed = ""
        self.rows: Rows | None = None
        self.graph = graph
        self.sightings = Sightings(size, batch_dim)
        self._params, self._returned = list(graph.sinks), returned
        if not self._params:
            self.failed = "none of the parameters to order by is part of the graph"
        self._counts, self._divert, self._inspected, self._again = counts, divert, inspected, again
        self._sending: Tensor | None = None  # the examples whose gradient is being sent
        self._from = -1  # the node that it is sent from
        self._covered: set[int] = set()  # outputs that lie below others
        self._ways: dict[tuple[int, int], list[Layout]] = {}  # where examples lie, or may lie, in the outputs
        self._task, self._learns = -1, False  # the backward that is running; does it count?
        self._kept = False  # has a backward through this graph come to its end, and not been collected?
        if chosen:
            for (node, output), ways in _cuts(graph, outputs, size, batch_dim, alone).items():
                number = self.graph.nodes[node]
                self._ways[number, output] = ways
                node.register_prehook(partial(self._at_output, number, output))

    def watch_nodes(self, plan: Plan | None) -> None:
        """See what comes by at all nodes, or at those of a plan that is known."""
        for node, number in self.graph.nodes.items():
            # A parameter's own node, which has none below it, lives on after the pass, and would keep all this alive.
            if node.next_functions and (plan is None or number in plan.border or number in plan.inside):
                node.register_prehook(partial(self._at_node, number))
        if plan is not None:
            self.rows = Rows(self.graph, plan, self.size, partial(self._again, parameters=False))
        self.graph.release()

    @property
    def blind(self) -> bool:
        """Has it shown nothing of any layer?"""
        return bool(self.failed) or not any(self.uses)

    @property
    def complete(self) -> bool:
        """Has the gradient at all of the model's outputs been sent? Not that at outputs that lie below others."""
        return not self._covered

    def follow(self, params: Sequence[Tensor]) -> Plan:
        """From here on send one gradient an example to ``params``, as the sightings suggest."""
        plan = make_plan(self.graph, self.sightings, params, self.size)
        if self.rows is None:
            self.rows = Rows(self.graph, plan, self.size, partial(self._again, parameters=False))
        self.rows.plan = plan
        return plan

    def finish(self, *, complete: bool) -> None:
        """A backward through the graph has come to its end; or what it brought has been collected."""
        self._kept = complete
        if not complete:
            self._clear()

    def _enter(self) -> bool:
        """Whether the backward that is running counts."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._covered, self._learns = task, set(), self._counts()
            if self._learns and not self._kept:
                self._clear()  # what is there is of a backward that broke off
        return self._learns

    def _clear(self) -> None:
        for several in (*self.found, *self.uses):
            several.clear()
        if self.rows is not None:
            self.rows.reset()

    def _at_output(self, number: int, output: int, grads: tuple[Tensor | None, ...]) -> None:
        if self._sending is not None:
            if number != self._from:
                self._covered.add(number)
            return
        if sending() or not self._enter():
            return  # for another order, or for nothing to learn from
        grad = grads[output]
        if grad is None or number in self._covered or self.failed:
            return
        edge, self._from = GradientEdge(torch._C._current_autograd_node(), output), number
        with self._again(), _put_back(self._returned):
            ways = self._ways[number, output]
            ways = ways if len(ways) == 1 else [way for way in ways if self._agrees(edge, way, grad.detach())]
            if len(ways) != 1:
                return  # outputs below this one say more
            for number in range(len(self.chosen)):
                self._send(number, edge, ways[0], grad.detach())
        if not self.failed:
            self._inspected(self)

    def _agrees(self, edge: GradientEdge, way: Layout, grad: Tensor) -> bool:
        """Does the gradient of some examples, if they lie so, come to the same examples where that is certain?"""
        below = self._below(edge.node)
        if not below:
            return False
        edges = [GradientEdge(node, output) for node, output, _ in below]
        sent = partial(torch.autograd.grad, [edge], edges, retain_graph=True, allow_unused=True)
        self._divert({})
        try:
            found = [(chosen, sent([way.keep(grad, chosen)])) for chosen in self.chosen]
        except RuntimeError:
            return False
        finally:
            self._divert(None)
        agree = [
            known.separates(one.abs(), largest, known.others(chosen, one.shape[known.axis]))
            for chosen, several in found
            for one, (_, _, known) in zip(several, below, strict=True)
            if one is not None and one.numel() and (largest := float(one.abs().max()))
        ]
        return bool(agree) and all(agree)

    def _below(self, node: Node) -> list[tuple[Node, int, Layout]]:
        """The outputs below a node in which it is certain where the examples lie."""
        found, seen, todo = [], {self._from}, [(node, self._from)]
        while todo:
            node, number = todo.pop()
            for (child, output), (below, _) in zip(node.next_functions, self.graph.children[number], strict=True):
                if len(self._ways.get((below, output), ())) == 1:
                    found.append((child, output, self._ways[below, output][0]))
                elif child is not None and below not in seen:
                    todo.append((child, below))
                seen.add(below)
        return found

    def _send(self, number: int, edge: GradientEdge, way: Layout, grad: Tensor) -> None:
        """Send the gradient of set ``number`` alone down the graph."""
        if self.failed:
            return
        found, self._sending = self.found[number], self.chosen[number]
        self._divert(self.uses[number])
        try:
            part = [way.keep(grad, self.chosen[number])]
            sent = torch.autograd.grad([edge], self._params, part, retain_graph=True, allow_unused=True)
        except RuntimeError as error:  # reentrant checkpoints and compiled backwards take one backward only
            self.failed = str(error).splitlines()[0]
            return
        finally:
            self._sending = None
            self._divert(None)
        for p, one in zip(self._params, sent, strict=True):
            if one is not None:
                one = one.to_dense() if one.is_sparse else one
                found[p] = found[p] + one if p in found else one

    def _at_node(self, number: int, grads: tuple[Tensor | None, ...]) -> None:
        if self._sending is None:
            if self.rows is not None and not sending() and self._enter():
                with torch.no_grad():
                    self.rows.arrive(number, grads)
            return
        for output, grad in enumerate(grads):
            if grad is not None:
                self.sightings.see(number, output, grad, self._sending)


@contextmanager
def _put_back(returned: Sequence[Callable[[], Tensor | None]]) -> Iterator[None]:
    """What is sent is not added to the ``.grad`` of what the model has returned."""
    retained = [(tensor, tensor.grad) for one in returned if (tensor := one()) is not None and tensor.retains_grad]
    for tensor, _ in retained:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, grad in retained:
            tensor.grad = grad


def undecided(graph: Graph, outputs: Sequence[Edge], size: int, batch_dim: int) -> bool:
    """Is more than one dimension as long as the batch, where shapes are to tell which one has the examples?"""
    return size > 1 and any(shape_at(*edge).count(size) > 1 for edge in _cuts(graph, outputs, size, batch_dim, ()))


def _cuts(
    graph: Graph, outputs: Sequence[Edge], size: int, batch_dim: int, alone: Sequence[Alone]
) -> dict[Edge, list[Layout]]:
    """The first edges, from the model's outputs down, that have the examples in a dimension of their own.

    Also those above them with several rows an example, in one of several layouts, if a parameter is used in between.
    """
    shorter = next((run for run in alone if run.names == graph.names), None)
    found: dict[Edge, list[Layout]] = {}
    seen: set[Edge] = set()
    todo: list[tuple[Edge, Edge | None]] = [(edge, None) for edge in outputs]
    while todo:
        edge, above = todo.pop()
        if edge in seen or edge[0] is None:
            continue
        seen.add(edge)
        node, output = edge
        shape = shape_at(node, output)
        possible = layouts(shape, size, batch_dim)
        ways = [way for way in possible if shape[way.axis] == size]
        if shorter is not None:  # the dimension that got shorter with fewer examples
            other, some = shorter.shapes[graph.nodes[node]][output], int(shorter.chosen.sum())
            ways = [way for way in ways if len(other) == len(shape) and other[way.axis] == some]
        if ways and not is_view_of_parameter(node):
            found[edge] = ways[:1]
            if shorter is None and ways[0].axis != batch_dim and (folded := Layout(batch_dim)) in possible:
                # As many classes as examples, behind several rows an example? What lies below decides.
                found[edge] = [ways[0], folded]
                todo.extend((child, None) for child in node.next_functions)
            continue
        if above is None and possible and not is_view_of_parameter(node):
            above = edge
        elif above is not None and graph.nodes[node] in graph.sinks.values():
            found[above] = [way for way in layouts(shape_at(*above), size, batch_dim) if way.axis == 0]
        todo.extend((child, above) for child in node.next_functions)
    return found
