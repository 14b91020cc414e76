"""How a model's gradients will be computed, and what will be refused, before training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ordain.errors import InputError, OrdainError
from ordain.gradients.layout import tensors_in
from ordain.gradients.protocol import Source
from ordain.gradients.rules import rule_for, watch_for
from ordain.gradients.sources import SOURCES, ExactSource, source_name
from ordain.gradients.sources.model_checks import problems
from ordain.gradients.sources.selection import HEAD, Selection, choose, plain, selection

__all__ = ["Row", "Validation", "validate"]

_RULE, _GRAPH = "exact, by a rule for the layer", "exact, from the graph: slower"
_OTHERS = {
    "func": "by torch.func, which runs the model again",
    "microbatch": "one for each unit of group= examples",
    "": "by the source given",
}


@dataclass(frozen=True)
class Row:
    """Modules of one kind; or, of an example batch, one parameter and its shape."""

    name: str
    kind: str
    how: str


@dataclass(frozen=True)
class Validation:
    """What :func:`validate` found. ``print()`` shows it as a table.

    Attributes:
        rows: how the gradients are computed.
        problems: what will be refused, and what to write instead; empty if there is nothing.
    """

    rows: list[Row]
    problems: list[str]

    def __str__(self) -> str:
        lines = [("module", "kind", "gradients"), *((row.name, row.kind, row.how) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(2)]
        table = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in lines]
        return "\n".join([*table, *(f"problem: {problem}" for problem in self.problems)])


def validate(
    model: nn.Module,
    *,
    params: Any = None,
    gradients: str | Callable[..., Source] = "exact",
    inputs: Any = None,
) -> Validation:
    """Report how an order will compute per-example gradients of ``model``, and what it will refuse.

    Args:
        model: the model, which is not changed.
        params: as in :class:`~ordain.Order`.
        gradients: as in :class:`~ordain.Order`.
        inputs: an example batch: a tensor, a tuple of positional or a dict of keyword arguments. A copy of the model
            then runs forward and backward on it, and the rows report on each parameter.

    >>> print(validate(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))))
    module        kind    gradients
    0 and 1 more  Linear  exact, by a rule for the layer
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"a model of type {type(model).__name__}", expected="a torch.nn.Module", remedy="Write validate(model)."
        )
    model = model.module if isinstance(model, DistributedDataParallel) else model
    name, params = source_name(gradients), selection(model, params)
    chosen = choose(model, params)
    found = problems(model, name, params)
    modules = dict(model.named_modules())
    refused = {path: type(modules[path]).__name__ for path, _, _ in found}
    messages = {refused[path]: str(error) for path, error, _ in reversed(found)}  # the first of each kind
    if inputs is not None and not found:
        build = gradients if callable(gradients) else SOURCES[name]
        return _tried(copy.deepcopy(model), build, name, params, inputs)
    rows: dict[tuple[str, str], list[str]] = {}
    left = set(chosen.values())
    for path, module in modules.items():
        own = left & set(module.parameters(recurse=watch_for(module) is not None))  # such a rule answers for submodules
        left -= own
        if own:
            how = _OTHERS.get(name) or (_GRAPH if rule_for(module) is None else _RULE)
            rows.setdefault((type(module).__name__, "refused" if path in refused else how), []).append(path)
    several = {key: f" and {len(paths) - 1} more" if len(paths) > 1 else "" for key, paths in rows.items()}
    return Validation(
        [Row(f"{paths[0]}{several[kind, how]}", kind, how) for (kind, how), paths in rows.items()],
        list(messages.values()),
    )


def _tried(model: nn.Module, build: Callable[..., Source], name: str, params: Selection, inputs: Any) -> Validation:
    """One forward and backward of ``model``, a copy, with the sum of its squared outputs for a loss."""
    model.training = True  # passes of a model in eval() mode do not count; its layers stay as they are
    model.zero_grad()
    source = build(model, params=params, loss_reduction="sum")
    failed: list[str] = []
    with torch.random.fork_rng(devices=[]):
        try:
            args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
            output = model(*args, **kwargs) if isinstance(args, tuple) else model(args)
            leaves = [leaf for leaf in tensors_in(output) if leaf.requires_grad]
            torch.autograd.backward([leaf.square().sum() for leaf in leaves])
            source.collect()
        except OrdainError as error:
            failed.append(str(error))
    by_graph = source.from_graph if isinstance(source, ExactSource) else {}
    rows = []
    by = {name.rpartition(" [")[0] for name in source.parameters}
    for path, p in choose(model, params).items():
        if params == HEAD and plain(path) not in by:
            continue
        how = _OTHERS.get(name) or (f"{_GRAPH} ({by_graph[path]})" if path in by_graph else _RULE)
        rows.append(Row(path, str(list(p.shape)), how if p.grad is not None else "none in this batch"))
    return Validation(rows, failed)
