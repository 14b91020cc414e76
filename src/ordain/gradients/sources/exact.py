"""Exact per-example gradients from an ordinary backward, computed from what hooks kept of each layer.

What stands between a model that this does not understand and a wrong order: in the first batches, and now and then
later, the gradient of some examples alone is sent down the graph (``inspection.py``). It shows where the examples lie
at each layer, and what their rows must add up to. A parameter whose rows do not is taken from the graph itself
(``graph_rows.py``). And the gradients of a whole batch must add up to those that autograd gives to the parameters.
"""

from __future__ import annotations

import logging
import operator
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ordain._context import undisturbed
from ordain.errors import InputError, OrdainError, OrdainWarning, StateError, UnsupportedModuleError
from ordain.gradients.combined import Sum
from ordain.gradients.factored import Factored
from ordain.gradients.layout import batch_size, tensors_in
from ordain.gradients.memory import shrinking
from ordain.gradients.param_grads import Materialized, OuterProduct, ParamGrads, WithBias
from ordain.gradients.protocol import Collected
from ordain.gradients.rules import NoRuleError, Use, rule_for, watch_for
from ordain.gradients.rules.linear import linear
from ordain.gradients.rules.recurrent import cell, recurrent
from ordain.gradients.sources.backward import eagerly, is_compiled
from ordain.gradients.sources.causes import Causes
from ordain.gradients.sources.graph import Graph
from ordain.gradients.sources.hooks import Hooks, Pass
from ordain.gradients.sources.independence import Alone, refuse_mixed, run_alone, untouched
from ordain.gradients.sources.inspection import Inspection, undecided
from ordain.gradients.sources.knowledge import Knowledge, UnseenError
from ordain.gradients.sources.model_checks import check_reduction, mixing_modules, refuse_mixing
from ordain.gradients.sources.saved_tensors import unpacks_only_once
from ordain.gradients.sources.selection import HEAD, Selection, calls_of, choose, described, head_of, places
from ordain.gradients.sources.sharded import is_split
from ordain.gradients.sources.spot_checks import SpotChecks, differing

_log = logging.getLogger("ordain")


class ExactSource:
    """Watch ``model`` and compute per-example gradients from what its layers saw in an ordinary backward.

    Args:
        model: called once for each batch.
        params: which trainable parameters to order by. Of a model that is not ordered by as a whole, what comes before
            those parameters may be anything.
        loss_reduction: how the loss reduces over the examples of a batch, ``"mean"`` or ``"sum"``.
        batch_dim: the batch dimension of the model's inputs.
    """

    name = "exact"
    whole_units = False

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Selection = None,
        loss_reduction: str = "mean",
        batch_dim: int = 0,
    ) -> None:
        self._model, self._batch_dim = model, batch_dim
        self._mean = check_reduction(loss_reduction) == "mean"
        self._whole = params is None
        self._mixing = mixing_modules(model) if self._whole else []
        chosen = choose(model, params)
        self._checks = SpotChecks()
        self._hooks = Hooks(model, chosen.values(), batch_dim=batch_dim, listener=self)
        self._searching = params == HEAD  # until a forward shows which layer comes last
        self._chose_head = self._head_missed = False
        self._order_by(chosen)
        self.attach, self.detach, self.drop = self._hooks.attach, self._hooks.detach, self._hooks.drop
        self.ignore, self.passes_waiting = self._hooks.ignore, self._hooks.passes_waiting
        self.attach()

    def _order_by(self, chosen: Mapping[str, Tensor]) -> None:
        """Lay these parameters out, one after the other, and know nothing yet of the modules that own them."""
        self._offsets = places(chosen)
        self._size = sum(p.numel() for p in self._offsets)
        self.dim = None if self._searching else self._size
        self.parameters = [] if self._searching else described(chosen)
        self._sizes = {offset: p.numel() for p, (offset, _) in self._offsets.items()}
        self._ends = {offset + numel for offset, numel in self._sizes.items()}
        several = self._searching and len({p.dtype for p in chosen.values()}) > 1  # the head will have one of them
        self._dtype = torch.float32 if several else _common_dtype(chosen)
        part = self._hooks.sharded.part
        self._others = {p for one in self._model.parameters() if (p := part(one)) not in self._offsets}  # for now
        self.like = torch.empty(0, dtype=self._dtype, device=next(iter(self._offsets)).device)
        self._split = any(is_split(p) for p in self._offsets)
        self._causes = Causes(self._offsets)
        self._rules = {module: rule for module in self._hooks.paths if (rule := rule_for(module)) is not None}
        self._owned = {  # a rule that watches its module answers for submodules
            module: [p for one in module.parameters(watch_for(module) is not None) if (p := part(one)) in self._offsets]
            for module in self._hooks.paths
        }
        self._layer = self._only_layer()
        self._known = Knowledge(
            self._hooks.paths, self._owned, list(self._offsets), batch_dim=self._batch_dim, blind=self._split
        )
        self._by_graph = self._known.by_graph
        for module, path in self._hooks.paths.items():
            if module not in self._rules:
                self._known.take_from_graph(module, f"{type(module).__name__} at {path!r} has no rule")
        self._hooks.sharded.refuse_reading(self._rules, self._hooks.paths, (recurrent, cell))
        self._hooks.read_again = {
            p: f"weights of {self._hooks.paths[module]!r}, from which its gradients are computed"
            for module, rule in self._rules.items()
            if rule in (recurrent, cell)
            for p in module.parameters(recurse=False)
        }

    def _only_layer(self) -> nn.Module | None:
        """The linear layer that has all the parameters, and no others; None if it takes more."""
        found = [module for module in self._hooks.paths if self._rules.get(module) is linear and not self._split]
        own = [id(p) for module in found for p in module.parameters(recurse=False)]
        return found[0] if len(found) == 1 and own == [id(p) for p in self._offsets] else None

    @property
    def from_graph(self) -> dict[str, str]:
        """The parameters whose gradients no layer's rule explains, by name, and why: they are taken from the graph."""
        return {self._offsets[p][1]: reason for p, reason in self._by_graph.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactSource:
        """It watches one model, whatever is copied."""
        return self

    def collect(self) -> list[Collected]:
        passes, arrived = self._hooks.take()
        self._hooks.check_inputs(passes)
        batches: list[Factored] = [record.result for record in passes]
        if arrived is not None and batches:
            self._refuse_new(self._model.parameters())
            shrinking(partial(self._check_sums, batches, arrived))
        for record in passes:
            record.forget()
        return [Collected(batch, batch.size) for batch in batches]

    # --- for the hooks ----------------------------------------------------------------------------

    def forward_began(self, record: Pass, inputs: Any) -> None:
        """Now and then, run some of the examples alone to see whether the others make a difference."""
        if self._mixing:
            refuse_mixing(self._mixing)
        if self._searching and record.sizes and not self._split and is_compiled(self._model):
            # Where all linear layers are watched, dynamo gives up on the functions that call them, and for good.
            calls, shapes = eagerly(partial(calls_of, self._hooks.paths, self._model, inputs))
            if calls:
                self._take_head(record, calls, batch_size(record.sizes, shapes, self._batch_dim))
        record.due = self._checks.due()
        if record.due and not self._searching:
            self._hooks.ask()
        if not record.sizes or self._split:
            return
        if not self._whole:  # what comes first may mix examples, and is run again only where nothing else tells
            record.inputs = inputs
        elif record.due:
            record.alone = self._run_alone(inputs, batch_size(record.sizes, [], self._batch_dim))

    def _run_alone(self, inputs: Any, size: int) -> list[Alone]:
        """Two halves of the batch, each by itself; none if the model does not take them."""
        if size < 2:
            return []
        (half,) = self._checks.examples(size, device=self.like.device, all_apart=False)
        alone = partial(run_alone, self._model, inputs, batch_dim=self._batch_dim)
        runs = [eagerly(partial(alone, some)) for some in (half, ~half)]
        return [run for run in runs if run is not None]

    def forward_ended(self, record: Pass, output: Any, outputs: list[tuple[Any, int]]) -> None:
        """Decide whether to inspect the backward of this pass, and put hooks on its graph if so."""
        if self._searching and record.shapes:
            self._take_head(record, [(module, shapes) for (module, _), shapes in record.shapes.items()], record.size)
        if not record.calls:
            self._miss_head("does not call", "Such batches have gradients of zero there.")
        alone, record.alone = [run for run in record.alone if len(run.chosen) == record.size], ()
        inputs, record.inputs = record.inputs, None
        try:
            for run in alone:
                refuse_mixed(self._model, output, run)
        except UnsupportedModuleError as error:
            record.result = error
        if not outputs or not record.size or self._split:
            return
        new = self._checks.contiguous or not self._known.understands(record)
        if new:
            self._hooks.ask()
        elif not record.due and not self._known.needs_graph:
            return
        sinks = {get_gradient_edge(p).node: p for p in self._offsets if p.requires_grad}
        graph = Graph([node for node, _ in outputs], sinks)
        if inputs is not None and (record.due or new) and undecided(graph, outputs, record.size, self._batch_dim):
            # Shapes of some examples alone tell. Where ranks normalise together, a forward waits for the others.
            waits = any(isinstance(module, nn.SyncBatchNorm) for module in self._model.modules())
            alone = [] if waits else self._run_alone(inputs, record.size)
        self._causes.look_at(graph, tensors_in(output))
        plan = self._known.look_at(record, graph)
        plan = plan if self._by_graph and not new else None
        new = new or record.own_layouts or (plan is None and bool(self._by_graph))
        if not record.due and not new and not self._by_graph:
            return
        chosen = []
        if record.due or new or record.size == 1:
            if any(map(unpacks_only_once, graph.above_sinks())):
                record.result = self._causes.of_selective_checkpoints()
                return
            chosen = self._checks.examples(record.size, device=self.like.device, all_apart=new)
        record.inspection = Inspection(
            graph,
            outputs,
            size=record.size,
            batch_dim=self._batch_dim,
            chosen=chosen,
            alone=alone,
            thorough=new,
            counts=self._hooks.counts,
            divert=self._hooks.divert,
            inspected=partial(self._try_inspected, record, new=new),
            again=partial(untouched, self._model),
            returned=[weakref.ref(tensor) for tensor in tensors_in(output)],
        )
        if record.size > 1 and (new or plan is not None):
            record.inspection.watch_nodes(plan)
        graph.release()

    def _miss_head(self, what: str, then: str) -> None:
        """Warn once of a pass without a gradient at the head that was found."""
        if self._chose_head and not self._head_missed:
            self._head_missed = True
            paths = ", ".join(repr(path) for path in self._hooks.paths.values())
            warnings.warn(
                OrdainWarning(
                    f"a pass that {what} {paths}, the last linear layer of the first batch. {then} Name what to order "
                    "by with params=, or run forwards that should not count inside order.ignore()."
                ),
                stacklevel=3,
            )

    def _take_head(
        self, record: Pass, calls: Iterable[tuple[nn.Module, Mapping[int, Sequence[int]]]], size: int
    ) -> None:
        head, self._searching, self._chose_head = head_of(self._model, calls, size), False, True
        self._order_by({self._offsets[p][1]: p for p in self._hooks.narrow(head, record)})
        count = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        paths = ", ".join(repr(path) for path in self._hooks.paths.values())
        _log.info("ordering by %s, %s of %s parameters", paths, f"{self._size:,}", f"{count:,}")

    def backward_ended(self, record: Pass) -> None:
        """Take what is needed of the layers now: the optimizer may change the weights before step()."""
        if record.calls and not record.reached and not self._by_graph:
            self._miss_head("brings no gradient to", "An order cannot be learned from gradients of zero.")
        if record.inspection is not None:
            record.inspection.finish(complete=True)
        elif record.result is None and (single := self._one_layer(record)) is not None:
            record.result = single
            return
        try:
            with undisturbed(), torch.no_grad():
                record.result = shrinking(partial(self._factored, record))
        except UnseenError as error:
            if error.came:
                warnings.warn(OrdainWarning(str(error)), stacklevel=2)
            nothing = self.like.new_full((record.size, 1, 1), torch.nan)  # not finite: set aside
            record.result = Factored(
                [(0, Materialized(nothing))], dim=self._size, size=record.size, scale=1.0, like=self.like
            )
        except Exception as error:  # to be raised by step(), not out of the backward
            record.result = error

    # --- what an inspection shows ---------------------------------------------------------------------

    def _try_inspected(self, record: Pass, inspection: Inspection, *, new: bool) -> None:
        try:
            with undisturbed(), torch.no_grad():
                self._inspected(record, inspection, new=new)
        except OrdainError as error:  # to be raised by step(), not out of the backward
            record.result = error

    def _inspected(self, record: Pass, inspection: Inspection, *, new: bool) -> None:
        before, understood = dict(self._by_graph), self._known.understands(record)
        seen = self._known.see(record, inspection)
        if all(number == record.number for uses in inspection.uses for number, _, _ in uses):
            self._compare_layers(record, inspection)  # else other passes of the model lie below this one
        added = [p for p in self._by_graph if p not in before]
        if added and understood and not self._checks.contiguous and not record.own_layouts:
            reason = self._by_graph[added[0]]
            raise self._causes.of_a_row(
                added[0], f"was explained by its layer in earlier batches, and is no longer: {reason}"
            )
        if new:
            self._known.conclude(record, inspection, seen=seen)

    def _compare_layers(self, record: Pass, inspection: Inspection) -> None:
        """What the rules make of the gradients of some examples must be what came to the parameters."""
        for chosen, sent, wanted in zip(inspection.chosen, inspection.uses, inspection.found, strict=True):
            reached: dict[nn.Module, dict[int, Use]] = {}
            for (_, module, call), (use, grads) in sent.items():
                reached.setdefault(module, {})[call] = replace(use, size=record.size, grads=grads)
            found: dict[int, list[ParamGrads]] = {}
            for module, uses in reached.items():
                self._try_rule(record, module, uses, found)
            batch = self._joined(found, record.size)
            for p in differing([batch], [chosen], wanted, self._offsets, **self._how()):
                self._by_graph.setdefault(p, "its gradient is not the sum over the calls of its module")

    def _try_rule(
        self, record: Pass, module: nn.Module, uses: Mapping[int, Use], found: dict[int, list[ParamGrads]]
    ) -> None:
        try:
            self._apply_rule(record, module, uses, found)
        except NoRuleError as error:
            self._known.take_from_graph(module, error.came)
        except OrdainError as error:
            record.result = error

    # --- rows -----------------------------------------------------------------------------------------

    def _factored(self, record: Pass) -> Factored:
        if isinstance(record.result, Exception):
            raise record.result
        if not record.size:
            return Factored([], dim=self._size, size=0, scale=1.0, like=self.like)
        found: dict[int, list[ParamGrads]] = {}  # by offset
        for module, uses in record.reached.items():
            self._apply_rule(record, module, uses, found)
        inspection = record.inspection
        for p, reason in self._by_graph.items():
            if not p.requires_grad:
                continue
            offset = self._offsets[p][0]
            if inspection is None or inspection.failed or (record.size > 1 and inspection.rows is None):
                raise self._causes.of_a_row(p, reason, "" if inspection is None else inspection.failed)
            rows = inspection.found[0].get(p) if record.size == 1 else inspection.rows.of(p)
            if rows is not None:
                found[offset] = [Materialized.of(rows.to(self._dtype).reshape(record.size, *p.shape))]
        batch = self._joined(found, record.size)
        if self._by_graph and inspection is not None and inspection.chosen and inspection.complete:
            given = {p: self._offsets[p] for p in self._by_graph if self._offsets[p][0] in found}
            wrong = differing([batch], [inspection.chosen[0]], inspection.found[0], given, **self._how())
            for p in wrong:
                raise self._causes.of_a_row(p, self._by_graph[p], "nor does the graph explain it")
        return batch

    def _one_layer(self, record: Pass) -> Factored | None:
        """The same in a few lines where one linear layer, called once, is all that is ordered by; None elsewhere."""
        layer, uses = self._layer, None if self._layer is None else record.reached.get(self._layer)
        if layer is None or not uses or record.calls != {layer: 1} or self._by_graph or record.layouts is not None:
            return None
        a, b = uses[0].args[0], uses[0].grads[0]
        plain = a.ndim == b.ndim == 2 and a.dtype is b.dtype is self._dtype and len(a) == len(b) == record.size > 1
        way = self._known.layout(record, layer, 0, 0, b) if plain else None
        own = [p for p in layer._parameters.values() if p is not None]
        same = len(own) == len(self._offsets) and all(map(operator.is_, own, self._offsets))  # not replaced since
        if way != (0, False) or not same or not all(p.requires_grad for p in own):
            return None
        kind = WithBias if len(self._offsets) == 2 else OuterProduct
        scale = float(record.size) if self._mean else 1.0
        placed = [(0, kind(a.unsqueeze(1), b.unsqueeze(1)))]
        return Factored(placed, dim=self._size, size=record.size, scale=scale, like=self.like)

    def _apply_rule(
        self, record: Pass, module: nn.Module, uses: Mapping[int, Use], found: dict[int, list[ParamGrads]]
    ) -> None:
        """Add the gradients that a rule gives for the calls of ``module`` to ``found``, by offset."""
        if module not in self._rules or all(p in self._by_graph for p in self._owned[module]):
            return
        for call, use in uses.items():
            for leaf, grad in use.grads.items():
                way = self._known.layout(record, module, call, leaf, grad)
                if way is not None:
                    use.layouts[leaf] = way
        for names, grads in self._rules[module](module, [uses[call] for call in sorted(uses)]).items():
            places = [self._place(module, name) for name in ((names,) if isinstance(names, str) else names)]
            together = len(places) == 1 or (places[0] >= 0 and places[-1] - places[0] == grads.rows * grads.cols)
            for place, part in zip(places, [grads] if together else grads.apart(), strict=False):
                if place >= 0:
                    found.setdefault(place, []).append(part)

    def _joined(self, found: dict[int, list[ParamGrads]], size: int) -> Factored:
        for offset, several in list(found.items()):  # a weight or bias that other modules use too is not joined
            bias = offset + self._sizes[offset]
            if max(part.numel for part in several) > self._sizes[offset] and (len(several) > 1 or bias in found):
                apart = [part.apart() for part in several]
                found[offset] = [parts[0] for parts in apart]
                found.setdefault(bias, []).extend(parts[1] for parts in apart if len(parts) > 1)
        placed = [(offset, several[0] if len(several) == 1 else Sum(*several)) for offset, several in found.items()]
        for offset, grads in placed:
            if offset + grads.numel not in self._ends or grads.numel < self._sizes[offset]:
                raise self._resized(offset, grads.numel)
        scale = float(size) if self._mean else 1.0
        return Factored(placed, dim=self._size, size=size, scale=scale, like=self.like)

    def _check_sums(self, batches: Sequence[Factored], arrived: Mapping[Tensor, Tensor]) -> None:
        ones = [torch.ones(batch.size, dtype=torch.bool, device=batch.device) for batch in batches]
        for p in differing(batches, ones, arrived, self._offsets, **self._how()):
            raise self._causes.of_a_sum(p, asked=p in arrived, twice=self._hooks.twice)

    def _how(self) -> dict[str, bool]:
        return {"mean": self._mean, "coarse": self._hooks.coarse}

    def _place(self, module: nn.Module, name: str) -> int:
        """The offset of a module's parameter; negative if it takes no part."""
        p = module._parameters.get(name)
        if p is None and "." in name:
            path, _, last = name.rpartition(".")
            p = module.get_submodule(path)._parameters.get(last)
        if p is None:
            return -self._size
        part = self._hooks.sharded.part(p)
        if not part.requires_grad or part in self._by_graph:
            return -self._size
        place = self._offsets.get(part)
        if place is None:
            self._refuse_new([part])
            return -self._size
        return place[0]

    def _resized(self, offset: int, numel: int) -> StateError:
        name = next(name for place, name in self._offsets.values() if place == offset)
        return StateError(
            f"{name!r} with {numel} elements",
            expected=f"{self._sizes[offset]}, as when the order was created",
            remedy="Give the model its final shape first, then create the order.",
        )

    def _refuse_new(self, parameters: Iterable[Tensor]) -> None:
        """Parameters that did not exist when the order was created have no place in its vectors."""
        known = self._offsets.keys() | self._others
        if any(self._hooks.sharded.part(p) not in known for p in parameters):
            raise StateError(
                "a model with parameters that did not exist when the order was created",
                expected="the same parameters, frozen or not",
                remedy="Replace layers, or load weights with assign=True, before creating the order.",
            )


def _common_dtype(params: Mapping[str, Tensor]) -> torch.dtype:
    """Float32, which half precision is taken in too, or float64."""
    double = [name for name, p in params.items() if p.dtype is torch.float64]
    other = next((name for name, p in params.items() if p.dtype is not torch.float64), None)
    if double and other is not None:
        raise InputError(
            f"parameters of torch.float64 ({double[0]!r}) next to {params[other].dtype} ({other!r})",
            expected="one dtype (float16 and bfloat16 may be mixed with float32)",
            remedy="Call .float() or .double() on the model, order by some with params=, or order whole batches: "
            "GraB(model, n, group=batch_size, gradients='microbatch').",
        )
    return torch.float64 if double else torch.float32
