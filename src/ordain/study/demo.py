"""Logistic regression on scikit-learn's digits under every order: same seeds, weights and first epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from ordain import FixedOrder, Order
from ordain.orders import ORDERS
from ordain.study.progress import Report

__all__ = ["ARMS", "BASELINE", "Digits", "Run", "Settings", "run_all", "train"]

BASELINE, _LEARNED, _RETRAIN = "rr", "grab", "grab-retrain"
ARMS: dict[str, str] = {name: recipe.label for name, recipe in ORDERS.items()} | {_RETRAIN: "retrain from GraB"}

Build = Callable[..., Order]  # (model, n, *, seed) -> Order


@dataclass(frozen=True)
class Settings:
    """What a demo runs. The rate is one at which orders differ, not the best rate of any of them."""

    seeds: int = 5
    epochs: int = 20
    batch_size: int = 32
    lr: float = 0.3
    momentum: float = 0.9
    prefix_vectors: int = 10_000  # Figure 1(b)
    prefix_dim: int = 128


@dataclass(frozen=True)
class Digits:
    """1,797 images of 8x8 pixels in [0, 1], a fixed fifth of them for testing."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @classmethod
    def load(cls) -> Digits:
        """The copy that ships with scikit-learn: no download."""
        pixels, labels = load_digits(return_X_y=True)
        x, test_x, y, test_y = train_test_split(pixels / 16, labels, test_size=0.2, random_state=0, stratify=labels)
        return cls(
            *(
                torch.as_tensor(part, dtype=torch.float32) if part.ndim == 2 else torch.as_tensor(part)
                for part in (x, y, test_x, test_y)
            )
        )

    def first(self, count: int) -> Digits:
        """The same with fewer training examples."""
        return Digits(self.x[:count], self.y[:count], self.test_x, self.test_y)


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        seed: of the initial weights and of the order.
        train_loss: ``[epochs + 1]``, over the whole training set, before training and after each epoch.
        test_accuracy: ``[epochs + 1]``, in [0, 1].
        seconds: in training steps and the order's work, without evaluation.
        order_bytes: tensors and lists of numbers in the order's ``state_dict()`` after the last epoch.
    """

    seed: int
    train_loss: list[float]
    test_accuracy: list[float]
    seconds: float
    order_bytes: int


def train(data: Digits, build: Build, *, seed: int, settings: Settings) -> tuple[Run, Order]:
    """Train from the weights of ``seed`` under one order, as any user of ordain would."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Linear(data.x.shape[1], 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    order = build(model, len(data.x), seed=seed)
    # A DataLoader would draw from order.sampler in the same way; on tensors this small, fetching and
    # collating single examples would take longer than training and hide what an order costs.
    batches = BatchSampler(order.sampler, settings.batch_size, drop_last=False)
    losses, accuracies = [_loss(model, data)], [_accuracy(model, data)]
    seconds = 0.0
    for _ in range(settings.epochs):
        start = time.perf_counter()
        for batch in batches:
            nn.functional.cross_entropy(model(data.x[batch]), data.y[batch]).backward()  # type: ignore[no-untyped-call]
            order.step()
            optimizer.step()
            optimizer.zero_grad()
        seconds += time.perf_counter() - start
        losses.append(_loss(model, data))
        accuracies.append(_accuracy(model, data))
    order.detach()
    return Run(seed, losses, accuracies, seconds, _bytes(order.state_dict())), order


def run_all(settings: Settings, *, report: Report) -> dict[str, list[Run]]:
    """Every arm of every seed. Seeds are the outer loop, so that a slow minute of the machine hits all arms."""
    data = Digits.load()
    runs: dict[str, list[Run]] = {name: [] for name in ARMS}
    done, total = 0, len(ARMS) * settings.seeds
    with _one_thread():
        _warm_up(data, settings)
        for seed in range(settings.seeds):
            orders: dict[str, Order] = {}
            for name, recipe in ORDERS.items():
                run, orders[name] = train(data, recipe.build, seed=seed, settings=settings)
                runs[name].append(run)
                done += 1
                report(done, total)
            again = _fixed(FixedOrder.from_(orders[_LEARNED]))
            runs[_RETRAIN].append(train(data, again, seed=seed, settings=settings)[0])
            done += 1
            report(done, total)
    return runs


def _fixed(order: FixedOrder) -> Build:
    def build(model: nn.Module, n: int, *, seed: int) -> Order:
        return order

    return build


def _warm_up(data: Digits, settings: Settings) -> None:
    """Compile what is compiled on first use, so that no arm's time includes it."""
    few, short = data.first(2 * settings.batch_size), Settings(epochs=2, batch_size=settings.batch_size)
    for recipe in ORDERS.values():
        train(few, recipe.build, seed=0, settings=short)


@contextmanager
def _one_thread() -> Iterator[None]:
    """A 64 x 10 layer gains nothing from threads, and times are steadier without."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def _loss(model: nn.Module, data: Digits) -> float:
    return float(nn.functional.cross_entropy(model(data.x), data.y))


@torch.no_grad()
def _accuracy(model: nn.Module, data: Digits) -> float:
    return float((model(data.test_x).argmax(dim=1) == data.test_y).double().mean())


def _bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(_bytes(part) for part in state.values())
    return 8 * len(state) if isinstance(state, list) else 0
