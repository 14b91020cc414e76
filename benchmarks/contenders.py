"""Ways to train by GraB that others offer, and ours, each as a function that trains for one epoch.

The others find a batch's per-example gradients as rows ``[B, d]``; a plain loop over the rows then signs them
(Algorithm 4: stale mean, deterministic signs). ``grab-sampler`` brings its own loop.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import BatchSampler, Sampler

from benchmarks.models import TinyBert, logistic, mlp
from benchmarks.step import images, tokens
from ordain import GraB, Herding, Order, RandomReshuffling, herding
from ordain.study.tasks.images import lenet

Epoch = Callable[[], None]
Rows = Callable[[Tensor, Tensor], Tensor]  # a batch's per-example gradients [B, d]; leaves p.grad of their mean

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "logistic": (logistic, images(784)),
    "mlp": (mlp, images(1024)),
    "lenet": (lenet, images(3, 32, 32)),
    "bert": (lambda: Bert(), tokens(32, 30_522, classes=2)),
}


class Bert(TinyBert):
    """The same with positions for each example: Opacus and BackPACK need a batch dimension at every layer."""

    def forward(self, ids: Tensor) -> Tensor:
        where = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        x = self.blocks(self.norm(self.tokens(ids) + self.positions(where)))
        return self.head(self.pool(x[:, 0]).tanh())


@dataclass(frozen=True)
class Data:
    """An epoch's examples, and how they are batched."""

    x: Tensor
    y: Tensor
    size: int

    def batches(self, order: Sequence[int] | Any) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in BatchSampler(order, self.size, drop_last=False):
            yield self.x[batch], self.y[batch]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


# --- ours -----------------------------------------------------------------------------------------


def ours(make: Callable[[nn.Module, int], Order]) -> Callable[[nn.Module, Data], Epoch]:
    def build(model: nn.Module, data: Data) -> Epoch:
        order, optimizer = make(model, len(data.x)), optimizer_of(model)

        def epoch() -> None:  # the next order is adopted at the first draw: each epoch adopts one
            for x, y in data.batches(order.sampler):
                nn.functional.cross_entropy(model(x), y).backward()
                order.step()
                optimizer.step()
                optimizer.zero_grad()

        return epoch

    return build


# --- rows, and a plain loop over them -------------------------------------------------------------


class SequentialSigns:
    """Algorithm 4, one row after the other."""

    def __init__(self, n: int, d: int) -> None:
        self.s, self.mean, self.total = torch.zeros(3, d).unbind()
        self.n, self.order, self.signs = n, torch.randperm(n), []

    def sign(self, g: Tensor) -> None:
        z = g - self.mean
        e = 1 if torch.dot(self.s, z) < 0 else -1
        self.s.add_(z, alpha=e)
        self.total.add_(g, alpha=1 / self.n)
        self.signs.append(e)

    def sign_all(self, rows: Tensor) -> None:
        for g in rows:  # in a function, so that no view keeps the rows alive
            self.sign(g)

    def end_epoch(self) -> None:
        self.order = herding.reorder(torch.tensor(self.signs), self.order)
        self.mean, self.total = self.total, self.mean.zero_()
        self.s.zero_()
        self.signs = []


def by_rows(make: Callable[[nn.Module], Rows]) -> Callable[[nn.Module, Data], Epoch]:
    def build(model: nn.Module, data: Data) -> Epoch:
        rows, optimizer = make(model), optimizer_of(model)
        signs = SequentialSigns(len(data.x), sum(p.numel() for p in model.parameters()))

        def epoch() -> None:
            for x, y in data.batches(signs.order.tolist()):
                signs.sign_all(rows(x, y))
                optimizer.step()
                optimizer.zero_grad()
            signs.end_epoch()

        return epoch

    return build


def flat(grads: Iterator[Tensor] | Sequence[Tensor]) -> Tensor:
    return torch.cat([g.flatten(1) for g in grads], dim=1)


def func_grads(model: nn.Module) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """torch.func: ``vmap(grad)``; the batch's gradient is the mean of the rows, so there is no other backward."""
    params = dict(model.named_parameters())

    def loss_of_one(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, values, (x[None],)), y[None])

    each = vmap(grad(loss_of_one), in_dims=(None, 0, 0))

    def grads(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = each({name: p.detach() for name, p in params.items()}, x, y)
        for name, p in params.items():
            p.grad = found[name].mean(dim=0)
        return found

    return grads


def func_rows(model: nn.Module) -> Rows:
    grads = func_grads(model)
    return lambda x, y: flat(grads(x, y).values())


def opacus_rows(model: nn.Module) -> Rows:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model, loss_reduction="mean")

    def rows(x: Tensor, y: Tensor) -> Tensor:
        nn.functional.cross_entropy(wrapped(x), y).backward()
        found: Tensor = flat([p.grad_sample for p in model.parameters()])
        for p in model.parameters():
            p.grad_sample = None
        return found

    return rows


def backpack_rows(model: nn.Module) -> Rows:
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    extended, loss = extend(model), extend(nn.CrossEntropyLoss())

    def rows(x: Tensor, y: Tensor) -> Tensor:
        with backpack(BatchGrad()):
            loss(extended(x), y).backward()
        if bare := [name for name, p in model.named_parameters() if not hasattr(p, "grad_batch")]:
            raise NotImplementedError(f"no per-example gradient of {len(bare)} parameters ({bare[0]}, ...)")
        found = flat([p.grad_batch for p in model.parameters()]).mul_(len(x))  # they come as shares of the mean
        for p in model.parameters():
            del p.grad_batch
        return found

    return rows


# --- with loops of their own ----------------------------------------------------------------------


def micro_batches(model: nn.Module, data: Data) -> Epoch:
    """One example at a time, as in the paper's code: signed as it comes, its gradient added to the batch's."""
    params, optimizer = list(model.parameters()), optimizer_of(model)
    signs = SequentialSigns(len(data.x), sum(p.numel() for p in params))

    def epoch() -> None:
        for x, y in data.batches(signs.order.tolist()):
            sums = [torch.zeros_like(p) for p in params]
            for one, label in zip(x.split(1), y.split(1), strict=True):
                grads = torch.autograd.grad(nn.functional.cross_entropy(model(one), label), params)
                signs.sign(torch.cat([g.flatten() for g in grads]))
                torch._foreach_add_(sums, grads, alpha=1 / len(x))
            for p, total in zip(params, sums, strict=True):
                p.grad = total
            optimizer.step()
            optimizer.zero_grad()
        signs.end_epoch()

    return epoch


def grab_sampler(model: nn.Module, data: Data) -> Epoch:
    """The package's mean balancing, fed with torch.func's gradients as its documentation shows."""
    with grab_sampler_imports():
        from grabsampler import GraBSampler

        sampler = GraBSampler(range(len(data.x)), dict(model.named_parameters()), balance_type="mean", device="cpu")
    grads, optimizer = func_grads(model), optimizer_of(model)

    def epoch() -> None:
        for x, y in data.batches(sampler):
            sampler.step(grads(x, y))
            optimizer.step()
            optimizer.zero_grad()

    return epoch


@contextmanager
def grab_sampler_imports() -> Iterator[None]:
    """What grab-sampler 0.1.3 needs to run under today's torch.

    It imports torch-sparse, which must be compiled, for a projection that is not used here; and it passes
    ``Sampler.__init__`` the dataset, which torch no longer takes.
    """
    sparse = types.ModuleType("torch_sparse")
    sparse.SparseTensor = object  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, {"torch_sparse": sparse}),
        mock.patch.object(Sampler, "__init__", return_value=None),
    ):
        yield


OURS: dict[str, Callable[[nn.Module, Data], Epoch]] = {
    "RR": ours(lambda model, n: RandomReshuffling(n)),
    "mean": ours(lambda model, n: GraB(model, n)),
    "pair": ours(lambda model, n: GraB(model, n, centering="pair")),
    "pair, head": ours(lambda model, n: GraB(model, n, params="head", centering="pair")),
    "herding, head": ours(lambda model, n: Herding(model, n, params="head", sketch=1024)),
}
BY_ROWS: dict[str, Callable[[nn.Module], Rows]] = {
    "torch.func": func_rows,
    "Opacus": opacus_rows,
    "BackPACK": backpack_rows,
}
PEERS: dict[str, Callable[[nn.Module, Data], Epoch]] = {
    **{name: by_rows(make) for name, make in BY_ROWS.items()},
    "grab-sampler": grab_sampler,
    "micro-batches": micro_batches,
}
