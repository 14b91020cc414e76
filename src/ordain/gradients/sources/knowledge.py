"""What inspections have shown of a model: where examples lie at each layer, and which parameters no rule explains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ordain.errors import GradientError, UnsupportedModuleError
from ordain.gradients.layout import Layout, layouts
from ordain.gradients.sources.graph import Graph, Plan, Sightings
from ordain.gradients.sources.hooks import Pass
from ordain.gradients.sources.inspection import Inspection

_MOST_PLANS = 256  # a model whose graph is another one in every batch must not fill the memory
_TRIES = 32  # batches in which a layer may have no gradient before that counts as its habit


class UnseenError(GradientError):
    """A layer has a gradient, and nothing has shown where its examples lie."""


class Knowledge:
    """Of one model, from its passes so far.

    Args:
        paths: the watched modules and their names.
        owned: the parameters that each of them answers for.
        params: all of them.
        batch_dim: the batch dimension of the model's inputs.
        blind: whether the model cannot be inspected at all.

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
        blind: bool,
    ) -> None:
        self._paths, self._owned, self._params = paths, owned, params
        self._batch_dim, self._blind = batch_dim, blind
        self.by_graph: dict[Tensor, str] = {}
        self._layouts: dict[tuple[nn.Module, int], dict[int, Layout]] = {}  # of each call's outputs, as was seen
        self._folded: set[Any] = set()  # those of them that were seen with several rows an example
        self._may_rearrange = False  # has a graph had nodes that may put examples in another order?
        self._plans: dict[tuple[Any, ...], Plan] = {}  # by the structure of the graph
        # Where examples may lie at its nodes: gradients that happen to be sparse agree with wrong layouts as well.
        self._possible: dict[tuple[Any, ...], dict[tuple[Any, int], list[Layout]]] = {}
        self._understood: set[tuple[Any, ...]] = set()  # what has been inspected, by its signature
        self._tries: Counter[tuple[Any, ...]] = Counter()

    def take_from_graph(self, module: nn.Module, reason: str) -> None:
        """No rule explains the parameters of ``module``."""
        for p in self._owned[module]:
            self.by_graph.setdefault(p, reason)

    def understands(self, record: Pass) -> bool:
        """Has a pass like this one been inspected, and do the layouts that were seen fit this one?"""
        for call, shapes in record.shapes.items():
            for leaf, way in self._layouts.get(call, {}).items():
                shape = shapes.get(leaf)
                if shape is None:
                    continue
                # With one row an example, runs of rows and interleaved rows look the same.
                if not way.fits(shape, record.size):
                    return False
                if shape[way.axis] > record.size > 1 and (call, leaf) not in self._folded:
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
        plan = None if record.own_layouts or not self._plans else self._plans.get(graph.structure)
        return plan if plan is not None and plan.fits(graph, record.size) else None

    def layout(self, record: Pass, module: nn.Module, call: int, leaf: int, grad: Tensor) -> Layout | None:
        """Where the examples lie in an output of a call: as was seen or else, of what a user sees, as is likeliest."""
        known = (self._layouts if record.layouts is None else record.layouts).get((module, call), {})
        if leaf in known:
            return known[leaf]
        likely = layouts(grad.shape, record.size, self._batch_dim) if leaf >= 0 else []
        if record.size > 1 and len(likely) > 1 and not self._blind and bool(grad.any()):
            self._refuse_guess(record, module, likely[0], grad)
        return next(iter(likely), None)

    def _refuse_guess(self, record: Pass, module: nn.Module, likely: Layout, grad: Tensor) -> None:
        """No inspection has shown where the examples lie: what is likeliest may be wrong."""
        inspection, path, shape = record.inspection, self._paths[module], tuple(grad.shape)
        finite = bool(grad.isfinite().all())  # what is not shows nothing, and is set aside in any case
        if inspection is None or not inspection.thorough or not finite:
            self._understood.discard(self._signature(record))
            self._tries[self._signature(record)] = 0
            raise UnseenError(
                f"a gradient at {path!r}, which had none when the model was inspected" if finite else "",
                expected="a pass that is inspected",
                remedy="The examples of this batch are set aside; the next pass is inspected.",
            )
        if inspection.blind and (likely.axis, grad.shape[likely.axis]) == (self._batch_dim, record.size):
            return  # compiled or reentrant parts cannot be inspected: the usual dimension it is
        raise UnsupportedModuleError(
            f"an output of {path!r} of shape {shape} in a batch of {record.size}, whose examples cannot be told apart",
            expected="a gradient that flows through the model's outputs, and outputs with rows for each example",
            remedy="Return everything that the loss is computed from, for all positions ([B, T, ...]), not only some; "
            f"or leave the layer out with params=lambda name: not name.startswith({path + '.'!r}).",
        )

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
            shape = tuple(record.shapes[key].get(leaf, ()))
            moved = bool(possible) and leaf in known and known[leaf] not in possible
            if moved and shape[known[leaf].axis] > record.size and (key, leaf) not in self._folded:
                known[leaf], moved = possible[0], False
            if not possible or moved:
                problem = "lie elsewhere than in an earlier batch" if possible else "cannot be told apart"
                known.pop(leaf, None)
                self.take_from_graph(
                    key[0], f"examples {problem} in the output of {self._paths[key[0]]!r}, of shape {shape}"
                )
                continue
            known.setdefault(leaf, possible[0])
            if shape[known[leaf].axis] > record.size:
                self._folded.add((key, leaf))
        return {key for key, _ in sightings.seen} == record.shapes.keys()

    def conclude(self, record: Pass, inspection: Inspection, *, seen: bool) -> None:
        """Plan how to take from the graph what no rule explains; the next pass like this one need not be inspected."""
        certain = True
        if self.by_graph and record.size > 1:
            structure, sightings = inspection.graph.structure, inspection.sightings
            if not record.own_layouts:
                sightings.narrow(self._possible.get(structure, {}))
            plan = inspection.follow(list(self.by_graph))
            certain = plan.certain
            if not record.own_layouts:
                if len(self._possible) == _MOST_PLANS:
                    self._possible.clear()
                    self._plans.clear()
                self._possible.setdefault(structure, {}).update(sightings.possible)
                if certain:
                    self._plans[structure] = plan
        signature = self._signature(record)
        self._tries[signature] += 1
        seen &= all(any(bool(one[p].any()) for one in inspection.found if p in one) for p in inspection.graph.sinks)
        if (seen and certain) or self._tries[signature] >= _TRIES:
            self._understood.add(signature)
