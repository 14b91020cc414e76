"""A batch of gradients as forms of its parameters: nothing of size B x d is ever held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain.gradients.forms import Form, Outer
from ordain.gradients.small import differences, mirrored

Plain = tuple[int, int, NDArray[Any], NDArray[Any], bool]  # from, to, a [B, in], b [B, few], with a bias?


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
        self._plain = _plain(self._forms, self.dtype)

    def gram(self) -> Tensor:
        return mirrored(self.products(torch.zeros(0, self.dim, dtype=self.dtype, device=self.device))[0])

    def dot(self, vectors: Tensor) -> Tensor:
        dots = torch.zeros(len(vectors), self.size, dtype=self.dtype, device=self.device)
        for offset, form in self._forms:
            dots += form.dot(self._view(vectors, offset, form))
        return dots.mul_(self.scale)

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        if self._plain is not None and not vectors.is_cuda:
            self._dense_gram, dots = self._plain_products(self._plain, vectors)
            return self._dense_gram, dots
        gram, dots = self._room(self.size, len(vectors))
        before = None
        for offset, form in self._forms:  # the sparse ones come last
            if form.sparse and before is None:
                before = gram.clone()
            form.add_products(self._view(vectors, offset, form), gram, dots)
        gram, dots = self._scaled(gram, dots)
        self._dense_gram = gram if before is None else before.mul_(self.scale**2)
        return gram, dots

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        if self._plain is not None and not vectors.is_cuda:
            return differences(*self._plain_products(self._plain, vectors))
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
        if self._plain is not None and not out.is_cuda:
            from ordain import _products

            for row, target in zip(weights.numpy() * self.scale, out.numpy(), strict=True):
                for lo, hi, a, b, biased in self._plain:
                    _products.outer_add(a, b, row, biased, target[lo:hi])
            return out
        if self.scale != 1.0:
            weights = weights * self.scale
        for offset, form in self._forms:
            form.add_weighted(weights, self._view(out, offset, form))
        return out

    def add_sum(self, out: Tensor) -> None:
        whole = self._grads if self._grads is not None and self._untouched(self._grads) else None
        again = [one for one in self._forms if one[1].sparse or whole is None]
        if again:
            ones = torch.full((1, self.size), self.scale, dtype=self.dtype, device=self.device)
            table = out.unsqueeze(0)
            for offset, form in again:
                form.add_weighted(ones, self._view(table, offset, form))
        for offset, grad in whole or ():
            out[offset : offset + grad.numel()].add_(grad.view(-1), alpha=self.scale)

    def _untouched(self, grads: Sequence[tuple[int, Tensor]]) -> bool:
        """Is the sum's square what the Gram matrix says? A change through ``.data`` leaves no other trace."""
        if self._dense_gram is None:
            return False
        from ordain import _products

        wanted, size = _products.gram_total(self._dense_gram.cpu().numpy())
        found = sum(float(torch.dot(flat, flat)) for flat in (grad.view(-1) for _, grad in grads))
        return abs(found * self.scale**2 - wanted) <= 2e-5 * size

    def _plain_products(self, plain: list[Plain], vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Products of a small linear model: as few steps of Python as there can be."""
        from ordain import _products

        table = vectors.numpy()
        gram = np.zeros((self.size, self.size), table.dtype)
        dots = np.zeros((len(table), self.size), table.dtype)
        for lo, hi, a, b, biased in plain:
            _products.outer_gram(a, b, 1.0 if biased else 0.0, gram)
            for vector, row in zip(table, dots, strict=True):
                _products.outer_dot(a, b, vector[lo:hi], biased, row)
        gram *= self.scale**2
        dots *= self.scale
        return torch.from_numpy(gram), torch.from_numpy(dots)

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


def _plain(forms: Sequence[tuple[int, Form]], dtype: torch.dtype) -> list[Plain] | None:
    """The factors of a model of small linear layers only, for which calls cost more than arithmetic; else None."""
    found: list[Plain] = []
    for offset, form in forms:
        if not isinstance(form, Outer):
            return None
        arrays = form.small_factors(dtype)
        if arrays is None:
            return None
        found.append((offset, offset + form.numel, *arrays, form.biased))
    return found or None
