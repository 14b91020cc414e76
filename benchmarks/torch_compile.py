"""Steps of compiled models, with and without an order: ``python -m benchmarks.torch_compile``.

Processor time of one thread, as ratios of steps that ran side by side: over the same step of the model that is not
compiled and has no order (below 1: compiling is worth it), and over the compiled model without an order (what ordering
costs). All that compiles, and the first passes, which are inspected, come before.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.timing import machine, median_ratio
from ordain import GraB

BATCH, WARM, ROUNDS, STEPS = 64, 8, 11, 4
ORDERS = {"no order": None, "pair, head": "head", "pair, all parameters": "all"}


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.first(x)).unflatten(-1, (3, 4, -1)).movedim(2, 0).transpose(2, 3)
        seen = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.project(seen)
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """A small one, whose norms, activations and sums a compiler can fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(128, 128), nn.Linear(128, 10)
        self.blocks = nn.Sequential(*(Block(128) for _ in range(2)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.blocks(self.embed(tokens)).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 512),
        nn.GELU(),
        nn.Linear(512, 512),
        nn.GELU(),
        nn.Linear(512, 512),
        nn.GELU(),
        nn.Linear(512, 10),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP 3 x 512": (mlp, lambda: torch.randn(BATCH, 256)),
    "transformer, T = 32": (Transformer, lambda: torch.randint(0, 128, (BATCH, 32))),
}


def stepper(model: str, backend: str | None, order: str) -> Callable[[], None]:
    """A training step."""
    build, batch = MODELS[model]
    torch.manual_seed(0)
    net, x, y = build(), batch(), torch.randint(0, 10, (BATCH,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    params = ORDERS[order]
    grab: Any = None
    if params is not None:
        grab = GraB(net, BATCH, centering="pair", params=None if params == "all" else params)
    called = net if backend is None else torch.compile(net, backend=backend)

    def step() -> None:
        if grab is not None:
            list(grab.sampler)
        cross_entropy(called(x), y).backward()
        if grab is not None:
            grab.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(model: str, backend: str | None, order: str, pipe: Any) -> None:
    """Warm up, and then run some steps whenever asked; in a process of its own, since dynamo shares code by class."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    step = stepper(model, backend, order)
    for _ in range(WARM):
        step()
    pipe.send(0.0)
    while pipe.recv():
        start = time.process_time()
        for _ in range(STEPS):
            step()
        pipe.send(time.process_time() - start)


def measured(model: str) -> dict[tuple[str | None, str], list[float]]:
    """Seconds by backend and order, in each round."""
    context, pipes, processes = get_context("spawn"), {}, []
    for backend, order in product((None, "aot_eager", "inductor"), ORDERS):
        pipes[backend, order], theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(model, backend, order, theirs)))
        processes[-1].start()
        pipes[backend, order].recv()
    seconds: dict[tuple[str | None, str], list[float]] = {name: [] for name in pipes}
    for _ in range(ROUNDS):
        for name, pipe in pipes.items():
            pipe.send(True)
            seconds[name].append(pipe.recv())
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(False)
        process.join()
    return seconds


def main() -> None:
    print(machine())
    print("| model | backend | ordered by | over not compiled, no order | over no order |")
    for model in MODELS:
        seconds = measured(model)
        for backend, order in seconds:
            ratios = [median_ratio(seconds[backend, order], seconds[other, "no order"]) for other in (None, backend)]
            print(
                f"| {model} | {backend or 'not compiled'} | {order} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
