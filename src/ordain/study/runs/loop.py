"""The training loop, its optimizer, evaluation, and timing."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from ordain import Order
from ordain.errors import OrdainError, OrdainWarning
from ordain.study.runs.config import RunConfig
from ordain.study.tasks import LoadedTask


@dataclass(frozen=True)
class Score:
    """Mean loss and accuracy in [0, 1]."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(problem: LoadedTask, model: nn.Module, x: Tensor, y: Tensor) -> Score:
    """Evaluate on all rows, one chunk at a time."""
    model.eval()
    loss, hits = 0.0, 0
    for start in range(0, len(x), problem.chunk):
        rows = slice(start, start + problem.chunk)
        output = problem.forward(model, x[rows])
        loss += float(problem.loss(output, y[rows])) * len(output)
        hits += _hits(output, y[rows])
    model.train()
    return Score(loss / len(x), hits / y.numel())


def _hits(output: Tensor, y: Tensor) -> int:
    """The number of targets with the largest of the logits ``[..., classes]``."""
    # Over a vocabulary, argmax takes as long as the loss, and amax a fifth of it. So argmax, which finds the first of
    # equal logits, is computed only for rows whose target has the largest value.
    largest = output.gather(-1, y.unsqueeze(-1)).squeeze(-1) == output.amax(dim=-1)
    return int((output[largest].argmax(dim=-1) == y[largest]).sum())


def epoch_of_steps(
    problem: LoadedTask,
    config: RunConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    order: Order,
    seconds: defaultdict[str, float],
    *,
    seed: int = 0,
    stepped: Callable[[], None] = lambda: None,
) -> None:
    """Train for one epoch, adding the wall-clock time of each of ``PARTS`` to ``seconds``.

    ``ordering`` is ``order.step()`` and the first draw of the epoch. ``seed`` is that of the epoch's augmentation, and
    ``stepped`` is called after each step of the optimizer.
    """
    x, y, forward, loss = problem.train_x, problem.train_y, problem.forward, problem.loss
    random = torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    # A DataLoader would draw from order.sampler in the same way, but for in-memory tensors, fetching and collating
    # single examples would take longer than training and hide the cost of an order.
    batches = iter(BatchSampler(order.sampler, config.batch_size, drop_last=False))
    start = perf_counter()
    batch = next(batches, None)
    data = perf_counter()
    seconds["ordering"] += data - start  # the first draw adopts the next order; Greedy herds here
    while batch is not None:
        rows = torch.tensor(batch)
        batch_x, batch_y = x.index_select(0, rows), y.index_select(0, rows)
        if problem.augment is not None:
            batch_x = problem.augment(batch_x, random)
        forth = perf_counter()
        found = loss(forward(model, batch_x), batch_y)
        back = perf_counter()
        found.backward()  # type: ignore[no-untyped-call]
        ordering = perf_counter()
        order.step()
        stepping = perf_counter()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        optimizer.zero_grad()
        stepped()
        end = perf_counter()
        seconds["data"] += forth - data
        seconds["forward"] += back - forth
        seconds["backward"] += ordering - back
        seconds["ordering"] += stepping - ordering
        seconds["optimizer"] += end - stepping
        data = end
        batch = next(batches, None)


@contextmanager
def may_diverge(model: nn.Module) -> Iterator[None]:
    """Ignore an order's warnings about gradients that are not finite, and its errors once weights are not finite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OrdainWarning)
        try:
            yield
        except OrdainError:
            if has_finite_weights(model):
                raise


def has_finite_weights(model: nn.Module) -> bool:
    """Whether every parameter is finite."""
    return all(bool(p.isfinite().all()) for p in model.parameters())


def make_optimizer(model: nn.Module, config: RunConfig, lr: float) -> torch.optim.Optimizer:
    """Build the configured optimizer."""
    # With millions of parameters, the fused versions are two to four times faster.
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=config.weight_decay, fused=True)
    return torch.optim.SGD(
        model.parameters(), lr=lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=True
    )


def make_decay(optimizer: torch.optim.Optimizer, config: RunConfig, n: int) -> torch.optim.lr_scheduler.LambdaLR | None:
    """The decay of the learning rate over the steps of all epochs, to be stepped after each; None if it is constant."""
    if config.decay == "constant":
        return None
    steps = config.epochs * -(-n // config.batch_size)
    factors: dict[str, Callable[[int], float]] = {
        "cosine": lambda step: (1 + math.cos(math.pi * step / steps)) / 2,  # from 1 to 0
        # A tenth after half of the steps, and a hundredth after three quarters.
        "step": lambda step: 0.1 ** ((2 * step >= steps) + (4 * step >= 3 * steps)),
    }
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factors[config.decay])


def make_plateau(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """The paper's learning rate schedule for WikiText-2, to be stepped after each epoch."""
    # Taken literally from the paper's appendix. No loss satisfies a relative threshold of 5, so this divides the
    # rate by ten after every sixth epoch.
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.1, patience=5, threshold=5)
