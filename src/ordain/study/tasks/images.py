"""LeNet on CIFAR-10 (the paper's second task); a small ResNet, and augmentation."""

from __future__ import annotations

from collections.abc import Callable

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


class Residual(nn.Module):
    """Two convolutions with batch normalisation, and a way past them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[B, width, H, W]`` to the same."""
        return torch.relu(x + self.body(x))


def resnet() -> nn.Module:
    """Three residual blocks of 16, 32 and 64 channels with batch normalisation, for 3 x 32 x 32."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), Residual(16), nn.Conv2d(16, 32, 3, stride=2, padding=1)),
        *(Residual(32), nn.Conv2d(32, 64, 3, stride=2, padding=1), Residual(64)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def crop_and_flip(x: Tensor, random: torch.Generator) -> Tensor:
    """``[B, C, H, W]``: each image moved by up to 4 pixels (zeros come in) and, half of the time, mirrored."""
    count, channels, height, width = x.shape
    padded = nn.functional.pad(x, (4, 4, 4, 4))
    dy, dx = torch.randint(0, 9, (2, count, 1), generator=random)
    mirrored = torch.rand(count, 1, generator=random) < 0.5
    rows, columns = torch.arange(height), torch.arange(width)
    columns = dx + torch.where(mirrored, width - 1 - columns, columns)
    image, channel = torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return padded[image, channel, (dy + rows)[:, None, :, None], columns[:, None, None, :]]


def on_cifar10(
    splits: Splits, *, limit: int | None, model: Callable[[], nn.Module] = lenet, augmented: bool = False
) -> LoadedTask:
    """Pixels in [-1, 1]."""
    how = "random crops and mirror images" if augmented else "no augmentation"
    notes = (f"Pixels are scaled to [-1, 1]; there {'are' if augmented else 'is'} {how}.",)

    def encode(part: Labelled) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(np.array(part.x, dtype=np.float32)) / 127.5 - 1, labels(part)

    augment = crop_and_flip if augmented else None
    return classifier(splits, seeded(model), encode=encode, limit=limit, chunk=400, augment=augment, notes=notes)
