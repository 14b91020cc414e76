"""Signs from inner products: knows no modules, no loaders and no orders."""

from ordain.balancing.balancers import Balancer, Deterministic, KernelHalving, SelfBalancingWalk, check_balancer
from ordain.balancing.state import BalanceState
from ordain.balancing.step import Decision, balance

__all__ = [
    "BalanceState",
    "Balancer",
    "Decision",
    "Deterministic",
    "KernelHalving",
    "SelfBalancingWalk",
    "balance",
    "check_balancer",
]
