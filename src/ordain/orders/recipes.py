"""Every order by name: what tests, studies and the command line run over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from ordain.balancing import KernelHalving, SelfBalancingWalk
from ordain.errors import InputError
from ordain.orders.grab import GraB
from ordain.orders.oblivious import FlipFlop, RandomReshuffling, ShuffleOnce, WithReplacement
from ordain.orders.offline_herding import Greedy, Herding
from ordain.orders.options import keywords, refuse_unknown
from ordain.orders.order import Order
from ordain.orders.schedule import Always, Every, Schedule, Until
from ordain.orders.stratified import Stratified
from ordain.orders.units import check_n


@dataclass(frozen=True)
class Recipe:
    """How to build an order, and what to call it in tables and figures."""

    name: str
    label: str
    build: Callable[..., Order]  # (model, n, *, seed) -> Order
    is_permutation: bool = True
    needs_labels: bool = False  # build() takes labels=, the class of each example
    learn: Schedule = field(default_factory=Always)  # in which epochs it learns, if it does

    @property
    def call(self) -> str:
        """How to write it in Python; empty for orders that do not learn.

        >>> ORDERS["herding-head"].call, ORDERS["rr"].call
        ("Herding(model, n, params='head', sketch=1024)", '')
        """
        build, options = (self.build.func, self.build.keywords) if isinstance(self.build, partial) else (self.build, {})
        words = ["model", "n", *(f"{name}={value!r}" for name, value in options.items())]
        return f"{build.__name__}({', '.join(words)})" if isinstance(build, type) else ""


def _oblivious(order: type) -> Callable[..., Order]:
    def build(
        model: nn.Module | None,
        n: Any,
        *,
        seed: int = 0,
        group: int = 1,
        contiguous: bool = False,
        distributed: Any = "auto",
        **others: Any,
    ) -> Order:
        refuse_unknown(
            order.__name__, others, keywords(Order, GraB, Herding)
        )  # those of orders that learn: no use here
        units = {} if group == 1 else {"group": group, "contiguous": contiguous}  # WithReplacement has none
        built: Order = order(n, seed=seed, distributed=distributed, **units)
        return built

    return build


def _stratified(model: nn.Module | None, n: Any, *, labels: Any = None, **options: Any) -> Order:
    if labels is None or len(labels) != check_n(n):
        raise InputError(
            "no labels" if labels is None else f"{len(labels)} labels for {check_n(n)} examples",
            expected="labels=, the class of each example",
            remedy="Pass the targets of the training set; without classes use random reshuffling.",
        )
    return _oblivious(Stratified)(model, labels, **options)


def _lazy(name: str, label: str, order: type, **options: Any) -> Recipe:
    learn = Every(3, after=2)  # the first two epochs, then one in three
    return Recipe(f"{name}-lazy", f"{label}, every third epoch", partial(order, learn=learn, **options), learn=learn)


ORDERS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("rr", "random reshuffling", _oblivious(RandomReshuffling)),
        Recipe("so", "shuffle once", _oblivious(ShuffleOnce)),
        Recipe("flipflop", "FlipFlop", _oblivious(FlipFlop)),
        Recipe("stratified", "stratified by class", _stratified, needs_labels=True),
        Recipe("replacement", "with replacement", _oblivious(WithReplacement), is_permutation=False),
        Recipe("greedy", "greedy", Greedy),
        Recipe("herding", "offline herding", Herding),
        Recipe("grab", "GraB", GraB),
        Recipe("herding-head", "offline herding, by the head", partial(Herding, params="head", sketch=1024)),
        Recipe("grab-pair", "GraB, pairs", partial(GraB, centering="pair")),
        Recipe("grab-head", "GraB, pairs, by the head", partial(GraB, centering="pair", params="head")),
        Recipe("grab-walk", "GraB, walk", partial(GraB, balancer=SelfBalancingWalk(c=5.0))),
        Recipe("grab-halving", "GraB, kernel halving", partial(GraB, centering="pair", balancer=KernelHalving())),
        Recipe("grab-1step", "1-step GraB", partial(GraB, learn=Until(1)), learn=Until(1)),
        _lazy("grab", "GraB", GraB),
        _lazy("grab-head", "GraB, pairs, by the head", GraB, centering="pair", params="head"),
        _lazy("herding-head", "offline herding, by the head", Herding, params="head", sketch=1024),
    )
}
