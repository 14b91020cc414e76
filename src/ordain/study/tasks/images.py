"""LeNet on CIFAR-10 (the paper's second task)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ordain.study.data import Labelled, Splits
from ordain.study.tasks.classification import classifier, labels
from ordain.study.tasks.task import LoadedTask, seeded


def lenet() -> nn.Module:
    """LeNet-5 for 3 x 32 x 32: convolutions of 6, 16 and 120 channels, then 84 and 10 units."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 120, 5), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def lenet_on_cifar10(splits: Splits, *, limit: int | None) -> LoadedTask:
    """Pixels in [-1, 1], no augmentation."""
    notes = ("Pixels are scaled to [-1, 1]; there is no augmentation.",)

    def encode(part: Labelled) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(np.array(part.x, dtype=np.float32)) / 127.5 - 1, labels(part)

    return classifier(splits, seeded(lenet), encode=encode, limit=limit, chunk=1000, notes=notes)
