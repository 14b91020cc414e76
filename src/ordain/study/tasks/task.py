"""What is trained: a problem in tensors, and the task that makes it out of a data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ordain.errors import InputError

__all__ = ["Defaults", "Load", "Problem", "Request", "Task", "seeded"]


@dataclass(frozen=True)
class Problem:
    """Tensors and a model, ready to train. One row of ``train_x`` is one example, the unit of ordering.

    Attributes:
        train_x: ``[n, ...]``.
        train_y: ``[n]``, or ``[n, T]`` where every token has a target.
        valid_x: of the validation set, like ``train_x``.
        valid_y: of the validation set, like ``train_y``.
        test_x: of the labelled test set, or None.
        test_y: of the labelled test set, or None.
        build: a model with the initial weights of a seed.
        forward: the model's output on rows of x.
        loss: the mean over examples (and tokens) as a scalar.
        correct: how many predictions are right, and of how many.
        chunk: how many rows to evaluate at once.
        notes: what a reader of the results must know of the data and the weights.
    """

    train_x: Tensor
    train_y: Tensor
    valid_x: Tensor
    valid_y: Tensor
    test_x: Tensor | None
    test_y: Tensor | None
    build: Callable[[int], nn.Module]
    forward: Callable[[nn.Module, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    correct: Callable[[Tensor, Tensor], tuple[int, int]]
    chunk: int = 4096
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Defaults:
    """How a task is trained unless the command says otherwise.

    Attributes:
        batch_size: examples to a step.
        rates: learning rates.
        epochs: passes over the training set.
        momentum: of SGD.
        weight_decay: of SGD.
        plateau: divide the rate by ten where the validation loss stands still (the paper's WikiText-2).
        clip: the largest norm of a batch's gradient, or None.
    """

    batch_size: int
    rates: tuple[float, ...]
    epochs: int
    momentum: float = 0.9
    weight_decay: float = 1e-4
    plateau: bool = False
    clip: float | None = None


@dataclass(frozen=True)
class Request:
    """What a task is made from.

    Attributes:
        folder: of all data sets.
        limit: use at most this many examples of each set.
        weights: to start from, a folder or a model of the hub: see :func:`ordain.study.tasks.weights.find_weights`.
        verify: compare the data with their publishers' checksums and counts.
    """

    folder: Path
    limit: int | None = None
    weights: str | Path | None = None
    verify: bool = True


Load = Callable[[Request], Problem]


@dataclass(frozen=True)
class Task:
    """A data set, a model and how to train it.

    Attributes:
        name: on the command line.
        title: for tables and figures.
        data: the data set's name in ``ordain.study.data``.
        model: in words.
        examples: how many there are to train on.
        parameters: d, the length of a gradient.
        seconds_per_epoch: of random reshuffling on one thread, evaluation included; measured once, rough.
        defaults: how it is trained.
        make: reads the data and makes the problem.
        takes_weights: can it start from trained weights?
    """

    name: str
    title: str
    data: str
    model: str
    examples: int
    parameters: int
    seconds_per_epoch: float
    defaults: Defaults
    make: Load
    takes_weights: bool = False

    def load(
        self, folder: Path, limit: int | None = None, *, weights: str | Path | None = None, verify: bool = True
    ) -> Problem:
        """The problem, from files in ``folder``: see :class:`Request`."""
        if weights is not None and not self.takes_weights:
            raise InputError(f"--weights with {self.name}", expected="a BERT's task", remedy="Leave it out.")
        return self.make(Request(folder, limit, weights, verify))


def seeded(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """A model whose weights follow from a seed, leaving torch's generator as it was."""

    def build(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    return build
