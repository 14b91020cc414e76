"""Materialised gradients: passed in by the user, or computed by torch.func."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ordain.errors import GradientError
from ordain.gradients.hashing import HashFamily
from ordain.gradients.param_grads import Materialized, ParamGrads
from ordain.gradients.protocol import Gradients


class Dense(Gradients):
    """Per-example gradients held as blocks ``[B, d_1], [B, d_2], ...`` that are never joined."""

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        self.blocks = tuple(blocks)
        self._widths = [block.shape[1] for block in self.blocks]
        self.size, self.dim = self.blocks[0].shape[0], sum(self._widths)
        self.dtype, self.device = self.blocks[0].dtype, self.blocks[0].device

    def gram(self) -> Tensor:
        first, *rest = self.blocks
        total = first @ first.T
        for block in rest:
            total.addmm_(block, block.T)
        return total

    def dot(self, vectors: Tensor) -> Tensor:
        parts = torch.split(vectors, self._widths, dim=1)
        total = parts[0] @ self.blocks[0].T
        for part, block in zip(parts[1:], self.blocks[1:], strict=True):
            total.addmm_(part, block.T)
        return total

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return self.gram(), self.dot(vectors)

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return Dense([block[0::2] - block[1::2] for block in self.blocks]).products(vectors)

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            return torch.cat([weights @ block for block in self.blocks], dim=1)
        for part, block in zip(torch.split(out, self._widths, dim=1), self.blocks, strict=True):
            part.addmm_(weights, block)
        return out

    def select(self, rows: Tensor) -> Dense:
        return Dense([block[rows] for block in self.blocks])

    def rows(self, out: Tensor | None = None) -> Tensor:
        return torch.cat(self.blocks, dim=1, out=out)

    def add_sketch(self, family: HashFamily, out: Tensor) -> None:
        for offset, block in self._placed():
            family.hashes(offset, 1, block.shape[1], out).add_materialized(block.unsqueeze(1), out)

    def by_parameter(self) -> tuple[list[tuple[int, ParamGrads]], float]:
        return [(offset, Materialized(block.unsqueeze(1))) for offset, block in self._placed()], 1.0

    def _placed(self) -> Iterator[tuple[int, Tensor]]:
        offsets = accumulate(self._widths, initial=0)
        return zip(offsets, self.blocks, strict=False)


def as_gradients(grads: Any) -> Gradients:
    """Take per-example gradients in any of the forms users have them in.

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
            remedy="Pass per-example gradients, one row an example, not summed ones.",
        )
    if not any(block.shape[1] for block in blocks):
        raise GradientError("gradients of length 0", expected="[B, d] with d >= 1", remedy="Pass the gradients.")
    common = blocks[0].dtype
    for block in blocks[1:]:
        common = torch.promote_types(common, block.dtype)
    return Dense([block.to(common) for block in blocks])


def _block(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.array(value))
    if not isinstance(value, Tensor):
        raise GradientError(
            f"{name} of type {type(value).__name__}",
            expected="a torch tensor or a NumPy array [B, *shape]",
            remedy="Pass [B, d], or a dict or list of [B, *shape].",
        )
    if value.ndim < 2 and name == "grads":
        raise GradientError(
            f"gradients of shape {tuple(value.shape)}",
            expected="[B, d], one row an example",
            remedy="For a single example pass g.reshape(1, -1).",
        )
    if value.ndim < 1 or not value.is_floating_point():
        raise GradientError(
            f"{name} of shape {tuple(value.shape)} and dtype {value.dtype}",
            expected="floating-point gradients with the examples as first dimension",
            remedy="Pass [B, d], or a dict or list of [B, *shape].",
        )
    # Detached: a gradient that kept its graph would keep every batch of the epoch alive.
    block = value.detach().reshape(value.shape[0], math.prod(value.shape[1:]))
    return block.to(torch.promote_types(block.dtype, torch.float32))
