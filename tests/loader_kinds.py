"""Loaders that sort, drop or deal out what they draw, and the plain one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from helpers import gradient_field
from runs import Indexed
from torch.utils.data import DataLoader, Sampler, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from ordain.orders import Order

N, BATCH = 22, 4


def by_feature(batch: list[Any]) -> Any:
    return default_collate(sorted(batch, key=lambda one: float(one[0][0])))


def all_but_one(batch: list[Any]) -> Any:
    return default_collate([one for one in batch if one[2] != 5])


class Buckets(Sampler[list[int]]):
    """Sorts what it draws for three batches, and deals it out."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        drawn = iter(self.sampler)
        while pool := sorted(itertools.islice(drawn, 3 * BATCH)):
            for lo in range(0, len(pool), BATCH):
                yield pool[lo : lo + BATCH]


LOADERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sorts": lambda sampler: {"batch_size": BATCH, "sampler": sampler, "collate_fn": by_feature},
    "drops": lambda sampler: {"batch_size": BATCH, "sampler": sampler, "collate_fn": all_but_one},
    "buckets": lambda sampler: {"batch_sampler": Buckets(sampler)},
    "workers": lambda sampler: {"batch_sampler": Buckets(sampler), "num_workers": 2},
    "out of order": lambda sampler: {"batch_size": BATCH, "sampler": sampler, "num_workers": 2, "in_order": False},
}


def loader_of(order: Order, *, stateful: bool = False, **options: Any) -> Any:
    kind: Any = StatefulDataLoader if stateful else DataLoader
    return kind(Indexed(N), batch_size=BATCH, sampler=order.sampler, **options)


def told(order: Order, batch: Any) -> None:
    order.observe(np.stack([gradient_field(N, 3)(int(i), 0) for i in batch[2]]))
