"""Orders: what to visit next."""

from ordain.orders.grab import GraB
from ordain.orders.learner import Learner
from ordain.orders.oblivious import FixedOrder, FlipFlop, RandomReshuffling, ShuffleOnce, WithReplacement
from ordain.orders.offline_herding import Greedy, Herding
from ordain.orders.order import Order
from ordain.orders.recipes import ORDERS, Recipe
from ordain.orders.schedule import Always, Every, Schedule, Until
from ordain.orders.stratified import Stratified

__all__ = [
    "ORDERS",
    "Always",
    "Every",
    "FixedOrder",
    "FlipFlop",
    "GraB",
    "Greedy",
    "Herding",
    "Learner",
    "Order",
    "RandomReshuffling",
    "Recipe",
    "Schedule",
    "ShuffleOnce",
    "Stratified",
    "Until",
    "WithReplacement",
]
