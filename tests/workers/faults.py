"""Ranks that die, hang or are built otherwise: what the others see.

Each scenario runs in children of its own on every rank, all at the same time, so that one start of the ranks serves
all of them, and a child's end is not the end of its rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ordain import GraB
from ordain.distributed import Distributed
from ordain.errors import OrdainError

N, BATCH, LOST = 24, 3, 2  # the step at which a rank is lost


def rows(order: GraB, drawn: list[int]) -> np.ndarray:
    return np.random.default_rng(order.epoch).standard_normal((N, 4))[drawn]


def frozen(order: GraB) -> Any:
    """All of a state, to be compared."""
    return json.loads(json.dumps(order.state_dict(), default=torch.Tensor.tolist))


def said(job: Callable[[], Any]) -> str:
    try:
        job()
    except OrdainError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def on_both(store: dist.Store, rank: int, found: dict[str, Any]) -> dict[str, Any]:
    """Once both ranks have it: one that ends takes down what the other is still waiting for."""
    store.set(f"rank {rank}", "")
    store.wait(["rank 0", "rank 1"], timedelta(seconds=120))
    return found


def lost_in_mid_epoch(store: dist.Store, rank: int, mode: Any, how: str, timeout: float) -> dict[str, Any]:
    order = GraB(None, N, distributed=Distributed(mode=mode, timeout=timeout))
    indices = iter(order.sampler)
    for _ in range(LOST):
        order.observe(rows(order, list(islice(indices, BATCH))))
    if rank == 0:
        store.set("stepped", "")
    else:
        store.wait(["stepped"], timedelta(seconds=120))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            os._exit(3)
        elif how == "raise":
            raise ZeroDivisionError("a mistake of the user's")
        store.wait(["done"], timedelta(seconds=120))  # alive, and stuck
        return {"said": "stuck"}
    before = frozen(order)
    given = rows(order, list(islice(indices, BATCH)))
    found = {"said": said(lambda: order.observe(given)), "kept": frozen(order) == before}
    found["again"] = said(lambda: order.observe(given))
    store.set("done", "")
    return found


def not_made(store: dist.Store, rank: int) -> dict[str, Any]:
    if rank == 1:
        store.wait(["done"], timedelta(seconds=120))
        return {"said": "not made"}
    found = {"said": said(lambda: GraB(None, N, distributed=Distributed(timeout=4)))}
    store.set("done", "")
    return found


def made_otherwise(store: dist.Store, rank: int) -> dict[str, Any]:
    return on_both(store, rank, {"said": said(lambda: GraB(None, N, seed=rank))})


def ended_before(store: dist.Store, rank: int) -> dict[str, Any]:
    """While the order is made on the others."""
    if rank == 1:
        dist.new_group()
        os._exit(3)
    return {"said": said(lambda: GraB(None, N, distributed=Distributed(timeout=60)))}


def not_a_member(store: dist.Store, rank: int) -> dict[str, Any]:
    group = dist.new_group([1])
    return on_both(store, rank, {"said": said(lambda: GraB(None, N, distributed=Distributed(group=group)))})


SCENARIOS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]] = {
    "killed": (lost_in_mid_epoch, ("exact", "kill", 120.0)),
    "exited": (lost_in_mid_epoch, ("exact", "exit", 120.0)),
    "raised": (lost_in_mid_epoch, ("exact", "raise", 120.0)),
    "stuck": (lost_in_mid_epoch, ("exact", "stuck", 8.0)),
    "not made": (not_made, ()),
    "made otherwise": (made_otherwise, ()),
    "ended before": (ended_before, ()),
    "not a member": (not_a_member, ()),
}


def child(folder: Path, name: str, rank: int, size: int) -> None:
    """One scenario, to its end."""
    code = 1
    try:
        store = dist.FileStore(str(folder / f"{name}.store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        job, options = SCENARIOS[name]
        found = job(store, rank, *options)
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    warm = GraB(None, N, distributed=False)  # what is compiled is compiled before there are children
    warm.observe(rows(warm, list(warm.sampler)))
    children = {}
    for name in SCENARIOS:
        pid = os.fork()
        if not pid:
            child(folder, name, rank, size)
        children[pid] = name
    ends = {}
    while children:
        pid, status = os.wait()
        ends[children.pop(pid)] = os.waitstatus_to_exitcode(status)
    (folder / f"{rank}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
