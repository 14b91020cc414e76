"""Classification: fixed splits as tensors, the loss, the number of hits; and logistic regression on rows of numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ordain.errors import InputError
from ordain.study.data import Labelled, Splits
from ordain.study.tasks.task import LoadedTask, seeded

Indices = NDArray[np.int64]
Scale = Callable[[Tensor], Callable[[Tensor], Tensor]]  # training rows -> the function to apply to all rows
_SPLIT_SEED = 0  # the held-out examples do not depend on the seed of a run


def split(n: int, *, valid: bool, test: bool, limit: int | None = None) -> tuple[Indices, Indices, Indices]:
    """Rows to train, validate and test with: a fixed shuffle of ``n``, with a tenth for each set that the data lacks.

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
    return train[:limit], held[: tenth * valid][:limit], held[tenth * valid :][:limit]


def few(n: int, limit: int | None) -> Indices:
    """At most ``limit`` of ``n`` rows, the same every time and from all over the set; otherwise all rows in order."""
    if limit is None or limit >= n:
        return np.arange(n)
    return np.random.default_rng(_SPLIT_SEED).permutation(n)[:limit]


def classifier(
    splits: Splits,
    build: Callable[[int], nn.Module],
    *,
    encode: Callable[[Labelled], tuple[Tensor, Tensor]],
    limit: int | None,
    scale: Scale | None = None,
    notes: tuple[str, ...] = (),
    **how: Any,
) -> LoadedTask:
    """Cross entropy on the classes of a data set. Each split that it lacks is a fixed tenth of its training set.

    ``build`` gives the model of a seed, ``encode`` x and y of a split as tensors with one row per example; ``how`` is
    what else a :class:`LoadedTask` says.
    """
    x, y = encode(splits.train)
    rows, *held_rows = split(len(y), valid=splits.valid is None, test=splits.test is None, limit=limit)
    scaled = scale(x[rows]) if scale else lambda x: x
    sets: dict[str, Any] = {"train_x": scaled(x[rows]), "train_y": y[rows]}
    notes_on_held = []
    for name, own, held in zip(("valid", "test"), (splits.valid, splits.test), held_rows, strict=True):
        if own is None:
            notes_on_held.append(
                f"The {name.replace('valid', 'validation')} set is a fixed tenth of the training file."
            )
        own_x, own_y = (x, y) if own is None else encode(own)
        some = held if own is None else few(len(own_y), limit)
        key = name.removesuffix("ation")
        sets |= {f"{key}_x": scaled(own_x[some]), f"{key}_y": own_y[some]}
    return LoadedTask(**sets, build=build, notes=(*splits.notes, *notes_on_held, *notes), **how)


def labels(part: Labelled) -> Tensor:
    """``[n]`` in int64."""
    return torch.from_numpy(np.array(part.y, dtype=np.int64))


def logistic_regression(
    splits: Splits, *, limit: int | None, scale: Scale | None = None, notes: tuple[str, ...] = ()
) -> LoadedTask:
    """Softmax regression on a data set of numbers; bytes are scaled to [0, 1]."""
    features = int(np.prod(np.shape(splits.train.x)[1:]))
    build = seeded(partial(nn.Linear, features, int(np.max(splits.train.y)) + 1))
    return classifier(splits, build, encode=_rows, scale=scale, limit=limit, notes=notes)


def _rows(part: Labelled) -> tuple[Tensor, Tensor]:
    """``[n, features]`` in float32, and the labels."""
    numbers = np.asarray(part.x)
    rows = torch.from_numpy(np.array(numbers, dtype=np.float32).reshape(len(numbers), -1))
    return rows / 255 if numbers.dtype == np.uint8 else rows, labels(part)


def standardise(train: Tensor) -> Callable[[Tensor], Tensor]:
    """Mean 0 and standard deviation 1 over the training rows; a constant column is only centred."""
    mean, sd = train.mean(dim=0), train.std(dim=0, correction=0)
    sd[sd == 0] = 1.0
    return lambda x: (x - mean) / sd
