"""Better orders of training data than random reshuffling.

>>> import torch
>>> from ordain import GraB
>>> order = GraB(torch.nn.Linear(2, 1), 8)
>>> sorted(order.sampler)
[0, 1, 2, 3, 4, 5, 6, 7]
"""

from importlib.metadata import version

from ordain import distributed
from ordain.balancing import Balancer, Deterministic, KernelHalving, SelfBalancingWalk
from ordain.checkpoint import load, save
from ordain.gradients.validation import validate
from ordain.orders import (
    Always,
    Every,
    FixedOrder,
    FlipFlop,
    GraB,
    Greedy,
    Herding,
    Order,
    RandomReshuffling,
    Schedule,
    ShuffleOnce,
    Stratified,
    Until,
    WithReplacement,
)

__version__ = version("ordain")

__all__ = [
    "Always",
    "Balancer",
    "Deterministic",
    "Every",
    "FixedOrder",
    "FlipFlop",
    "GraB",
    "Greedy",
    "Herding",
    "KernelHalving",
    "Order",
    "RandomReshuffling",
    "Schedule",
    "SelfBalancingWalk",
    "ShuffleOnce",
    "Stratified",
    "Until",
    "WithReplacement",
    "__version__",
    "distributed",
    "load",
    "save",
    "validate",
]
