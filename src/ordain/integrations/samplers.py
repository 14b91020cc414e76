"""Does a framework's loader draw from an order's sampler?"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler

from ordain.errors import InputError
from ordain.orders import Order


def check_sampler(order: Order, loader: Any, *, ranks: int, remedy: str) -> None:
    """Raise unless the loader draws from the order's sampler, and all of the ``ranks`` processes share the order."""
    batches = getattr(loader, "batch_sampler", None)
    found = getattr(loader, "sampler", None)
    if all(order.sampler is not one for one in (found, getattr(batches, "sampler", None))):
        raise InputError(
            f"a {type(loader).__name__} that draws from a {type(found).__name__}",
            expected="a DataLoader that draws from order.sampler",
            remedy=remedy,
        )
    shared = order.sampler.num_replicas if isinstance(order.sampler, DistributedSampler) else 1
    if shared != ranks:
        raise InputError(
            f"an order of {shared} process{'es' * (shared > 1)} on one of {ranks}",
            expected="an order that all processes share, created after torch.distributed is initialised",
            remedy=f"Leave distributed=False out. {remedy}",
        )
