"""GraB over blocks of a token file that is too large to be read at random: nanoGPT's train.bin.

    python examples/token_blocks.py --data train.bin --out runs/blocks

A unit is a block of BATCH sequences that follow each other in the file: read at once, trained on as one batch and
ordered by its gradient. Differences from reshuffling blocks are marked (1) and (2).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ordain

CONTEXT, BATCH = 32, 8


class Tokens(Dataset[Tensor]):
    """Sequences of CONTEXT tokens and the next one; what does not fill a block is left out."""

    def __init__(self, path: Path) -> None:
        self.path, self.blocks = path, (path.stat().st_size // 2 - 1) // (CONTEXT * BATCH)

    def __len__(self) -> int:
        return self.blocks * BATCH

    def __getitems__(self, indices: list[int]) -> list[Tensor]:  # the neighbours of one block: a single read
        tokens = np.memmap(self.path, dtype=np.uint16, mode="r")  # opened here, so that workers can do it too
        first, end = indices[0] * CONTEXT, (indices[-1] + 1) * CONTEXT
        block = torch.from_numpy(tokens[first : end + 1].astype(np.int64))
        return list(block.unfold(0, CONTEXT + 1, CONTEXT))


class Model(nn.Module):
    """Any language model would do."""

    def __init__(self, vocabulary: int, width: int = 32) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.mix = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.words(x))[0])


parser = argparse.ArgumentParser(description="A small language model on blocks of a token file, in GraB's order.")
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--vocabulary", type=int, default=50304)
parser.add_argument("--resume", action="store_true")
if __name__ == "__main__":
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    data, model = Tokens(options.data), Model(options.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    units = {"group": BATCH, "contiguous": True}  # the same for ordain.RandomReshuffling(data, **units)
    order = ordain.GraB(model, data, centering="pair", gradients="microbatch", **units)  # (1)
    loader = DataLoader(data, batch_size=BATCH, sampler=order.sampler, num_workers=1)
    run, path = {"model": model, "optimizer": optimizer, "order": order}, options.out / "run.pt"
    for name, saved in ordain.load(path).items() if options.resume else ():
        run[name].load_state_dict(saved)
    for epoch in range(order.resume(), options.epochs):
        losses = []
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])
            loss.backward()
            order.step()  # (2)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        ordain.save(path, **run)
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f} over {data.blocks} blocks, {order}")
