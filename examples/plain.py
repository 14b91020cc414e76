"""GraB in a plain PyTorch loop: scikit-learn's digits.

    python examples/plain.py --out runs/plain
    python examples/plain.py --out runs/plain --epochs 6 --resume

Differences from reshuffling are marked (1) to (4); without --resume, (3) is not needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ordain


def main() -> None:
    """Train, save at the end of each epoch, and print."""
    parser = argparse.ArgumentParser(description="Digits in GraB's order.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3, help="in all, those before --resume included")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    found = load_digits()
    data = TensorDataset(torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = ordain.GraB(model, len(data))  # (1)
    loader = DataLoader(data, batch_size=32, sampler=order.sampler)  # (2) not shuffle=True

    first, file = 0, options.out / "plain.pt"
    if options.resume:
        saved = ordain.load(file)
        for name, one in (("model", model), ("optimizer", optimizer), ("order", order)):
            one.load_state_dict(saved[name])
        first = order.resume()  # (3)
    for epoch in range(first, options.epochs):
        total = 0.0
        for features, labels in loader:
            loss = nn.functional.cross_entropy(model(features), labels)
            loss.backward()
            order.step()  # (4)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(labels)
        print(f"epoch {epoch + 1}: loss {total / len(data):.4f}, {order}")
        file.parent.mkdir(parents=True, exist_ok=True)
        ordain.save(file, model=model, optimizer=optimizer, order=order)


if __name__ == "__main__":
    main()
