"""The processes that do one job together: rank 0 decides, evaluates and writes; the others train along."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ordain.study.tasks import Problem

# Seconds. The others wait while rank 0 evaluates, however long that takes; whoever has started the ranks sees one die.
PATIENCE = 24 * 3600.0


@dataclass(frozen=True)
class Place:
    """Which process of how many this is, and the file through which they find each other."""

    rank: int = 0
    size: int = 1
    store: Path | None = None


@dataclass(frozen=True)
class Ranks:
    """This process among those of its job."""

    rank: int = 0
    size: int = 1

    def hear(self, *numbers: float) -> list[float]:
        """What rank 0 says, on every rank; the others say as many numbers, which nobody hears."""
        if self.size == 1:
            return list(numbers)
        told = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(told, src=0)
        return [float(number) for number in told]

    def parallel(self, problem: Problem, model: nn.Module, batch_size: int) -> nn.Module:
        """The model as all ranks train it.

        DistributedDataParallel lays out what it sends after its first backward pass, and with that the order in which
        it adds up numbers. So a pass is made here: a job that goes on then adds as one that was not stopped.
        """
        if self.size == 1:
            return model
        before = copy.deepcopy(model.state_dict())
        wrapped = DistributedDataParallel(model)
        x, y = problem.train_x[:batch_size], problem.train_y[:batch_size]
        problem.loss(problem.forward(wrapped, x), y).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        model.load_state_dict(before)
        return wrapped

    def every(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """The state of each rank, by rank; on every rank."""
        states: list[dict[str, Any]] = [{} for _ in range(self.size)]
        dist.all_gather_object(states, state)
        return states


ALONE = Ranks()


@contextmanager
def joined(place: Place) -> Iterator[Ranks]:
    """In touch with the other ranks of a job, on this machine only."""
    if place.store is None:
        yield ALONE
        return
    loops = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loops:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loops[0])
    dist.init_process_group(
        "gloo",
        init_method=place.store.absolute().as_uri(),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=PATIENCE),
    )
    try:
        yield Ranks(place.rank, place.size)
    finally:
        dist.destroy_process_group()
