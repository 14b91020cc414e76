"""nanoGPT's model, as published, on the characters of a module of the standard library.

    git clone https://github.com/karpathy/nanoGPT
    PYTHONPATH=nanoGPT python examples/nanogpt.py

Learned positions, tied embeddings, dropout, AdamW. Differences from reshuffling are marked (1) to (3).
"""

from __future__ import annotations

import argparse
import inspect

import torch
from model import GPT, GPTConfig  # nanoGPT's model.py
from torch.utils.data import DataLoader, TensorDataset

from ordain import GraB

LENGTH, TOKENS = 32, 128


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(description="nanoGPT in GraB's order.")
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    codes = torch.tensor([min(ord(one), TOKENS - 1) for one in inspect.getsource(argparse)])
    texts = codes[: options.examples * (LENGTH + 1)].view(-1, LENGTH + 1)
    data = TensorDataset(texts[:, :-1].contiguous(), texts[:, 1:].contiguous())
    torch.manual_seed(0)
    model = GPT(GPTConfig(LENGTH, TOKENS, n_layer=2, n_head=2, n_embd=32, dropout=0.1, bias=False))
    optimizer = model.configure_optimizers(weight_decay=0.1, learning_rate=3e-3, betas=(0.9, 0.95), device_type="cpu")
    order = GraB(model, len(data), centering="pair")  # (1)
    loader = DataLoader(data, batch_size=16, sampler=order.sampler)  # (2) not shuffle=True
    for epoch in range(options.epochs):
        for ids, targets in loader:
            _, loss = model(ids, targets)
            loss.backward()
            order.step()  # (3)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f} of the last batch, {order}")


if __name__ == "__main__":
    main()
