"""Logistic regression on digits, on images as rows of pixels, and on tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ordain.study.data import load
from ordain.study.tasks.classification import classifier
from ordain.study.tasks.task import Problem, Request, seeded


def logistic_regression(
    request: Request,
    *,
    data: str,
    scale: Callable[[Tensor], Callable[[Tensor], Tensor]] | None = None,
    notes: tuple[str, ...] = (),
) -> Problem:
    """Softmax regression on a data set of numbers; bytes are scaled to [0, 1]."""
    splits = load(data, request.folder, verify=request.verify)
    features = int(np.prod(np.shape(splits.train.x)[1:]))
    build = seeded(partial(nn.Linear, features, int(np.max(splits.train.y)) + 1))
    return classifier(splits, build, encode=_rows, scale=scale, limit=request.limit, notes=notes)


def _rows(x: Any) -> Tensor:
    """``[n, features]`` in float32."""
    rows = torch.from_numpy(np.array(x, dtype=np.float32).reshape(len(x), -1))
    return rows / 255 if x.dtype == np.uint8 else rows


def standardise(train: Tensor) -> Callable[[Tensor], Tensor]:
    """Mean 0 and standard deviation 1 over the training rows; a constant column is only centred."""
    mean, sd = train.mean(dim=0), train.std(dim=0, correction=0)
    sd[sd == 0] = 1.0
    return lambda x: (x - mean) / sd
