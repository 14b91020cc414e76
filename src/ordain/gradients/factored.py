"""A batch of gradients, parameter by parameter: nothing of size B x d is ever held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain.gradients.hashing import HashFamily
from ordain.gradients.param_grads import ParamGrads
from ordain.gradients.protocol import Gradients, differences

Placed = list[tuple[int, ParamGrads]]  # (offset in the flat gradient, gradients of the parameter there)


class Factored(Gradients):
    """Gradients of all parameters, each with its place in a flat vector of length d.

    Args:
        placed: (offset, gradients) of each parameter that got a gradient; the others are zero.
        dim: d.
        size: B.
        scale: what undoes the loss's reduction: B under a mean, 1 under a sum.
        like: a tensor with the dtype and device of the answers.
    """

    def __init__(
        self, placed: Sequence[tuple[int, ParamGrads]], *, dim: int, size: int, scale: float, like: Tensor
    ) -> None:
        self.placed = list(placed)
        self.scale = scale
        self.dim, self.size = dim, size
        self.dtype, self.device = like.dtype, like.device
        self._like = like.new_empty(0)

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        gram, dots = self._zeros(self.size, len(vectors))
        for offset, grads in self.placed:
            grads.add_products(vectors[:, offset : offset + grads.numel], gram, dots)
        return gram.mul_(self.scale**2), dots.mul_(self.scale)

    def dot(self, vectors: Tensor) -> Tensor:
        _, dots = self._zeros(self.size, len(vectors))
        for offset, grads in self.placed:
            dots += grads.dot(vectors[:, offset : offset + grads.numel])
        return dots.mul_(self.scale)

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        gram, dots = self._zeros(self.size // 2, len(vectors))
        whole: tuple[Tensor, Tensor] | None = None  # of the parameters for which pairing first saves nothing
        for offset, grads in self.placed:
            part, pairs = vectors[:, offset : offset + grads.numel], grads.paired()
            if pairs is not None:
                pairs.add_products(part, gram, dots)
            else:
                whole = whole or self._zeros(self.size, len(vectors))
                grads.add_products(part, *whole)
        if whole is not None:
            for sums, more in zip((gram, dots), differences(*whole), strict=True):
                sums += more
        return gram.mul_(self.scale**2), dots.mul_(self.scale)

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = self._like.new_zeros(len(weights), self.dim)
        weights = weights * self.scale
        for offset, grads in self.placed:
            grads.add_weighted(weights, out[:, offset : offset + grads.numel])
        return out

    def add_signed(self, signs: Tensor, out: Tensor) -> None:
        each = signs * self.scale
        for offset, grads in self.placed:
            part = out[:, offset : offset + grads.numel]
            if len(out) == 1:
                grads.add_weighted(each.unsqueeze(0), part)
            else:
                grads.add_signed(each, self.scale, part)

    def select(self, rows: Tensor) -> Factored:
        placed = [(offset, grads.select(rows)) for offset, grads in self.placed]
        return Factored(placed, dim=self.dim, size=len(rows), scale=self.scale, like=self._like)

    def double(self) -> Factored | None:
        if self.device.type == "mps":
            return None  # it has no float64
        placed = [(offset, grads.double()) for offset, grads in self.placed]
        like = torch.empty(0, dtype=torch.float64, device=self.device)
        return Factored(placed, dim=self.dim, size=self.size, scale=self.scale, like=like)

    def rows(self, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = self._like.new_empty(self.size, self.dim)
        if sum(grads.numel for _, grads in self.placed) < self.dim:
            out.zero_()  # parameters without a gradient
        for offset, grads in apart(self.placed):
            grads.fill(out[:, offset : offset + grads.numel])
        return out.mul_(self.scale)

    def add_sketch(self, family: HashFamily, out: Tensor) -> None:
        own = torch.zeros_like(out)
        for offset, grads in apart(self.placed):
            grads.add_hashed(family.hashes(offset, grads.rows, grads.cols, own), own)
        out.add_(own, alpha=self.scale)

    def by_parameter(self) -> tuple[Placed, float]:
        return self.placed, self.scale

    def linear_layer(self) -> tuple[NDArray[Any], NDArray[Any], bool, float] | None:
        if len(self.placed) != 1 or self.placed[0][1].numel != self.dim:
            return None
        layer = self.placed[0][1].linear_layer(self.dtype)
        return None if layer is None else (*layer, self.scale)

    def _zeros(self, size: int, count: int) -> tuple[Tensor, Tensor]:
        return self._like.new_zeros(size, size), self._like.new_zeros(count, size)


def rescaled(gradients: Gradients, factor: float) -> Gradients:
    """The same gradients, each multiplied by ``factor``."""
    if factor == 1.0:
        return gradients
    placed, scale = gradients.by_parameter()
    like = torch.empty(0, dtype=gradients.dtype, device=gradients.device)
    return Factored(placed, dim=gradients.dim, size=gradients.size, scale=scale * factor, like=like)


def apart(placed: Placed) -> Placed:
    """Each parameter in its own place, where a bias comes joined to its weight."""
    single: Placed = []
    for offset, grads in placed:
        for one in grads.apart():
            single.append((offset, one))
            offset += one.numel
    return single
