"""GraB with Accelerate: scikit-learn's digits, on one process or several.

    accelerate launch --cpu --num_processes 2 examples/accelerate_ddp.py --out runs/accelerate
    accelerate launch --cpu --num_processes 2 examples/accelerate_ddp.py --out runs/accelerate --resume --epochs 6

Differences from reshuffling are marked (1) to (5).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ordain import GraB
from ordain.integrations.accelerate import prepare


def main() -> None:
    """Train, save at the end of each epoch, and print."""
    parser = argparse.ArgumentParser(description="Digits in GraB's order, with Accelerate.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    found = load_digits()
    data = TensorDataset(torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    order = GraB(model, len(data))  # (1)
    each = 32 // accelerator.num_processes
    loader = DataLoader(data, batch_size=each, sampler=order.sampler)  # (2) not shuffle=True
    loader = prepare(accelerator, order, loader)  # (3) not accelerator.prepare(loader)
    accelerator.register_for_checkpointing(order)

    first = 0
    if options.resume:
        accelerator.load_state(str(options.out))
        first = order.resume()  # (4) not skip_first_batches
    for epoch in range(first, options.epochs):
        total = torch.zeros(2, device=accelerator.device)
        for features, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(features), labels)
                accelerator.backward(loss)
                order.step()  # (5)
                optimizer.step()
                optimizer.zero_grad()
            total += torch.tensor([loss.item() * len(labels), len(labels)], device=accelerator.device)
        total = accelerator.reduce(total)
        accelerator.print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.4f}, {order}")
        accelerator.save_state(str(options.out))
    accelerator.wait_for_everyone()  # no process ends while another still saves
    accelerator.end_training()


if __name__ == "__main__":
    main()
