"""What one of W processes does for ``python -m benchmarks ranks``; started by torchrun."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import logistic, mlp
from ordain import GraB, RandomReshuffling, herding
from ordain.study.tasks.images import lenet

MODES: dict[str, dict[str, Any]] = {
    "exact": {"distributed": "exact"},
    "sketch": {"distributed": "exact", "sketch": 256},
    "independent": {"distributed": "independent"},
}
MODELS = {"logistic": (logistic, (784,)), "lenet": (lenet, (3, 32, 32)), "mlp": (mlp, (1024,))}
GLOBAL_BATCH, STEPS, EPOCHS = 64, 6, 5


def traffic(model: nn.Module, shape: tuple[int, ...], options: dict[str, Any] | None) -> dict[str, float]:
    """Bytes a rank hands over for ordering, and seconds of CPU, a step; beside what the backward sends."""
    ranks = dist.get_world_size()
    wrapped = DistributedDataParallel(model)
    n = GLOBAL_BATCH * (STEPS + 2)
    order: Any = RandomReshuffling(n) if options is None else GraB(wrapped, n, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    indices = iter(order.sampler)
    size = GLOBAL_BATCH // ranks
    sent, seconds = 0, 0.0
    for step in range(STEPS + 2):
        for _ in range(size):
            next(indices)
        if step == 2:  # descriptions and agreements have been sent, and code is compiled
            sent, seconds = order.sent_bytes, time.process_time()
        x, y = torch.randn(size, *shape, generator=generator), torch.randint(10, (size,), generator=generator)
        cross_entropy(wrapped(x), y).backward()
        order.step()
        model.zero_grad()
    order.detach()
    numbers = sum(p.numel() for p in model.parameters())
    return {
        "bytes": (order.sent_bytes - sent) / STEPS,
        "cpu": (time.process_time() - seconds) / STEPS,
        "gradient": numbers * 4.0,
        "batch x d": size * numbers * 4.0,
    }


def quality(options: dict[str, Any] | None, centering: str) -> float:
    """The herding objective of the order after some epochs, of digits' gradients that do not change."""
    found = load_digits()
    x = torch.tensor(found.data / 16.0, dtype=torch.float64)[:1792]
    y = torch.tensor(found.target)[:1792]
    torch.manual_seed(0)
    model = nn.Linear(64, 10).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(50):  # a little trained, so that gradients are not all alike
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        b = model(x).softmax(dim=1) - nn.functional.one_hot(y, 10)
    rows: Tensor = torch.cat([torch.einsum("no,ni->noi", b, x).flatten(1), b], dim=1)
    n = len(rows)
    order: Any = RandomReshuffling(n) if options is None else GraB(None, n, centering=centering, **options)
    size = GLOBAL_BATCH // dist.get_world_size()
    for _ in range(EPOCHS):
        drawn = list(order.sampler)
        for start in range(0, len(drawn), size):
            order.observe(rows[drawn[start : start + size]])
    mine = torch.tensor(list(order.sampler))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    visited = torch.stack(parts, dim=1).flatten().numpy()  # as the ranks visit it, together
    return float(herding.herding_objective(rows.numpy(), np.asarray(visited), norm=2))


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"traffic": {}, "quality": {}}
    for name, (build, shape) in MODELS.items():
        for mode, options in {"rr": None, **MODES}.items():
            torch.manual_seed(0)
            found["traffic"][f"{name}, {mode}"] = traffic(build(), shape, options)
    for mode, options in {"rr": None, **MODES}.items():
        for centering in ("mean", "pair"):
            found["quality"][f"{mode}, {centering}"] = quality(options, centering)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
