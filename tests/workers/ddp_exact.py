"""Run by torchrun with four processes: each scenario over its first W of them, and what came of it as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ordain import GraB, RandomReshuffling
from ordain.distributed import Distributed

EPOCHS = 3


class Language(nn.Module):
    """Tied embeddings of words, and a norm: sparse forms, uses twice, sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.mix = nn.LSTM(6, 6, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.mix(self.words(x))[0])).mean(dim=1)


def tabular() -> tuple[nn.Module, Tensor, Tensor]:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(48, 6).double(), torch.arange(48) % 3


def images() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(18, 3)
    )
    return model, torch.randn(48, 1, 5, 5).double(), torch.arange(48) % 3


def language() -> tuple[nn.Module, Tensor, Tensor]:
    return Language(), torch.randint(9, (48, 4)), torch.arange(48) % 9


TASKS = {"tabular": tabular, "images": images, "language": language}


def made(task: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(7)
    model, x, y = TASKS[task]()
    return model.double(), x, y


def optimizer_for(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    """SGD; with the option ``adam`` that, and the order is preconditioned by it."""
    if not options.pop("adam", False):
        return torch.optim.SGD(model.parameters(), lr=0.1)
    options["precondition"] = torch.optim.Adam(model.parameters(), lr=0.01)
    return options["precondition"]


def train(
    order: Any,
    model: nn.Module,
    data: TensorDataset,
    optimizer: torch.optim.Optimizer,
    *,
    batch: int,
    accumulate: int = 1,
    joined: bool = False,
    clip: float = 0.0,
) -> dict[str, Any]:
    """An ordinary loop; with ``accumulate`` batches to an optimizer step."""
    loader = DataLoader(data, batch_size=batch, sampler=order.sampler)
    for epoch in range(EPOCHS):
        if hasattr(order.sampler, "set_epoch"):
            order.sampler.set_epoch(epoch + 17)
        with Join([model, order.joinable]) if joined else nullcontext():
            for number, (x, y) in enumerate(loader):
                last = number % accumulate == accumulate - 1 or number == len(loader) - 1
                with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                    (cross_entropy(model(x), y)).backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                if last:
                    order.step()
                    optimizer.step()
                    optimizer.zero_grad()
    next(iter(order.sampler))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "orders": [order.history(epoch).tolist() for epoch in range(EPOCHS + 1)],
        "weights": flat.tolist(),
        "drawn": len(order.sampler),
        "mine": list(order.sampler),
    }


def scenarios() -> Iterator[tuple[str, int, str, dict[str, Any], dict[str, Any]]]:
    """(name, W, task, options of the order, options of the loop)."""
    for ranks in (1, 2, 3, 4):
        for centering in ("mean", "pair"):
            yield f"exact-{centering}-{ranks}", ranks, "tabular", {"centering": centering}, {"batch": 12 // ranks}
    for task in ("images", "language"):
        yield f"{task}-2", 2, task, {}, {"batch": 6}
        yield f"adam-{task}-2", 2, task, {"adam": True}, {"batch": 6}
    yield "adam-sketch-2", 2, "tabular", {"adam": True, "sketch": 24, "centering": "pair"}, {"batch": 6}
    yield "func-2", 2, "tabular", {"gradients": "func"}, {"batch": 6}
    yield "no_sync-2", 2, "tabular", {}, {"batch": 3, "accumulate": 2}
    yield "micro-2", 2, "tabular", {"gradients": "microbatch", "group": 4}, {"batch": 4}
    blocks = {"gradients": "microbatch", "group": 4, "contiguous": True}
    yield "blocks-2", 2, "tabular", blocks, {"batch": 4}
    for centering in ("mean", "pair"):
        options = {"centering": centering, "mode": "independent"}
        yield f"independent-{centering}-4", 4, "tabular", options, {"batch": 4}
    yield "join-3", 3, "tabular", {"tail": "uneven", "n": 46}, {"batch": 4, "joined": True}
    yield "rest-4", 4, "tabular", {"n": 46}, {"batch": 3}
    yield "rr-4", 4, "tabular", {"order": "rr"}, {"batch": 3}


def run(ranks: int, task: str, options: dict[str, Any], loop: dict[str, Any], group: Any) -> dict[str, Any]:
    model, x, y = made(task)
    options = dict(options)
    n = options.pop("n", len(x))
    rule = Distributed(mode=options.pop("mode", "exact"), tail=options.pop("tail", "repeat"), group=group, timeout=60)
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = optimizer_for(model, options)
    if options.pop("order", "grab") == "rr":
        order: Any = RandomReshuffling(n, distributed=rule)
    else:
        order = GraB(wrapped, n, distributed=rule, **options)
    found = train(order, wrapped, TensorDataset(x[:n], y[:n]), optimizer, **loop)
    return found | {
        "sent": order.sent_bytes,
        "sampler": isinstance(order.sampler, torch.utils.data.DistributedSampler),
    }


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in (1, 2, 3, 4)}
    found = {}
    for name, ranks, task, options, loop in scenarios():
        if rank < ranks:
            found[name] = run(ranks, task, options, loop, groups[ranks] if ranks < 4 else None)
        dist.barrier()
    (out / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
