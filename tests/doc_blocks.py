"""The Python blocks of a Markdown page, what comments before them say, and the names that they may use.

Comments do not show on the page:

    <!-- setup ... -->            code that runs before the next block
    <!-- not run: reason -->      the next block is left out
    <!-- two processes -->        the next block is a script for two processes
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ordain

_BLOCK = re.compile(
    r"((?:<!--(?:(?!-->).)*-->\n)*)```python\n(.*?)```(?:\n\n(?:```\n[^`]*```\n\n)?```text\n(.*?)```)?", re.S
)
_COMMENT = re.compile(r"<!-- (?:(setup)\n(.*?)|not run: (.*?) |(two processes) )-->", re.S)


@dataclass(frozen=True)
class Block:
    """A block of a page; ``output`` is the text block that follows it, perhaps after the command that runs it."""

    code: str
    output: str | None = None
    setup: str = ""
    not_run: str = ""
    two_processes: bool = False


def blocks(page: Path) -> list[Block]:
    """All Python blocks of a page. Raises on a comment before a block that is none of the three."""
    found = []
    for comments, code, output in _BLOCK.findall(page.read_text(encoding="utf-8")):
        said = list(_COMMENT.finditer(comments))
        if len(said) != comments.count("<!--"):
            raise ValueError(f"{page.name}: {comments}")
        setup = "".join(one[2] for one in said if one[1])
        reason = "".join(one[3] or "" for one in said)
        found.append(Block(code, output or None, setup, reason, any(one[4] for one in said)))
    return found


def names() -> dict[str, Any]:
    """What a page may take for granted: a small model, its data, and the names of torch and ordain."""
    torch.manual_seed(0)
    n = 64
    train_set: Any = TensorDataset(torch.randn(n, 4), torch.randint(0, 2, (n,)))
    train_set.targets = train_set.tensors[1]
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    order = ordain.GraB(model, n)
    return {name: getattr(ordain, name) for name in ordain.__all__ if not name.startswith("_")} | {
        "DataLoader": DataLoader,
        "DistributedDataParallel": DistributedDataParallel,
        "TensorDataset": TensorDataset,
        "dist": dist,
        "epochs": 1,
        "loader": DataLoader(train_set, batch_size=16, sampler=order.sampler),
        "loss_fn": nn.CrossEntropyLoss(),
        "model": model,
        "n": n,
        "nn": nn,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "ordain": ordain,
        "order": order,
        "torch": torch,
        "train_set": train_set,
        "z": torch.randn(100, 5),
    }
