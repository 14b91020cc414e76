"""Orders: what to visit next. One policy a file, one small base."""

from ordain.orders.base import Order
from ordain.orders.fixed_order import FixedOrder
from ordain.orders.flip_flop import FlipFlop
from ordain.orders.grab import GraB
from ordain.orders.herding_order import Greedy, Herding
from ordain.orders.random_reshuffling import RandomReshuffling
from ordain.orders.registry import ORDERS, Recipe
from ordain.orders.shuffle_once import ShuffleOnce
from ordain.orders.with_replacement import WithReplacement

__all__ = [
    "ORDERS",
    "FixedOrder",
    "FlipFlop",
    "GraB",
    "Greedy",
    "Herding",
    "Order",
    "RandomReshuffling",
    "Recipe",
    "ShuffleOnce",
    "WithReplacement",
]
