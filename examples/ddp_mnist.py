"""GraB with DistributedDataParallel: all ranks together visit the examples as one process would.

    torchrun --nproc-per-node 2 examples/ddp_mnist.py --data-dir data/mnist

Logistic regression on MNIST, or on scikit-learn's digits without MNIST's files. --resume goes on from the last epoch,
with any number of ranks that divides the batch. Differences from reshuffling are marked (1) to (4).
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ordain


def main() -> None:
    """Train, print and save."""
    parser = argparse.ArgumentParser(description="Logistic regression in GraB's order, over several processes.")
    parser.add_argument("--data-dir", type=Path, default=Path("data/mnist"), help="with MNIST's train-*-ubyte.gz")
    parser.add_argument("--epochs", type=int, default=5, help="in all, those before --resume included")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--checkpoint", type=Path, default=Path("ddp_mnist.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    name, x, y = load(options.data_dir)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(x.shape[1], 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    order = ordain.GraB(model, len(x))  # (1)
    loader = DataLoader(TensorDataset(x, y), batch_size=options.batch_size // ranks, sampler=order.sampler)  # (2)
    first = 0
    if options.resume:
        saved = ordain.load(options.checkpoint)  # every rank loads the same file
        for part, one in (("model", model), ("optimizer", optimizer), ("order", order)):
            one.load_state_dict(saved[part])
        first = order.resume()  # (3)
    if rank == 0:
        print(f"{name}: {len(x):,} examples, {ranks} ranks, {options.batch_size} examples a step")
    for epoch in range(first, options.epochs):
        before, total = order.sent_bytes, torch.zeros(2, dtype=torch.float64)
        for features, labels in loader:
            loss = nn.functional.cross_entropy(model(features), labels)
            loss.backward()
            order.step()  # (4)
            optimizer.step()
            optimizer.zero_grad()
            total += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(total)
        if rank == 0:
            sent = (order.sent_bytes - before) / len(loader)
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.6f}, the order sent {sent:,.0f} bytes a step")
            ordain.save(options.checkpoint, model=model, optimizer=optimizer, order=order)
    dist.barrier()  # no rank ends while another still saves
    dist.destroy_process_group()


def load(folder: Path) -> tuple[str, Tensor, Tensor]:
    """A name, examples [n, d] with values from 0 to 1, and their labels [n]."""
    images, labels = (folder / f"train-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    if images.exists() and labels.exists():
        pixels = torch.frombuffer(bytearray(gzip.decompress(images.read_bytes())[16:]), dtype=torch.uint8)
        classes = torch.frombuffer(bytearray(gzip.decompress(labels.read_bytes())[8:]), dtype=torch.uint8)
        return "MNIST", pixels.view(len(classes), -1) / 255, classes.long()
    found = load_digits()
    return "digits", torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


if __name__ == "__main__":
    main()
