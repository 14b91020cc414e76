"""The common part of all classification tasks: fixed splits as tensors, the loss, and the number of hits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ordain.errors import InputError
from ordain.study.data import Labelled, Splits
from ordain.study.tasks.task import Problem

Encode = Callable[[Any], Tensor]  # x of some examples -> [n, ...]
_SPLIT_SEED = 0  # the held-out examples do not depend on the seed of a run


class Parts(NamedTuple):
    """Rows of a data set's training file."""

    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    test: NDArray[np.int64]


def split(n: int, *, valid: bool, test: bool, limit: int | None = None) -> Parts:
    """Shuffle ``n`` rows, the same way every time, and hold out a tenth for each set that the data lacks.

    ``limit`` keeps at most that many rows of each part, the first of the same shuffle.

    >>> [len(part) for part in split(20, valid=True, test=False, limit=5)]
    [5, 2, 0]
    """
    tenth = max(1, n // 10)
    rest = n - tenth * (valid + test)
    if rest < 1:
        raise InputError(f"{n} training examples", expected="enough to hold some out", remedy="Use more data.")
    if limit is not None and not 1 <= limit <= rest:
        raise InputError(
            f"--limit {limit}",
            expected=f"1 to {rest:,}, the number of training examples",
            remedy="Leave it out for all of them.",
        )
    train, held = np.split(np.random.default_rng(_SPLIT_SEED).permutation(n), [rest])
    return Parts(train[:limit], held[: tenth * valid][:limit], held[tenth * valid :][:limit])


def few(n: int, limit: int | None) -> NDArray[np.int64]:
    """At most ``limit`` of ``n`` rows, the same every time and from all over the set; otherwise all rows in order."""
    if limit is None or limit >= n:
        return np.arange(n)
    return np.random.default_rng(_SPLIT_SEED).permutation(n)[:limit]


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
    """Cross entropy on the classes of a data set.

    Args:
        splits: of the data set; each split that it lacks is a fixed tenth of its training set.
        build: the model of a seed.
        encode: x as a tensor with one row per example.
        limit: use at most this many examples of each set.
        forward: the logits of rows of x; ``model(x)`` by default.
        scale: takes the training rows and returns the function to apply to all rows.
        chunk: rows to evaluate at once.
        notes: added to those of the data.
    """
    x, y = encode(splits.train.x), _labels(splits.train)
    rows = split(len(y), valid=splits.valid is None, test=splits.test is None, limit=limit)
    scaled = scale(x[rows.train]) if scale else lambda x: x

    def held_out(own: Labelled | None, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        if own is None:
            return scaled(x[rows]), y[rows]
        some = few(len(own.y), limit)
        return scaled(encode(own.x)[some]), _labels(own)[some]

    valid_x, valid_y = held_out(splits.valid, rows.valid)
    test_x, test_y = held_out(splits.test, rows.test)
    missing = [name for name, own in (("validation", splits.valid), ("test", splits.test)) if own is None]
    held = tuple(f"The {name} set is a fixed tenth of the training file." for name in missing)
    return Problem(
        train_x=scaled(x[rows.train]),
        train_y=y[rows.train],
        valid_x=valid_x,
        valid_y=valid_y,
        test_x=test_x,
        test_y=test_y,
        build=build,
        forward=forward or plain_forward,
        loss=nn.functional.cross_entropy,
        correct=hits,
        chunk=chunk,
        notes=(*splits.notes, *held, *notes),
    )


def _labels(labelled: Labelled) -> Tensor:
    return torch.from_numpy(np.array(labelled.y, dtype=np.int64))


def plain_forward(model: nn.Module, x: Tensor) -> Tensor:
    """``model(x)``."""
    output: Tensor = model(x)
    return output


def hits(output: Tensor, y: Tensor) -> tuple[int, int]:
    """The number of targets with the largest of the logits ``[..., classes]``, and of all targets."""
    # Over a vocabulary, argmax takes as long as the loss, and amax a fifth of it. So argmax, which finds the first of
    # equal logits, is computed only for rows whose target has the largest value.
    largest = output.gather(-1, y.unsqueeze(-1)).squeeze(-1) == output.amax(dim=-1)
    return int((output[largest].argmax(dim=-1) == y[largest]).sum()), y.numel()
