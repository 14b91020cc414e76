"""Training runs that can be stopped anywhere, saved, and taken up again by somebody who knows only the file."""

from __future__ import annotations

import copy
from typing import Any

import torch
from helpers import Regression, reloaded, small_model
from helpers import build as build_order
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

N, BATCH, EPOCHS = 11, 3, 3
STEPS = -(-N // BATCH)  # an epoch


class Indexed(Dataset[tuple[Tensor, Tensor, int]]):
    """Examples that say which they are."""

    def __init__(self, n: int) -> None:
        self.data = Regression(n)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return (*self.data[index], index)


def linear() -> nn.Module:
    """One small layer in float32: the whole step is one compiled loop."""
    torch.manual_seed(0)
    return nn.Linear(5, 3)


class Run:
    """A loop with momentum. ``loader`` keywords go to the loader; ``stateful`` makes it torchdata's."""

    def __init__(self, name: str, *, build: Any = small_model, stateful: bool = False, **loader: Any) -> None:
        self.model = build()
        self.dtype = next(self.model.parameters()).dtype
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.order = build_order(name, N, seed=1, model=self.model)
        kind: Any = StatefulDataLoader if stateful else DataLoader
        options = {"batch_size": BATCH, "sampler": self.order.sampler} | loader
        self.loader = kind(Indexed(N), **options)
        self.stateful = stateful
        self.seen: list[int] = []
        self.epoch, self.steps = 0, 0
        self.saved: dict[str, Any] = {}

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> None:
        nn.functional.cross_entropy(self.model(x.to(self.dtype)), y).backward()
        self.order.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += index.tolist()
        self.steps += 1

    def go(self, stop: int | None = None, *, kept: list[Any] | None = None) -> Run:
        """Train to the end, or until it is ``saved`` after ``stop`` steps; -k: after the loop of epoch k - 1.

        ``kept`` gets what is saved after each step.
        """
        for epoch in range(self.epoch, EPOCHS):
            for batch in self.loader:
                self.step(*batch)
                if kept is not None:
                    kept.append(self.save(epoch).saved)
                if self.steps == stop:
                    return self.save(epoch)
            if stop == -1 - epoch:
                return self.save(epoch + 1)
        return self

    def objects(self) -> dict[str, Any]:
        found = {"model": self.model, "optimizer": self.optimizer, "order": self.order}
        return found | ({"loader": self.loader} if self.stateful else {})

    def save(self, epoch: int) -> Run:
        self.saved = reloaded({name: one.state_dict() for name, one in self.objects().items()} | {"epoch": epoch})
        return self

    def load(self, saved: dict[str, Any], *, done: int | None = None, loader: bool = False) -> Run:
        """Take up a saved run: by the order alone, or by the loader's state too."""
        for name, one in self.objects().items():
            if name != "loader" or loader:
                one.load_state_dict(copy.deepcopy(saved[name]))  # an optimizer goes on with the tensors it is given
        self.epoch = saved["epoch"] if loader else self.order.resume(done)
        return self

    def end(self) -> list[Any]:
        """All that an interruption must not change, to the last bit."""
        weights = nn.utils.parameters_to_vector(self.model.parameters()).tolist()
        orders = [self.order.history(epoch).tolist() for epoch in range(self.order.epoch + 1)]
        momentum = [state["momentum_buffer"].tolist() for state in self.optimizer.state_dict()["state"].values()]
        return [weights, momentum, orders, listed(self.order.state_dict())]


def listed(state: Any) -> Any:
    """A state with its tensors as lists, so that == compares it."""
    if isinstance(state, dict):
        return {name: listed(one) for name, one in state.items()}
    return state.tolist() if isinstance(state, Tensor) else state
