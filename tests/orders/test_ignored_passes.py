"""Second passes over a batch, and losses of several examples: what counts is what the loop says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from given_source import GivenSource
from helpers import Regression, small_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, normalize

from ordain import GraB, RandomReshuffling
from ordain.errors import StepError
from ordain.gradients import ExactSource
from ordain.orders import Order

N, BATCH, EPOCHS = 13, 4, 2
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


class Training:
    """Each kind of step under an order that watches."""

    def __init__(self, gradients: str) -> None:
        torch.manual_seed(0)
        self.model = small_model()
        self.order: Order = GraB(self.model, N, gradients=gradients)
        self.teacher = copy.deepcopy(self.model)  # takes the hooks along
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def sam(self, x: Tensor, y: Tensor) -> None:
        plain(self.model, x, y).backward()
        self.order.step()
        moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in self.model.parameters() if p.grad is not None]
        self.moved(moves, +1)
        self.optimizer.zero_grad()
        with self.order.ignore():
            plain(self.model, x, y).backward()
        self.moved(moves, -1)
        self.optimizer.step()

    def moved(self, moves: list[Tensor], sign: int) -> None:
        with torch.no_grad():
            for p, move in zip(self.model.parameters(), moves, strict=True):
                p.add_(move, alpha=sign)

    def lbfgs(self, x: Tensor, y: Tensor) -> None:
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=4)
        evaluations = 0

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            self.optimizer.zero_grad()
            if evaluations == 1:
                loss = plain(self.model, x, y)
                loss.backward()
                self.order.step()
            else:
                with self.order.ignore():
                    loss = plain(self.model, x, y)
                    loss.backward()
            return loss

        self.optimizer.step(closure)
        assert evaluations > 1

    def adversarial(self, x: Tensor, y: Tensor) -> None:
        with self.order.ignore():
            inputs = x.clone().requires_grad_()
            plain(self.model, inputs, y).backward()
        assert inputs.grad is not None
        self.optimizer.zero_grad()
        worse = (x + 0.1 * inputs.grad.sign()).detach()
        cross_entropy(self.model(worse), y).backward()
        self.order.step()
        self.optimizer.step()

    def r_drop(self, x: Tensor, y: Tensor) -> None:
        first = self.model(x)
        with self.order.ignore():
            second = self.model(x + 0.01)
        (r_drop_loss(first, y) + r_drop_loss(second, y) + apart(first, second)).backward()
        self.order.step()
        self.optimizer.step()

    def penalty(self, x: Tensor, y: Tensor) -> None:
        plain(self.model, x, y).backward()
        with self.order.ignore():
            inputs = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.model(inputs).sum(), inputs, create_graph=True)
            (0.1 * slope.square().sum(dim=1).mean()).backward()
        self.order.step()
        self.optimizer.step()

    def taught(self, x: Tensor, y: Tensor) -> None:
        with self.order.ignore():
            own = self.model(x + 0.1).detach()  # in train mode
        mse_loss(self.model(x), own + self.teacher(x).detach()).backward()
        self.order.step()
        self.optimizer.step()


def r_drop_loss(logits: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(logits, y) / 2


def apart(first: Tensor, second: Tensor) -> Tensor:
    return kl_div(log_softmax(first, 1), log_softmax(second, 1), reduction="batchmean", log_target=True)


def r_drop_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Through the outputs that count."""
    first, second = model(x), model(x + 0.01).detach()
    return r_drop_loss(first, y) + apart(first, second)


def adversarial_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    inputs = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(model(inputs), y), inputs)
    return cross_entropy(model((x + 0.1 * slope.sign()).detach()), y)


def taught_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), (model(x + 0.1) + small_model()(x)).detach())  # the teacher is the first model


ROWS: dict[str, Loss] = {
    "sam": plain,
    "lbfgs": plain,
    "adversarial": adversarial_row,
    "r_drop": r_drop_row,
    "penalty": plain,
    "taught": taught_row,
}


def batches(order: Order) -> Iterator[list[int]]:
    indices = list(order.sampler)
    return (indices[lo : lo + BATCH] for lo in range(0, N, BATCH))


@pytest.mark.parametrize("gradients", ["exact", "func"])
@pytest.mark.parametrize("kind", ROWS)
def test_passes_that_do_not_count(kind: str, gradients: str) -> None:
    run, told, data = Training(gradients), GraB(None, N), Regression(N)
    for _ in range(EPOCHS):
        for batch, same in zip(batches(run.order), batches(told), strict=True):
            assert batch == same
            x, y = data.x[batch], data.y[batch]
            model = copy.deepcopy(run.model)
            rows = [
                torch.cat(
                    [
                        g.reshape(-1)
                        for g in torch.autograd.grad(
                            ROWS[kind](model, x[i : i + 1], y[i : i + 1]), [*model.parameters()]
                        )
                    ]
                )
                for i in range(len(x))
            ]
            told.observe(torch.stack(rows))
            run.optimizer.zero_grad()
            getattr(run, kind)(x, y)
    assert list(run.order.sampler) == list(told.sampler)
    found, wanted = (order.state_dict()["vectors"] for order in (run.order, told))
    for name, vector in found.items():
        torch.testing.assert_close(vector, wanted[name])


def test_orders_without_a_source_ignore_nothing() -> None:
    for order in (RandomReshuffling(N), GraB(None, N)):
        with order.ignore():
            list(order.sampler)
    model = small_model()
    order = GraB(model, N)
    order.detach()
    with order.ignore():
        model(torch.ones(1, 5).double())


def test_a_source_that_cannot_ignore_says_so() -> None:
    order = GraB(nn.Linear(1, 1), N, gradients=GivenSource.of(d=3))
    with pytest.raises(StepError, match=r"ignore\(\) with a source of type GivenSource"):
        order.ignore()


# --- losses of several examples ---------------------------------------------------------------------


def contrastive(outputs: Tensor) -> Tensor:
    """In-batch: each example beside all others."""
    unit = normalize(outputs)
    scores = unit @ unit.roll(1, 0).T / 0.3
    return cross_entropy(scores, torch.arange(len(scores)))


def pairwise(outputs: Tensor) -> Tensor:
    scores = outputs.sum(dim=1)
    return nn.functional.softplus(scores[:, None] - scores[None, :]).mean()


def standardised(outputs: Tensor) -> Tensor:
    return (((outputs - outputs.mean(0)) / outputs.std(0)) * torch.linspace(0, 1, 3)).sin().mean()


@pytest.mark.parametrize("loss", [contrastive, pairwise, standardised])
def test_the_row_of_an_example_in_a_loss_of_all(loss: Callable[[Tensor], Tensor]) -> None:
    """The gradient through its own outputs, times B; the rows' mean is the batch's gradient."""
    model, x = small_model(), Regression(BATCH).x
    source = ExactSource(model)
    loss(model(x)).backward()
    ((batch, _),) = source.collect()
    source.detach()
    rows = []
    for i in range(BATCH):
        outputs = model(x)
        own = torch.where(torch.arange(BATCH)[:, None] == i, outputs, outputs.detach())
        grads = torch.autograd.grad(loss(own), list(model.parameters()))
        rows.append(BATCH * torch.cat([g.reshape(-1) for g in grads]))
    torch.testing.assert_close(batch.rows(), torch.stack(rows))
    whole = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(batch.rows().mean(dim=0), whole)
