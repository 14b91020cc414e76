"""A batch of gradients as forms of its parameters: nothing of size B x d is ever held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain.gradients.forms import Form, Outer
from ordain.gradients.left import add_left
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
        self._forms = forms
        self._grads = dict(grads or ())
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
        for offset, form in self._forms:
            form.add_products(self._view(vectors, offset, form), gram, dots)
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

    def add_signed(self, signs: NDArray[Any], table: Tensor) -> None:
        """table[0] += sum_i e_i g_i and, if there is a second row, table[1] += sum_i g_i; e is ``[B]`` of +1 and -1.

        Where the backward has left sum_i g_i, only the rarer sign's examples need be added up, twice over.
        """
        most = 1.0 if signs.sum() >= 0 else -1.0
        rows = torch.from_numpy(np.flatnonzero(signs != most)).to(self.device)
        twice = torch.full((1, len(rows)), -2.0 * most * self.scale, dtype=self.dtype, device=self.device)
        each = torch.full((len(table), self.size), self.scale, dtype=self.dtype, device=self.device)
        each[0] *= torch.from_numpy(signs).to(self.device)
        for offset, form in self._forms:
            if add_left(self._grads, offset, form, [most * self.scale, self.scale][: len(table)], table):
                if len(rows):
                    form.select(rows).add_weighted(twice, self._view(table[:1], offset, form))
            else:
                form.add_weighted(each, self._view(table, offset, form))

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

    def layer(self) -> tuple[NDArray[Any], NDArray[Any], bool] | None:
        """``[B, in]`` inputs, ``[B, out]`` output gradients and "with a bias?" if one small linear layer is all."""
        if len(self._forms) != 1 or not isinstance(self._forms[0][1], Outer):
            return None
        form = self._forms[0][1]
        factors = form.small_factors(self.dtype)
        return None if factors is None or form.numel != self.dim else (*factors, form.biased)
