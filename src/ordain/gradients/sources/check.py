"""Per-example gradients must add up to what autograd gave each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ordain.errors import UnsupportedModuleError
from ordain.gradients.factored import Factored


def check_sums(
    batches: Sequence[Factored],
    arrived: Mapping[Tensor, Tensor],
    offsets: Mapping[Tensor, tuple[int, str]],
    *,
    coarse: bool,
) -> bool:
    """Compare, and name the first parameter that does not add up.

    Args:
        batches: all that the backward reached.
        arrived: what autograd gave each parameter.
        offsets: each parameter's place in the flat vector, and its name.
        coarse: was anything computed in less than float32 (autocast)?

    Returns:
        Whether that proves anything: a gradient that is zero or not finite does not.
    """
    like = batches[0]
    explained = torch.zeros(1, like.dim, dtype=like.dtype, device=like.device)
    for batch in batches:
        ones = torch.full((1, batch.size), 1.0 / batch.scale, dtype=batch.dtype, device=batch.device)
        batch.weighted_sum(ones, out=explained)
    # A gradient that is zero but for rounding (a bias before a normalization, the bias of attention's keys)
    # has no digits to compare: it need only be small beside the whole.
    whole = float(explained.norm())
    conclusive = True
    for p, (offset, name) in offsets.items():
        mine = explained[0, offset : offset + p.numel()]
        theirs = arrived[p].reshape(-1).to(mine) if p in arrived else torch.zeros_like(mine)
        size = max(float(theirs.norm()), float(mine.norm()))
        apart = float((mine - theirs).norm())
        exact = p.dtype in (torch.float32, torch.float64) and not coarse
        tolerance = (1e-6 if p.dtype == torch.float64 else 1e-3) if exact else 5e-2
        if apart > tolerance * max(size, 1e-2 * whole, 1e-12):
            raise UnsupportedModuleError(
                f"parameter {name!r} with a gradient that the calls of its module do not explain",
                expected="every parameter to be used by calling the module that owns it, and a loss of outputs only",
                remedy="If the loss has a penalty on the weights, move it to the optimizer's weight_decay=; if the "
                f"parameter is used elsewhere, leave it out with params=lambda name: name != {name!r}, or take "
                "gradients='func'.",
            )
        conclusive &= 0.0 < size < float("inf") or not p.requires_grad
    return conclusive
