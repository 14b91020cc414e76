"""A batch of gradients as forms of its parameters: nothing of size B x d is ever held."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain.gradients.forms import Form, Outer
from ordain.gradients.memory import chunk_numbers, in_pieces
from ordain.gradients.small import differences, mirrored

_NEAR = 2e-5  # of the sizes of what is added up: what rounding may do in float32


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
        self._known: tuple[Tensor, Tensor] | None = None  # products of the parameters that are not sparse
        self._pairs: dict[int, Tensor] = {}  # differences that paired_products made, ``[B / 2, numel]`` by offset
        self.scale = scale
        self.dim, self.size = dim, size
        self.dtype, self.device = like.dtype, like.device

    def forms(self) -> Sequence[tuple[int, Form]]:
        """(offset, form) of each parameter that got a gradient, before ``scale``."""
        return self._forms

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
                before = self._scaled(gram.clone(), dots.clone())
            form.add_products(self._view(vectors, offset, form), gram, dots)
        gram, dots = self._scaled(gram, dots)
        self._known = before or (gram, dots)
        return gram, dots

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        half = self.size // 2
        gram, dots = self._room(half, len(vectors))
        whole: tuple[Tensor, Tensor] | None = None
        self._pairs = {}  # of a try that memory ran out in
        left = chunk_numbers()  # what was made is kept as far as there is room: the sum to come is a pass over it
        for offset, form in self._forms:
            pairs = form.paired()
            view = self._view(vectors, offset, form)
            if pairs is None:
                whole = whole or self._room(self.size, len(vectors))
                form.add_products(view, *whole)
                continue
            pairs.keeps = pairs.size * pairs.numel <= left
            pairs.add_products(view, gram, dots)
            if pairs.kept is not None:
                self._pairs[offset] = pairs.kept
                left -= pairs.kept.numel()
        if whole is not None:
            more_gram, more_dots = differences(*whole)
            gram += more_gram
            dots += more_dots
        return self._scaled(gram, dots)

    def add_paired(self, signs: NDArray[Any], out: Tensor) -> None:
        """``out`` ``[1, d]`` += sum_i e_i g_i, for ``[B]`` signs that are opposite in each pair."""
        each = torch.from_numpy(signs).to(self.device, self.dtype).unsqueeze(0) * self.scale
        for offset, form in self._forms:
            into, made = self._view(out, offset, form), self._pairs.get(offset)
            if made is None:
                form.add_weighted(each, into)
            else:
                into.view(1, -1).addmm_(each[:, 0::2], made)

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.zeros(len(weights), self.dim, dtype=self.dtype, device=self.device)
        if self.scale != 1.0:
            weights = weights * self.scale
        for offset, form in self._forms:
            form.add_weighted(weights, self._view(out, offset, form))
        return out

    def add_signed(self, signs: NDArray[Any], signed: Tensor, total: Tensor) -> None:
        """Signed += sum_i e_i g_i and total += sum_i g_i, for ``[B]`` signs of +1 and -1.

        The backward has left sum_i g_i: then only the rarer sign's examples need be added up, twice over.
        """
        most = 1.0 if signs.sum() >= 0 else -1.0
        each = torch.from_numpy(signs).to(self.device, self.dtype) * self.scale
        rows = torch.from_numpy(np.flatnonzero(signs != most)).to(self.device)
        whole = self._grads is not None and self._add_grads(self._grads, most, signed, total)
        for offset, form in self._forms:
            into = self._view(signed.unsqueeze(0), offset, form)
            if whole and not form.sparse:
                in_pieces(len(rows), partial(_add_twice, form, rows, -2.0 * most * self.scale, into))
            else:
                form.add_signed(each, self.scale, into, self._view(total.unsqueeze(0), offset, form))

    def _add_grads(self, grads: Sequence[tuple[int, Tensor]], most: float, signed: Tensor, total: Tensor) -> bool:
        """Signed += most * sum and total += sum, from what the backward left, if that is still what it was.

        A change through ``.data``, or by a hook of the user's, leaves no other trace than this: the sum's square and
        its product with P are no longer what the products of the examples say. Both are computed while adding, which
        reads memory once, and what was added is taken back if it is wrong. Where P is 0 there is nothing to tell by.
        """
        if self._known is None:
            return False
        from ordain import _products

        gram, dots = (part.cpu().numpy() for part in self._known)
        square, square_size = (x / self.scale**2 for x in _products.gram_total(gram))
        product, product_size = float(dots[0].sum()) / self.scale, float(np.abs(dots[0]).sum()) / self.scale
        if not product_size:
            return False
        parts = [(grad.view(-1), slice(offset, offset + grad.numel())) for offset, grad in grads]

        def right(found: float, along: float) -> bool:
            return abs(found - square) <= _NEAR * square_size and abs(along - product) <= _NEAR * product_size

        if signed.device.type != "cpu":
            whole = right(
                sum(float(torch.dot(flat, flat)) for flat, _ in parts),
                sum(float(torch.dot(flat, signed[part])) for flat, part in parts),
            )
            for flat, part in parts if whole else ():
                signed[part].add_(flat, alpha=most * self.scale)
                total[part].add_(flat, alpha=self.scale)
            return whole
        one, other = signed.numpy(), total.numpy()
        found, along, added = 0.0, 0.0, []
        for flat, part in parts:
            grad = flat.numpy()
            limit = square + _NEAR * square_size - found
            more, inner, upto = _products.add_within(grad, most * self.scale, one[part], self.scale, other[part], limit)
            added.append((grad[:upto], part))
            found, along = found + more, along + inner
        if right(found, along):
            return True
        for grad, part in added:
            _products.add_within(grad, -most * self.scale, one[part], -self.scale, other[part], math.inf)
        return False

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

    def layer(self) -> tuple[NDArray[Any], NDArray[Any], bool, float] | None:
        """Inputs ``[B, in]``, output gradients ``[B, out]``, biased, scale: if one small linear layer is everything."""
        if len(self._forms) != 1 or not isinstance(self._forms[0][1], Outer):
            return None
        form = self._forms[0][1]
        factors = form.small_factors(self.dtype)
        return None if factors is None or form.numel != self.dim else (*factors, form.biased, self.scale)


def _add_twice(form: Form, rows: Tensor, weight: float, out: Tensor, lo: int, hi: int) -> None:
    form.select(rows[lo:hi]).add_weighted(torch.full((1, hi - lo), weight, dtype=out.dtype, device=out.device), out)
