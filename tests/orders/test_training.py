"""Whole training runs: the orders found in the user's loop are those of the paper's algorithm, word for word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import Setting, call, doubled, losses
from helpers import BALANCERS, reference_rule
from settings_models import SETTINGS
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from ordain import GraB, _rng, reference
from ordain.balancing import Balancer
from ordain.gradients import per_example_loop

MODELS = {"mlp": 23, "wide": 57, "lenet": 18, "lstm-language-model": 14, "vision-transformer": 13, "bert": 13}
BATCH, EPOCHS, SEED = 5, 3, 4


class Task:
    """A model, its data, and a way to train it that does not know where the order comes from."""

    def __init__(self, setting: Setting, n: int, momentum: float) -> None:
        torch.manual_seed(0)
        self.model = setting.build().double().train()
        self.inputs: Any = doubled(setting.inputs(n))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=momentum)

    def losses(self, indices: Tensor) -> Tensor:
        """[B]."""
        return losses(call(self.model, tree_map(lambda leaf: leaf[indices], self.inputs)), len(indices), 0)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


def word_for_word(task: Task, first: list[int], *, paired: bool, balancer: Balancer) -> list[list[int]]:
    """The orders of the epochs and of the one after: one gradient at a time, and nothing of the engine."""
    n = len(first)
    parameters = list(task.model.parameters())
    d = sum(p.numel() for p in parameters)
    book: Any = (reference.PairGraB if paired else reference.GraB)(first, d)
    orders = [first]
    for epoch in range(EPOCHS):
        book.rule = reference_rule(balancer, n // 2 if paired else n, d)
        u = _rng.uniforms(n, seed=SEED, stream=epoch)
        for start in range(0, n, BATCH):
            batch = torch.tensor(orders[-1][start : start + BATCH])
            rows = per_example_loop(lambda i, batch=batch: task.losses(batch[i : i + 1]).sum(), len(batch), parameters)
            for t, row in enumerate(rows.numpy(), start):
                book.see(row, float(u[t // 2 if paired else t]))
            task.losses(batch).mean().backward()
            task.update()
        orders.append(book.next_order())
    return orders


WAYS = [("mean", "deterministic", 0.9), ("pair", "walk", 0.0)]
OTHER_WAYS = [("mean", "walk", 0.0), ("pair", "deterministic", 0.9)]  # which have nothing to do with the model


@pytest.mark.parametrize(
    ("name", "centering", "balancer", "momentum"),
    [(name, *way) for name in MODELS for way in (WAYS + OTHER_WAYS if name in ("mlp", "bert") else WAYS)],
)
def test_training_finds_the_orders_of_the_reference(name: str, centering: str, balancer: str, momentum: float) -> None:
    setting, n = next(s for s in SETTINGS if s.name == name), MODELS[name]
    task, twin = Task(setting, n, momentum), Task(setting, n, momentum)
    before = task.weights()
    order = GraB(task.model, n, centering=centering, balancer=BALANCERS[balancer], seed=SEED)
    loader: DataLoader[Tensor] = DataLoader(range(n), batch_size=BATCH, sampler=order.sampler)  # type: ignore[arg-type]
    for _ in range(EPOCHS):
        for indices in loader:
            task.losses(indices).mean().backward()
            order.step()
            task.update()
    next(iter(loader))  # the first draw of the next epoch adopts its order
    order.detach()
    found = [order.history(epoch).tolist() for epoch in range(EPOCHS + 1)]
    wanted = word_for_word(twin, found[0], paired=centering == "pair", balancer=BALANCERS[balancer])
    assert found == wanted
    assert len({tuple(one) for one in found}) == EPOCHS + 1  # every epoch learned something
    assert torch.equal(task.weights(), twin.weights())  # and training was not disturbed, to the last bit
    assert not torch.equal(task.weights(), before)
