"""A batch of gradients as forms of its parameters: nothing of size B x d is ever held."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ordain.gradients.forms import Form
from ordain.gradients.small import mirrored


class Factored:
    """Gradients of all parameters, each with its place in a flat vector of length d.

    Args:
        forms: (offset, form) for each parameter that got a gradient; the others are zero.
        dim: d.
        size: B.
        scale: what undoes the loss's reduction: B under a mean, 1 under a sum.
        like: a tensor with the dtype and device of the answers.
        grads: (offset, gradient) of each parameter as the backward left it, if that is the sum of this
            batch's gradients and nothing else: it is there already, and saves adding it up again.
    """

    def __init__(
        self,
        forms: Sequence[tuple[int, Form]],
        *,
        dim: int,
        size: int,
        scale: float,
        like: Tensor,
        grads: Sequence[tuple[int, Tensor]] | None = None,
    ) -> None:
        self._forms = list(forms)
        self._grads = grads
        self.scale = scale
        self.dim, self.size = dim, size
        self.dtype, self.device = like.dtype, like.device

    def gram(self) -> Tensor:
        return mirrored(self.products(torch.zeros(0, self.dim, dtype=self.dtype, device=self.device))[0])

    def dot(self, vectors: Tensor) -> Tensor:
        dots = torch.zeros(len(vectors), self.size, dtype=self.dtype, device=self.device)
        for offset, form in self._forms:
            dots += form.dot(_view(vectors, offset, form))
        return dots.mul_(self.scale)

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        gram = torch.zeros(self.size, self.size, dtype=self.dtype, device=self.device)
        dots = torch.zeros(len(vectors), self.size, dtype=self.dtype, device=self.device)
        for offset, form in self._forms:
            form.add_products(_view(vectors, offset, form), gram, dots)
        if self.scale != 1.0:
            gram.mul_(self.scale**2)
            dots.mul_(self.scale)
        return gram, dots

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.zeros(len(weights), self.dim, dtype=self.dtype, device=self.device)
        weights = weights * self.scale
        for offset, form in self._forms:
            form.add_weighted(weights, _view(out, offset, form))
        return out

    def add_sum(self, out: Tensor) -> None:
        if self._grads is None:
            self.weighted_sum(torch.ones(1, self.size, dtype=self.dtype, device=self.device), out=out.unsqueeze(0))
            return
        for offset, grad in self._grads:
            out[offset : offset + grad.numel()].add_(grad.reshape(-1), alpha=self.scale)

    def select(self, rows: Tensor) -> Factored:
        forms = [(offset, form.select(rows)) for offset, form in self._forms]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return Factored(forms, dim=self.dim, size=len(rows), scale=self.scale, like=like)


def _view(vectors: Tensor, offset: int, form: Form) -> Tensor:
    """``[k, d]`` to the part of one parameter."""
    return form.view(vectors[:, offset : offset + form.numel])
