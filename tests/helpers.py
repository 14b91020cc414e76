"""Shared by tests: synthetic training runs, fast and word for word."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ordain import Always, Deterministic, KernelHalving, Schedule, SelfBalancingWalk, _rng, reference
from ordain.balancing import Balancer
from ordain.orders import ORDERS, Order

PERMUTATIONS = [name for name, recipe in ORDERS.items() if recipe.is_permutation]
BALANCERS: dict[str, Balancer] = {
    "deterministic": Deterministic(),
    "walk": SelfBalancingWalk(),
    "walk-tight": SelfBalancingWalk(c=0.7),  # fails often: the fallback and the |s|_inf check are at work
    "halving": KernelHalving(),
}


def reference_rule(balancer: Balancer, n: int, d: int) -> reference.Rule:
    """The word-for-word twin of a balancer, new for each epoch."""
    if isinstance(balancer, SelfBalancingWalk):
        return reference.walk(balancer.parameter(n=n, d=d))
    if isinstance(balancer, KernelHalving):
        return reference.kernel_halving(n, balancer.delta)
    return reference.deterministic


def gradient_field(n: int, d: int, seed: int = 0) -> Callable[[int, int], np.ndarray]:
    """Gradients that drift from epoch to epoch, with a mean that is not zero."""
    rng = np.random.default_rng(seed)
    base, drift = rng.normal(size=(n, d)) + 1.5, rng.normal(size=(n, d)) * 0.3
    return lambda index, epoch: base[index] + epoch * drift[index]


def reference_orders(
    field: Callable[[int, int], np.ndarray],
    first: list[int],
    d: int,
    epochs: int,
    *,
    paired: bool,
    balancer: Balancer,
    seed: int = 0,
    learn: Schedule = Always(),  # noqa: B008
) -> list[list[int]]:
    """The orders of ``epochs`` epochs from reference.py, one gradient at a time; only learned epochs are seen."""
    n = len(first)
    count = n // 2 if paired else n
    book: Any = (reference.PairGraB if paired else reference.GraB)(first, d)
    orders = [list(first)]
    for epoch in range(epochs):
        if not learn(epoch):
            orders.append(orders[-1])
            continue
        book.rule = reference_rule(balancer, count, d)
        u = _rng.uniforms(n, seed=seed, stream=epoch)
        for t, index in enumerate(orders[-1]):
            book.see(field(index, epoch), float(u[t // 2 if paired else t]))
        orders.append(book.next_order())
    return orders


def batches(order: Order, size: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in order.sampler:
        batch.append(index)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def run(
    order: Order,
    field: Callable[[int, int], np.ndarray],
    epochs: int,
    *,
    batch_size: int,
    dtype: torch.dtype = torch.float64,
) -> list[list[int]]:
    """The orders of ``epochs`` epochs and the one after, drawn and observed batch by batch."""
    orders = []
    for epoch in range(epochs):
        seen = []
        for batch in batches(order, batch_size):
            order.observe(torch.from_numpy(np.stack([field(i, epoch) for i in batch])).to(dtype))
            seen += batch
        orders.append(seen)
    orders.append(list(order.sampler))
    return orders


def run_epoch(order: Order, field: Callable[[int, int], np.ndarray], epoch: int, batch_size: int) -> list[int]:
    """Draw and observe what is left of an epoch; its indices."""
    seen: list[int] = []
    for batch in batches(order, batch_size):
        order.observe(torch.from_numpy(np.stack([field(i, epoch) for i in batch])))
        seen += batch
    return seen


def build(name: str, n: int, *, seed: int = 0, model: nn.Module | None = None) -> Order:
    labels = {"labels": labels_of(n)} if ORDERS[name].needs_labels else {}
    return ORDERS[name].build(model, n, seed=seed, **labels)


def labels_of(n: int) -> np.ndarray:
    """Three classes of different sizes."""
    return np.minimum(np.arange(n) % 6, 2)


def reloaded(state: Any) -> Any:
    """Through a file, as a checkpoint goes, and without pickled code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def is_permutation(indices: Any, n: int) -> bool:
    return sorted(indices) == list(range(n))


class Regression(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Small, learnable, and every example different."""

    def __init__(self, n: int, d: int = 5, classes: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, d, generator=generator, dtype=torch.float64)
        self.y = (self.x @ torch.randn(d, classes, generator=generator, dtype=torch.float64)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def loop_gradients(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """[B, d]: one backward an example, the obvious way."""
    rows = []
    for i in range(len(x)):
        grads = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    return torch.stack(rows)


def same_state(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
