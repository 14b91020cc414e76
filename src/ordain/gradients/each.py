"""Every example's gradient as a row: for what cannot do without them."""

from __future__ import annotations

import torch
from torch import Tensor

from ordain.gradients.base import Gradients
from ordain.gradients.dense import Dense
from ordain.gradients.factored import Factored


def fill(batch: Gradients, out: Tensor) -> None:
    """The gradients of ``batch`` into ``[B, d]``, whatever was there."""
    if isinstance(batch, Factored):
        if sum(form.numel for _, form in batch.forms()) < batch.dim:
            out.zero_()  # parameters without a gradient
        for offset, form in batch.forms():
            form.fill(out[:, offset : offset + form.numel])
        if batch.scale != 1.0:
            out.mul_(batch.scale)
    elif isinstance(batch, Dense):
        torch.cat(batch.blocks(), dim=1, out=out)
    else:  # known by its operations alone
        out.copy_(batch.weighted_sum(torch.eye(batch.size, dtype=batch.dtype, device=batch.device)))


def each(batch: Gradients) -> Tensor:
    """``[B, d]``, new."""
    out = torch.empty(batch.size, batch.dim, dtype=batch.dtype, device=batch.device)
    fill(batch, out)
    return out
