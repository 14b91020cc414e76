"""What inspections have shown of a model: where examples lie at each layer, and which parameters no rule explains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ordain.gradients.layout import Layout, layouts
from ordain.gradients.sources.graph import Graph, Plan, Sightings
from ordain.gradients.sources.hooks import Pass
from ordain.gradients.sources.inspection import Inspection

_TRIES = 32  # batches in which a layer may have no gradient before that counts as its habit


class Knowledge:
    """Of one model, from its passes so far.

    Args:
        paths: the watched modules and their names.
        owned: the parameters that each of them answers for.
        params: all of them.
        batch_dim: the batch dimension of the model's inputs.

    Attributes:
        by_graph: the parameters to be taken from the graph, and why.
    """

    def __init__(
        self,
        paths: Mapping[nn.Module, str],
        owned: Mapping[nn.Module, Sequence[Tensor]],
        params: Sequence[Tensor],
        *,
        batch_dim: int,
    ) -> None:
        self._paths, self._owned, self._params, self._batch_dim = paths, owned, params, batch_dim
        self.by_graph: dict[Tensor, str] = {}
        self._layouts: dict[tuple[nn.Module, int], dict[int, Layout]] = {}  # of each call's outputs, as was seen
        self._may_rearrange = False  # has a graph had nodes that may put examples in another order?
        self._plans: dict[tuple[str, ...], Plan] = {}  # by the structure of the graph
        self._understood: set[tuple[Any, ...]] = set()  # what has been inspected, by its signature
        self._tries: Counter[tuple[Any, ...]] = Counter()

    def take_from_graph(self, module: nn.Module, reason: str) -> None:
        """No rule explains the parameters of ``module``."""
        for p in self._owned[module]:
            self.by_graph.setdefault(p, reason)

    def understands(self, record: Pass) -> bool:
        """Has a pass like this one been inspected, and do the layouts that were seen fit this one?"""
        for call, shapes in record.shapes.items():
            known = self._layouts.get(call, {})
            if any(leaf in known and not known[leaf].fits(shape, record.size) for leaf, shape in shapes.items()):
                return False
        return self._signature(record) in self._understood

    def _signature(self, record: Pass) -> tuple[Any, ...]:
        """Which modules were called how often, and which parameters were trainable: what a check was made of."""
        return (record.size > 1, frozenset(record.calls.items()), *(p.requires_grad for p in self._params))

    @property
    def needs_graph(self) -> bool:
        """Is the graph of every pass to be looked at?"""
        return bool(self.by_graph) or self._may_rearrange

    def look_at(self, record: Pass, graph: Graph) -> Plan | None:
        """Note whether the pass may have put its examples in an order of its own; the plan for it, if one is known."""
        self._may_rearrange |= graph.may_rearrange
        record.own_layouts = record.size > 1 and graph.may_rearrange and graph.rearranges(record.size)
        return None if record.own_layouts else self._plans.get(graph.names)

    def layout(self, record: Pass, module: nn.Module, call: int, leaf: int, grad: Tensor) -> Layout | None:
        """Where the examples lie in an output of a call: as was seen or else, of what a user sees, as is likeliest."""
        known = (self._layouts if record.layouts is None else record.layouts).get((module, call), {})
        likely = layouts(grad.shape, record.size, self._batch_dim) if leaf >= 0 else ()
        return known.get(leaf) or next(iter(likely), None)

    def see(self, record: Pass, inspection: Inspection) -> bool:
        """Note where the examples lie in each call's outputs. Has every call had a gradient?"""
        if record.size == 1:
            return True
        sightings = Sightings(record.size, self._batch_dim)
        for chosen, uses in zip(inspection.chosen, inspection.uses, strict=True):
            for (number, module, call), (_, grads) in uses.items():
                if number == record.number:
                    for leaf, grad in grads.items():
                        sightings.see((module, call), leaf, grad, chosen)
        layouts_of = record.layouts = {} if record.own_layouts else self._layouts
        for key, leaf in sightings.seen:
            known, possible = layouts_of.setdefault(key, {}), sightings.possible[key, leaf]
            if not possible or known.get(leaf, possible[0]) not in possible:
                shape = tuple(record.shapes[key].get(leaf, ()))
                problem = "lie elsewhere than in an earlier batch" if possible else "cannot be told apart"
                known.pop(leaf, None)
                self.take_from_graph(
                    key[0], f"examples {problem} in the output of {self._paths[key[0]]!r}, of shape {shape}"
                )
            elif leaf not in known:
                known[leaf] = possible[0]
        return {key for key, _ in sightings.seen} == record.shapes.keys()

    def conclude(self, record: Pass, inspection: Inspection, *, seen: bool) -> None:
        """Plan how to take from the graph what no rule explains; the next pass like this one need not be inspected."""
        certain = True
        if self.by_graph and record.size > 1:
            plan = inspection.follow(list(self.by_graph))
            certain = plan.certain
            if certain and not record.own_layouts:
                self._plans[inspection.graph.names] = plan
        signature = self._signature(record)
        self._tries[signature] += 1
        seen &= all(any(bool(one[p].any()) for one in inspection.found if p in one) for p in inspection.graph.sinks)
        if (seen and certain) or self._tries[signature] >= _TRIES:
            self._understood.add(signature)
