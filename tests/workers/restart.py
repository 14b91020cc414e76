"""A training script for torchrun that can be killed at any time: it goes on from the last file that rank 0 wrote.

restart.py FOLDER killed    Rank 1 ends itself in mid-epoch, once.
restart.py FOLDER others    The same run whole; from a file on other numbers of ranks; torch.distributed.checkpoint.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ordain
from ordain.distributed import Distributed, stateful

N, BATCH, EVERY, STEPS = 48, 12, 2, 10  # examples, of all ranks in a step, steps from file to file, steps in all


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(N, 6, generator=generator).double(), torch.randint(3, (N,), generator=generator)


class Run:
    """A model, its optimizer and its order, over the ranks of a group."""

    def __init__(self, group: Any, mode: Any = "exact") -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.model = DistributedDataParallel(plain, process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        self.order = ordain.GraB(self.model, N, distributed=Distributed(mode=mode, group=group))
        self.batch = BATCH // dist.get_world_size(group)

    def one_pass(self) -> Iterator[None]:
        """Train on what is left of the epoch; yields after each step."""
        x, y = data()
        indices = iter(self.order.sampler)
        while drawn := list(islice(indices, self.batch)):
            self.optimizer.zero_grad()
            cross_entropy(self.model(x[drawn]), y[drawn]).backward()
            self.order.step()
            self.optimizer.step()
            yield


def train(folder: Path, name: str, group: Any, steps: int, *, lose: int = -1, start: str = "") -> dict[str, Any]:
    """Until ``steps`` are done in all; rank 1 ends itself after step ``lose``."""
    run = Run(group)
    file, fallen = folder / f"{name}.pt", folder / f"{name}.fallen"
    done = 0
    found = file if file.exists() else folder / f"{start}.pt"
    if found.exists():
        saved = ordain.load(found)
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.order.load_state_dict(saved["order"])
        run.order.resume()
        done = saved["done"]
    began = done
    while done < steps:
        for _ in run.one_pass():
            done += 1
            if dist.get_rank() == 0 and done % EVERY == 0:
                ordain.save(file, model=run.model, optimizer=run.optimizer, order=run.order, done=done)
            if done == lose and dist.get_rank() == 1 and not fallen.exists():
                fallen.touch()
                os._exit(9)
            if done == steps:
                break
    return {
        "began": began,
        "orders": [run.order.history(epoch).tolist() for epoch in range(run.order.epoch + 1)],
        "weights": [number for p in run.model.parameters() for number in p.flatten().tolist()],
    }


def checkpointed(folder: Path, group: Any, mode: str) -> list[Any]:
    """Through torch.distributed.checkpoint in mid-epoch, into a fresh order; then the rest of the epoch on both."""
    run, other = Run(group, mode), Run(group, mode)
    assert len(list(run.one_pass())) == N // BATCH
    next(run.one_pass())
    place = folder / f"dcp-{mode}"
    dcp.save({"order": stateful(run.order), "model": run.model.state_dict()}, checkpoint_id=place, process_group=group)
    weights = other.model.state_dict()
    dcp.load({"order": stateful(other.order), "model": weights}, checkpoint_id=place, process_group=group)
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    orders = []
    for one in (run, other):
        assert one.order.resume() == 1
        assert len(list(one.one_pass())) == N // BATCH - 1
        next(iter(one.order.sampler))
        orders.append([one.order.history(epoch).tolist() for epoch in range(3)])
    return orders


def main(folder: Path, what: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    if what == "killed":
        found["killed"] = train(folder, "killed", dist.group.WORLD, STEPS, lose=7)
    else:
        pair, single = dist.new_group([0, 1]), dist.new_group([0])
        if rank < 2:
            found["whole"] = train(folder, "whole", pair, STEPS)
            found["checkpointed"] = {mode: checkpointed(folder, pair, mode) for mode in ("exact", "independent")}
            train(folder, "two", pair, 6)
        dist.barrier()
        found["three"] = train(folder, "three", dist.group.WORLD, 8, start="two")
        if rank == 0:
            found["one"] = train(folder, "one", single, STEPS, start="three")
    (folder / f"{what}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
