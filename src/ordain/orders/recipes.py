"""Every order by name: what tests, studies and the command line run over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ordain.balancing import KernelHalving, SelfBalancingWalk
from ordain.orders.grab import GraB
from ordain.orders.oblivious import FlipFlop, RandomReshuffling, ShuffleOnce, WithReplacement
from ordain.orders.offline_herding import Greedy, Herding
from ordain.orders.options import keywords, refuse_unknown
from ordain.orders.order import Order
from ordain.orders.schedule import Every, Until


@dataclass(frozen=True)
class Recipe:
    """How to build an order, and what to call it in tables and figures."""

    name: str
    label: str
    build: Callable[..., Order]  # (model, n, *, seed) -> Order
    is_permutation: bool = True


def _oblivious(order: type) -> Callable[..., Order]:
    def build(
        model: nn.Module | None, n: Any, *, seed: int = 0, group: int = 1, distributed: Any = "auto", **others: Any
    ) -> Order:
        refuse_unknown(
            order.__name__, others, keywords(Order, GraB, Herding)
        )  # those of orders that learn: no use here
        units = {} if group == 1 else {"group": group}  # WithReplacement has none
        built: Order = order(n, seed=seed, distributed=distributed, **units)
        return built

    return build


ORDERS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("rr", "random reshuffling", _oblivious(RandomReshuffling)),
        Recipe("so", "shuffle once", _oblivious(ShuffleOnce)),
        Recipe("flipflop", "FlipFlop", _oblivious(FlipFlop)),
        Recipe("replacement", "with replacement", _oblivious(WithReplacement), is_permutation=False),
        Recipe("greedy", "greedy", Greedy),
        Recipe("herding", "offline herding", Herding),
        Recipe("grab", "GraB", GraB),
        Recipe("grab-pair", "GraB, pairs", partial(GraB, centering="pair")),
        Recipe("grab-walk", "GraB, walk", partial(GraB, balancer=SelfBalancingWalk(c=5.0))),
        Recipe("grab-halving", "GraB, kernel halving", partial(GraB, centering="pair", balancer=KernelHalving())),
        Recipe("grab-1step", "1-step GraB", partial(GraB, learn=Until(1))),
        Recipe("grab-lazy", "GraB, every third epoch", partial(GraB, learn=Every(3, after=2))),
    )
}
