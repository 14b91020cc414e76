"""A task, and the tensors and model that it makes from a data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ordain.errors import InputError
from ordain.study.data import load


@dataclass(frozen=True, kw_only=True)
class LoadedTask:
    """Tensors and a model, ready to train. One row of ``train_x`` is one example, the unit of ordering."""

    train_x: Tensor  # [n, ...]
    train_y: Tensor  # [n], or [n, T] where every token has a target
    valid_x: Tensor
    valid_y: Tensor
    test_x: Tensor
    test_y: Tensor
    build: Callable[[int], nn.Module]  # the model with the initial weights of a seed
    forward: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__  # the model's output for rows of x
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy  # the mean over examples (and tokens)
    chunk: int = 4096  # rows to evaluate at once
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None  # rows of x as a training step sees them
    notes: tuple[str, ...] = ()  # what a reader of the results must know about the data and the weights

    @property
    def labels(self) -> Tensor | None:
        """``[n]``: the class of each training example; None where every token has a target."""
        return self.train_y if self.train_y.ndim == 1 and not self.train_y.is_floating_point() else None


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """How a task is trained unless the command says otherwise."""

    batch_size: int
    rates: tuple[float, ...]
    epochs: int
    momentum: float = 0.9
    weight_decay: float = 1e-4
    plateau: bool = False  # divide the rate by ten when the validation loss stagnates (the paper's WikiText-2)
    clip: float | None = None  # the largest norm of a batch's gradient


@dataclass(frozen=True)
class Task:
    """A data set, a model and how to train it."""

    name: str  # on the command line
    title: str  # in tables and figures
    data: str  # the data set's name in ``ordain.study.data``
    model: str
    examples: int  # in the training set
    parameters: int  # d, the length of a gradient
    seconds_per_epoch: float  # of random reshuffling on one thread, evaluation included; measured once, rough
    defaults: Defaults
    make: Callable[..., LoadedTask]  # from the data set's splits, with ``limit``
    takes_weights: bool = False  # can start from pretrained weights: ``make`` gets ``folder``, ``weights``, ``verify``

    def load(
        self, folder: Path, limit: int | None = None, *, weights: str | Path | None = None, verify: bool = True
    ) -> LoadedTask:
        """Read at most ``limit`` examples of each set, and describe the model; ``weights``: see ``bert.py``."""
        if weights is not None and not self.takes_weights:
            raise InputError(f"--weights with {self.name}", expected="a BERT's task", remedy="Leave it out.")
        more = {"folder": folder, "weights": weights, "verify": verify} if self.takes_weights else {}
        return self.make(load(self.data, folder, verify=verify), limit=limit, **more)


def seeded(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """Build a model whose weights depend only on a seed, without changing torch's global generator."""

    def build(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    return build
