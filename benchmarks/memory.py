"""What ordering adds to a step's peak memory, and that it does not grow with batch size times parameters.

Counted, not sampled: torch's profiler reports every allocation and release of torch's CPU allocator during one step,
and the peak is the most that was alive at once above what was alive before the step. What an order keeps from step to
step (one vector of length d for pairs, three for means) is printed beside it.

The engine holds, from the forward to the end of the step, each layer's input and the gradient at its output (an
ordinary backward releases them as it goes), and makes at most one chunk of one layer's per-example gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import BatchSampler

from benchmarks.models import mlp, tiny_bert
from benchmarks.step import ORDERS, images, loss_of, tokens
from ordain import Order
from ordain.gradients.memory import CHUNK_NUMBERS

SIZES = (16, 64, 256)
WARM_UP = 3  # the order's vectors and the one look at the model's layout come with the first steps
FLOAT = 4


@dataclass(frozen=True)
class Peak:
    """Bytes: the most alive in a step, what the order keeps between steps, and the figures to compare with."""

    step: int
    kept: int
    activations: int
    made: int
    whole: int


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the profiler writes to standard error at every start and stop."""
    before = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def allocations(go: Callable[[], object]) -> list[int]:
    """Bytes that torch's CPU allocator handed out (+) and took back (-) during ``go``, in turn."""
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        go()
    results: Any = found.profiler
    events = [(e.start_ns(), e.nbytes()) for e in results.kineto_results.events() if e.name() == "[memory]"]
    return [change for _, change in sorted(events, key=lambda event: event[0])]


def peak_of(changes: list[int]) -> int:
    """The most bytes alive at once, above what was alive before."""
    return max(accumulate(changes, initial=0))


def activations_of(model: nn.Module, x: Tensor) -> int:
    """Bytes of the inputs and outputs of all modules with parameters of their own."""
    numbers = 0

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal numbers
        numbers += sum(one.numel() for one in inputs) + output.numel()

    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    handles = [module.register_forward_hook(count) for module in owners]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return numbers * FLOAT


def measure(
    build: Callable[[], nn.Module],
    batch: Callable[[int], tuple[Tensor, Tensor]],
    size: int,
    ordered: Callable[[nn.Module, int], Order],
) -> Peak:
    torch.manual_seed(0)
    model = build()
    x, y = batch(size)
    activations = activations_of(model, x)
    n = size * (WARM_UP + 2)
    order = ordered(model, n)
    draws = iter(BatchSampler(order.sampler, size, drop_last=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        next(draws)
        loss_of(model(x), y).backward()
        order.step()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    kept = sum(value.numel() * FLOAT for value in (order.state_dict().get("vectors") or {}).values())
    d = sum(p.numel() for p in model.parameters())
    layer = max(p.numel() for module in model.modules() if isinstance(module, nn.Linear) for p in [module.weight])
    made = min(size * layer, CHUNK_NUMBERS) * FLOAT
    return Peak(peak_of(allocations(step)), kept, activations, made, size * d * FLOAT)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "mlp": (mlp, images(1024)),
    "bert": (tiny_bert, tokens(32, 30_522, classes=2)),
}


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    results = {}
    print(
        "  MB of torch's CPU allocator. RR: peak of a step; + mean, + pair: what they add to it; kept: by mean and by"
    )
    print("  pair between steps; a, b: inputs and outputs of layers; made: a layer's gradients at a time; B x d: all")
    heads = ("RR", "+ mean", "+ pair", "kept", "kept", "a, b", "made", "B x d")
    print(f"  {'':6}{'B':>5}" + "".join(f"{head:>10}" for head in heads))
    for name, (build, batch) in CASES.items():
        extra: dict[str, dict[int, int]] = {"mean": {}, "pair": {}}
        activations, made = {}, {}
        for size in SIZES:
            peaks = {order: measure(build, batch, size, ordered) for order, ordered in ORDERS.items()}
            rr = peaks["rr"]
            activations[size], made[size] = rr.activations, rr.made
            for order, by_size in extra.items():
                by_size[size] = peaks[order].step - rr.step
            row = [rr.step, extra["mean"][size], extra["pair"][size], peaks["mean"].kept, peaks["pair"].kept]
            row += [rr.activations, rr.made, rr.whole]
            print(f"  {name:6}{size:5}" + "".join(f"{value / 1e6:10.1f}" for value in row))
        small, large = SIZES[-2:]
        more, chunk = activations[large] - activations[small], made[large]
        for order, by_size in extra.items():
            growth = by_size[large] - by_size[small]
            results[f"{name}, {order}, growth over activations"] = growth / more
            results[f"{name}, {order}, extra over B x d"] = by_size[large] / rr.whole
            print(
                f"  {name}, {order}: from B={small} to {large} the extra grows by {growth / 1e6:.1f} MB, "
                f"activations by {more / 1e6:.1f} MB; a layer's made gradients are at most {chunk / 1e6:.1f} MB"
            )
    return results
