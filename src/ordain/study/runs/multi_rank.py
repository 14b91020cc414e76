"""Process groups for jobs with several ranks. Rank 0 decides, evaluates and writes; the others only train."""

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

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ordain.study.tasks import LoadedTask

# Timeout in seconds. Other ranks wait while rank 0 evaluates; the parent process notices a rank that dies.
PATIENCE = 24 * 3600.0


@dataclass(frozen=True)
class Ranks:
    """The rank of this process in its job, and the file store that the ranks use for rendezvous."""

    rank: int = 0
    size: int = 1
    store: Path | None = None

    def hear(self, told: Any) -> Any:
        """What rank 0 tells; other ranks pass None."""
        box = [told]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def parallel(self, problem: LoadedTask, model: nn.Module, batch_size: int) -> nn.Module:
        """Wrap the model in DistributedDataParallel if there are several ranks.

        DistributedDataParallel rebuilds its buckets, and with them the summation order, after the first backward pass.
        Running one pass here makes resumed jobs bit-identical to uninterrupted ones.
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
        """Gather the states of all ranks, on every rank."""
        states: list[dict[str, Any]] = [{} for _ in range(self.size)]
        dist.all_gather_object(states, state)
        return states


ALONE = Ranks()


@contextmanager
def joined(ranks: Ranks) -> Iterator[None]:
    """Join the job's process group (gloo on the loopback interface)."""
    if ranks.store is None:
        yield
        return
    loops = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loops:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loops[0])
    dist.init_process_group(
        "gloo",
        init_method=ranks.store.absolute().as_uri(),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=PATIENCE),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
