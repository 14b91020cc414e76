"""A batch of gradients as forms of its parameters: nothing of size B x d is ever held."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ordain.gradients.forms import Form
from ordain.gradients.small import differences, mirrored


class Factored:
    """Gradients of all parameters, each with its place in a flat vector of length d.

    Args:
        forms: (offset, form) for each parameter that got a gradient; the others are zero.
        dim: d.
        size: B.
        scale: what undoes the loss's reduction: B under a mean, 1 under a sum.
        like: a tensor with the dtype and device of the answers.
        grads: (offset, gradient) of the parameters that are not sparse, as the backward left them, if that is the
            sum of this batch's gradients and nothing else: it is there, and need not be added up again.
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
        self._forms = sorted(forms, key=lambda one: one[1].sparse)
        self._grads = grads
        self._dense_gram: Tensor | None = None  # of the parameters that are not sparse, once it is known
        self.scale = scale
        self.dim, self.size = dim, size
        self.dtype, self.device = like.dtype, like.device

    def gram(self) -> Tensor:
        return mirrored(self.products(torch.zeros(0, self.dim, dtype=self.dtype, device=self.device))[0])

    def dot(self, vectors: Tensor) -> Tensor:
        dots = torch.zeros(len(vectors), self.size, dtype=self.dtype, device=self.device)
        for offset, form in self._forms:
            dots += form.dot(self._view(vectors, offset, form))
        return dots.mul_(self.scale)

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        gram, dots = self._room(self.size, len(vectors))
        before = None
        for offset, form in self._forms:  # the sparse ones come last
            if form.sparse and before is None:
                before = gram.clone()
            form.add_products(self._view(vectors, offset, form), gram, dots)
        self._dense_gram = gram.clone() if before is None else before
        return self._scaled(gram, dots)

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        half = self.size // 2
        gram, dots = self._room(half, len(vectors))
        whole: tuple[Tensor, Tensor] | None = None
        for offset, form in self._forms:
            pairs = form.paired()
            view = self._view(vectors, offset, form)
            if pairs is not None:
                pairs.add_products(view, gram, dots)
            else:
                whole = whole or self._room(self.size, len(vectors))
                form.add_products(view, *whole)
        if whole is not None:
            more_gram, more_dots = differences(*whole)
            gram += more_gram
            dots += more_dots
        return self._scaled(gram, dots)

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.zeros(len(weights), self.dim, dtype=self.dtype, device=self.device)
        if self.scale != 1.0:
            weights = weights * self.scale
        for offset, form in self._forms:
            form.add_weighted(weights, self._view(out, offset, form))
        return out

    def add_sum(self, out: Tensor) -> None:
        ones = torch.full((1, self.size), self.scale, dtype=self.dtype, device=self.device)
        table = out.unsqueeze(0)
        whole = self._grads is not None and self._untouched(self._grads)
        for offset, form in self._forms:
            if form.sparse or not whole:
                form.add_weighted(ones, self._view(table, offset, form))
        if whole and self._grads is not None:
            for offset, grad in self._grads:
                out[offset : offset + grad.numel()].add_(grad.reshape(-1), alpha=self.scale)

    def _untouched(self, grads: Sequence[tuple[int, Tensor]]) -> bool:
        """Is the sum's square what the Gram matrix says? A change through ``.data`` leaves no other trace."""
        if self._dense_gram is None:
            return False
        upper = self._dense_gram.triu()
        twice = 2.0 * upper.sum() - upper.diagonal().sum()
        size = float(upper.abs().sum())
        found = sum(float(torch.dot(grad.reshape(-1), grad.reshape(-1))) for _, grad in grads)
        return abs(found - float(twice)) <= 2e-5 * size

    def _room(self, size: int, count: int) -> tuple[Tensor, Tensor]:
        return (
            torch.zeros(size, size, dtype=self.dtype, device=self.device),
            torch.zeros(count, size, dtype=self.dtype, device=self.device),
        )

    def _scaled(self, gram: Tensor, dots: Tensor) -> tuple[Tensor, Tensor]:
        return (gram, dots) if self.scale == 1.0 else (gram.mul_(self.scale**2), dots.mul_(self.scale))

    def _view(self, vectors: Tensor, offset: int, form: Form) -> Tensor:
        """``[k, d]`` to the part of one parameter."""
        return form.view(vectors if form.numel == self.dim else vectors[:, offset : offset + form.numel])

    def select(self, rows: Tensor) -> Factored:
        forms = [(offset, form.select(rows)) for offset, form in self._forms]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return Factored(forms, dim=self.dim, size=len(rows), scale=self.scale, like=like)
