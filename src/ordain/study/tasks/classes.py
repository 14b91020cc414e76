"""What every classifier's problem shares: its splits as tensors, its loss and its count of hits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ordain.study.data import Labelled, Splits
from ordain.study.tasks.split import few, split
from ordain.study.tasks.task import Problem

__all__ = ["classifier", "hits", "plain_forward"]

Encode = Callable[[Any], Tensor]  # x of some examples -> [n, ...]


def classifier(
    splits: Splits,
    build: Callable[[int], nn.Module],
    *,
    encode: Encode,
    limit: int | None,
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None,
    scale: Callable[[Tensor], Callable[[Tensor], Tensor]] | None = None,
    chunk: int = 4096,
    notes: tuple[str, ...] = (),
) -> Problem:
    """Cross entropy on a data set's classes.

    Args:
        splits: as the data set has them; what it lacks is a fixed tenth of its training set each.
        build: the model of a seed.
        encode: x as a tensor, one row an example.
        limit: use at most this many examples of each set.
        forward: the logits of rows of x; the model's own call by default.
        scale: looks at the training rows and gives what is done to all rows.
        chunk: rows to evaluate at once.
        notes: added to the data's own.
    """
    x, y = encode(splits.train.x), _labels(splits.train)
    parts = split(len(y), valid=splits.valid is None, test=splits.test is None, limit=limit)
    train, valid, test = (torch.from_numpy(rows) for rows in (parts.train, parts.valid, parts.test))
    scaled = scale(x[train]) if scale else _as_it_is
    valid_x, valid_y = _own(splits.valid, encode, limit) or (x[valid], y[valid])
    test_x, test_y = _own(splits.test, encode, limit) or (x[test], y[test])
    missing = [name for name, own in (("validation", splits.valid), ("test", splits.test)) if own is None]
    held = tuple(f"The {name} set is a fixed tenth of the training file." for name in missing)
    return Problem(
        train_x=scaled(x[train]),
        train_y=y[train],
        valid_x=scaled(valid_x),
        valid_y=valid_y,
        test_x=scaled(test_x),
        test_y=test_y,
        build=build,
        forward=forward or plain_forward,
        loss=nn.functional.cross_entropy,
        correct=hits,
        chunk=chunk,
        notes=(*splits.notes, *held, *notes),
    )


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _own(labelled: Labelled | None, encode: Encode, limit: int | None) -> tuple[Tensor, Tensor] | None:
    if labelled is None:
        return None
    y = _labels(labelled)
    rows = torch.from_numpy(few(len(y), limit))
    return encode(labelled.x)[rows], y[rows]


def _labels(labelled: Labelled) -> Tensor:
    return torch.from_numpy(np.array(labelled.y, dtype=np.int64))


def plain_forward(model: nn.Module, x: Tensor) -> Tensor:
    """``model(x)``."""
    output: Tensor = model(x)
    return output


def hits(output: Tensor, y: Tensor) -> tuple[int, int]:
    """Where the largest of ``[..., classes]`` is the target's."""
    # Over a vocabulary argmax takes as long as the loss does, and amax a fifth of it: only rows whose target has the
    # largest value are asked who is first among equals.
    largest = output.gather(-1, y.unsqueeze(-1)).squeeze(-1) == output.amax(dim=-1)
    return int((output[largest].argmax(dim=-1) == y[largest]).sum()), y.numel()
