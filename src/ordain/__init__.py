"""Better orders in which to visit training data than random reshuffling.

>>> import torch
>>> from ordain import GraB
>>> order = GraB(torch.nn.Linear(2, 1), 8)
>>> sorted(order.sampler)
[0, 1, 2, 3, 4, 5, 6, 7]
"""

from importlib.metadata import version

from ordain.balancing import Deterministic, KernelHalving, SelfBalancingWalk
from ordain.checkpoint import load, save
from ordain.orders import (
    FixedOrder,
    FlipFlop,
    GraB,
    Greedy,
    Herding,
    Order,
    RandomReshuffling,
    ShuffleOnce,
    WithReplacement,
)

__version__ = version("ordain")

__all__ = [
    "Deterministic",
    "FixedOrder",
    "FlipFlop",
    "GraB",
    "Greedy",
    "Herding",
    "KernelHalving",
    "Order",
    "RandomReshuffling",
    "SelfBalancingWalk",
    "ShuffleOnce",
    "WithReplacement",
    "__version__",
    "load",
    "save",
]
