"""Two ranks with a model after fully_shard: the orders of one process that sees the same global batches."""

from __future__ import annotations

import copy
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, linear

from ordain import GraB
from ordain.errors import OrdainError

N, BATCH, EPOCHS = 24, 3, 3


class Block(nn.Module):
    """Attention, norms and an MLP over 4 steps of 6 features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


class Twice(nn.Module):
    """Uses a weight without calling the module that owns it, which the check of sums must see."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)) + linear(x.flatten(1), self.head.weight)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(24, 7), nn.Tanh(), nn.Linear(7, 3))


def layers(model: nn.Module) -> list[nn.Module]:
    """What is sharded by itself; the rest falls to the model as a whole."""
    return [model.body] if isinstance(model, Block) else [one for one in model if isinstance(one, nn.Linear)]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(N, 4, 6, generator=generator).double(), torch.randint(3, (N,), generator=generator)


def trained(model: nn.Module, order: GraB, batch: int, dtype: torch.dtype = torch.float64) -> list[list[int]]:
    x, y = data()
    x = x.to(dtype)
    params = list(model.parameters())
    for _ in range(EPOCHS):
        indices = iter(order.sampler)
        while drawn := list(islice(indices, batch)):
            cross_entropy(model(x[drawn]), y[drawn]).backward()
            order.step()
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            with torch.no_grad():
                for p in params:
                    p -= 0.2 * p.grad
                    p.grad = None
    next(iter(order.sampler))
    return [order.history(epoch).tolist() for epoch in range(EPOCHS + 1)]


def refusal(job: Any) -> str:
    try:
        job()
    except OrdainError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    def sharded(model: nn.Module, **options: Any) -> nn.Module:
        for layer in layers(model):
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    found: dict[str, Any] = {}
    for name, make, params in (
        ("mlp", mlp, None),
        ("block", Block, None),
        ("head", Block, "head"),
        ("kept whole", mlp, None),
    ):
        torch.manual_seed(0)
        model = make().double()
        alone = copy.deepcopy(model)
        sharded(model)
        if name == "kept whole":
            model.set_reshard_after_backward(False)
        orders = trained(model, GraB(model, N, params=params), BATCH)
        expected = trained(alone, GraB(alone, N, params=params, distributed=False), BATCH * size)
        found[name] = {"orders": orders, "expected": expected}
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        found[name]["apart"] = max(float((p.detach().full_tensor() - q.detach()).abs().max()) for p, q in pairs)

    model = sharded(mlp())
    found["func"] = refusal(lambda: GraB(model, N, gradients="func"))
    found["microbatch"] = refusal(lambda: GraB(model, N, gradients="microbatch", group=3))
    found["recurrent"] = refusal(lambda: GraB(fully_shard(nn.LSTM(4, 4), mesh=mesh), N))
    found["fsdp1"] = refusal(lambda: GraB(FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")), N))

    plain = mlp().double()
    early = GraB(plain, N)
    sharded(plain)
    found["sharded later"] = refusal(lambda: trained(plain, early, BATCH))

    def use_twice() -> None:
        model = fully_shard(Twice().double(), mesh=mesh)
        order = GraB(model, N)
        x, y = data()
        drawn = list(islice(order.sampler, BATCH))
        cross_entropy(model(x[drawn]), y[drawn]).backward()
        order.step()

    found["not explained"] = refusal(use_twice)

    def split_while_it_runs() -> None:
        parallelize_module(plain, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
        trained(plain, GraB(plain, N), BATCH)

    plain = mlp().double()
    found["tensor parallel"] = refusal(split_while_it_runs)

    coarse = sharded(mlp(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    found["bfloat16"] = trained(coarse, GraB(coarse, N), BATCH, torch.float32)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
