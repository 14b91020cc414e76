"""A linear probe on a frozen backbone, in an order of herding: the head's gradients are few enough to store them all.

    python examples/linear_probe.py

Differences from reshuffling are marked (1) to (3). Put a pretrained backbone in place of the random one.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ordain import Herding


class Probe(nn.Module):
    """A backbone that is not trained, with batch normalisation, and a linear layer that is."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        ).requires_grad_(False)
        self.head = nn.Linear(256, 10)

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(images)
        return self.head(features)


def main() -> None:
    """Train the head, and print."""
    parser = argparse.ArgumentParser(description="A linear probe in an order of herding.")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    data = TensorDataset(images, torch.tensor(found.target))
    torch.manual_seed(0)
    model = Probe()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05)
    order = Herding(model, len(data), params="head", sketch=1024)  # (1)
    loader = DataLoader(data, batch_size=32, sampler=order.sampler)  # (2) not shuffle=True
    for epoch in range(options.epochs):
        total = 0.0
        for batch, labels in loader:
            loss = nn.functional.cross_entropy(model(batch), labels)
            loss.backward()
            order.step()  # (3)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(labels)
        print(f"epoch {epoch + 1}: loss {total / len(data):.4f}, {order}")


if __name__ == "__main__":
    main()
