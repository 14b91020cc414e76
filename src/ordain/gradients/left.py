"""What a backward left in the parameters is the sum of the batch's gradients: it need not be added up again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ordain.gradients.forms import Form
from ordain.gradients.small import DTYPES

_NEAR = 2e-5  # of the terms' sizes: what rounding may do in float32


def add_left(grads: Mapping[int, Tensor], offset: int, form: Form, factors: Sequence[float], table: Tensor) -> bool:
    """table[k] += factors[k] * sum_i g_i of one form, if the backward left just that sum; else nothing.

    A gradient that was changed through ``.data`` gives itself away in one product with a fixed random matrix xy'.
    That is taken while adding, which reads memory once; what was added is taken back if it is wrong.

    Args:
        grads: offset to gradient, of the parameters that are not sparse.
        offset: of the form in the flat vector.
        form: the gradients.
        factors: ``[k]``.
        table: ``[k, d]``.
    """
    if form.sparse or any(offset + start not in grads for start, _ in form.pieces):
        return False
    x, y = _fixed(form.rows, table.dtype, table.device), _fixed(form.cols, table.dtype, table.device)
    wanted, size = form.probe(x, y)
    found, added = 0.0, []
    for start, cols in form.pieces:
        lo = offset + start
        grad = grads[lo].view(form.rows, cols)
        into = table[:, lo : lo + form.rows * cols].view(len(table), form.rows, cols)
        part, rows = _add(grad, x, y if start == 0 else torch.ones_like(y[:1]), factors, into)
        added.append((grad[:rows], into[:, :rows]))
        found += part
    if abs(found - wanted) <= _NEAR * size:
        return True
    for grad, into in added:
        _add(grad, x, torch.zeros_like(grad[0]) if len(grad) else y, [-factor for factor in factors], into)
    return False


def _add(grad: Tensor, x: Tensor, y: Tensor, factors: Sequence[float], into: Tensor) -> tuple[float, int]:
    """into[k] += factors[k] * grad; gives x' grad y, and how many rows were added: none from what is not finite on."""
    if grad.device.type == "cpu" and grad.dtype in DTYPES:
        from ordain import _products

        arrays, last = into.numpy(), len(into) - 1
        return _products.add_probed(
            grad.numpy(), x.numpy(), y.numpy(), factors[0], arrays[0], factors[last], arrays[last], last > 0
        )
    product = float(x @ (grad @ y))
    if not math.isfinite(product):
        return math.inf, 0
    for factor, target in zip(factors, into, strict=True):
        target.add_(grad, alpha=factor)
    return product, len(grad)


@lru_cache(maxsize=256)
def _fixed(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[count]`` random numbers, always the same."""
    return torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=dtype).to(device)
