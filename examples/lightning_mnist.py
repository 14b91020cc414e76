"""GraB with Lightning: scikit-learn's digits, which are a small MNIST.

    python examples/lightning_mnist.py --out runs/lightning
    python examples/lightning_mnist.py --out runs/lightning --resume --epochs 6
    python examples/lightning_mnist.py --out runs/lightning --devices 2

Differences from reshuffling are marked (1) to (3).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ordain import GraB
from ordain.integrations.lightning import OrderCallback


class Digits(lightning.LightningModule):
    """A small network, and its data."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        found = load_digits()
        self.data = TensorDataset(torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target))
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.order = GraB(self.net, len(self.data))  # (1) here all processes know of each other

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.batch_size, sampler=self.order.sampler)  # (2) not shuffle=True

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    """Train, save at the end of each epoch, and print."""
    parser = argparse.ArgumentParser(description="Digits in GraB's order, with Lightning.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        devices=options.devices,
        accelerator="cpu",
        callbacks=[OrderCallback(), ModelCheckpoint(options.out, save_last=True)],  # (3) OrderCallback()
        default_root_dir=options.out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Digits(64 // options.devices)
    trainer.fit(module, ckpt_path=options.out / "last.ckpt" if options.resume else None)
    loss = trainer.callback_metrics["loss"]
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, loss {loss:.4f}, {module.order}, in epoch {module.order.epoch}")


if __name__ == "__main__":
    main()
