"""Materialised gradients: passed in by the user, or computed by torch.func."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ordain.errors import GradientError
from ordain.gradients.factored import Factored
from ordain.gradients.param_grads import Materialized
from ordain.gradients.protocol import Gradients

_FORMS = "Pass [B, d], or a dict or list of [B, *shape]."


class Dense(Factored):
    """Per-example gradients held as blocks ``[B, d_1], [B, d_2], ...``, one after the other in the flat vector."""

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        offsets = list(accumulate((block.shape[1] for block in blocks), initial=0))
        placed = [(offset, Materialized(block.unsqueeze(1))) for offset, block in zip(offsets, blocks, strict=False)]
        super().__init__(placed, dim=offsets[-1], size=len(blocks[0]), scale=1.0, like=blocks[0])
        self._blocks = blocks

    def one_row(self) -> list[Tensor] | None:
        return [block[0] for block in self._blocks] if self.size == 1 else None


def as_gradients(grads: Any) -> Gradients:
    """Convert per-example gradients from any supported form.

    Args:
        grads: ``[B, d]``; or a dict or list of ``[B, *shape]`` in a fixed order; torch or NumPy; or
            anything that already is a :class:`~ordain.gradients.Gradients`.
    """
    if isinstance(grads, Gradients):
        return grads
    if isinstance(grads, Mapping):
        named = {str(key): value for key, value in grads.items()}
    elif isinstance(grads, (list, tuple)):
        named = {f"[{i}]": value for i, value in enumerate(grads)}
    else:
        named = {"grads": grads}
    if not named:
        raise GradientError("no gradients", expected="at least one tensor [B, *shape]", remedy="Pass [B, d].")
    blocks = [_block(name, value) for name, value in named.items()]
    sizes = {name: block.shape[0] for name, block in zip(named, blocks, strict=True)}
    if len(set(sizes.values())) > 1:
        raise GradientError(
            f"different numbers of examples: {sizes}",
            expected="the same batch size B as the first dimension of every tensor",
            remedy="Pass per-example gradients, one row per example, not their sum.",
        )
    if not any(block.shape[1] for block in blocks):
        raise GradientError("gradients of length 0", expected="[B, d] with d >= 1", remedy="Pass the gradients.")
    common = reduce(torch.promote_types, (block.dtype for block in blocks))
    return Dense([block.to(common) for block in blocks])


def _block(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        value = torch.from_numpy(np.array(value))
    if not isinstance(value, Tensor):
        kind = f"{type(value).__name__}{' of objects' * isinstance(value, np.ndarray)}"
        came, expected = f"{name} of type {kind}", "a torch tensor or a NumPy array [B, *shape]"
        raise GradientError(came, expected=expected, remedy=_FORMS)
    if value.layout is not torch.strided:
        raise GradientError(
            f"{name} of layout {value.layout}",
            expected="dense gradients",
            remedy="Pass g.to_dense(), or observe a few rows.",
        )
    if value.ndim < 2 and name == "grads":
        raise GradientError(
            f"gradients of shape {tuple(value.shape)}",
            expected="[B, d], one row per example",
            remedy="For a single example pass g.reshape(1, -1).",
        )
    if value.ndim < 1 or not value.is_floating_point():
        came = f"{name} of shape {tuple(value.shape)} and dtype {value.dtype}"
        raise GradientError(
            came, expected="floating-point gradients with the examples as first dimension", remedy=_FORMS
        )
    # Detached: a gradient that kept its graph would keep every batch of the epoch alive.
    block = value.detach().reshape(value.shape[0], math.prod(value.shape[1:]))
    return block.to(torch.promote_types(block.dtype, torch.float32))
