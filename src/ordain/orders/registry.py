"""Every order by name: what tests, studies and the command line run over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ordain.balancing import KernelHalving, SelfBalancingWalk
from ordain.orders.base import Order
from ordain.orders.flip_flop import FlipFlop
from ordain.orders.grab import GraB
from ordain.orders.herding_order import Greedy, Herding
from ordain.orders.random_reshuffling import RandomReshuffling
from ordain.orders.shuffle_once import ShuffleOnce
from ordain.orders.with_replacement import WithReplacement


@dataclass(frozen=True)
class Recipe:
    """How to build an order, and what to call it in tables and figures."""

    name: str
    label: str
    build: Callable[..., Order]  # (model, n, *, seed) -> Order
    is_permutation: bool = True


def _blind(order: type) -> Callable[..., Order]:
    def build(
        model: nn.Module | None, n: Any, *, seed: int = 0, group: int = 1, distributed: Any = "auto", **_: Any
    ) -> Order:
        units = {} if group == 1 else {"group": group}  # WithReplacement has none
        built: Order = order(n, seed=seed, distributed=distributed, **units)
        return built

    return build


def _with(order: Callable[..., Order], **fixed: Any) -> Callable[..., Order]:
    def build(model: nn.Module | None, n: Any, *, seed: int = 0, **options: Any) -> Order:
        return order(model, n, seed=seed, **fixed, **options)

    return build


ORDERS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("rr", "random reshuffling", _blind(RandomReshuffling)),
        Recipe("so", "shuffle once", _blind(ShuffleOnce)),
        Recipe("flipflop", "FlipFlop", _blind(FlipFlop)),
        Recipe("replacement", "with replacement", _blind(WithReplacement), is_permutation=False),
        Recipe("greedy", "greedy", _with(Greedy)),
        Recipe("herding", "offline herding", _with(Herding)),
        Recipe("grab", "GraB", _with(GraB)),
        Recipe("grab-pair", "GraB, pairs", _with(GraB, centering="pair")),
        Recipe("grab-walk", "GraB, walk", _with(GraB, balancer=SelfBalancingWalk(c=5.0))),
        Recipe("grab-halving", "GraB, kernel halving", _with(GraB, centering="pair", balancer=KernelHalving())),
        Recipe("grab-1step", "1-step GraB", _with(GraB, freeze_after=1)),
    )
}
