"""PReLU: the slope's gradient is b * min(x, 0), summed over everything that shares the slope."""

from __future__ import annotations

import torch
from torch import nn

from ordain.gradients.param_grads import Materialized, ParamGrads
from ordain.gradients.rules.registry import Use, register_rule
from ordain.gradients.rules.trailing import trailing


@register_rule(nn.PReLU)
def prelu(module: nn.PReLU, uses: list[Use]) -> dict[str, ParamGrads]:
    """Input of any shape with one slope, ``[B, C, *]`` with C of them."""
    made = []
    for use in uses:
        shared = module.num_parameters == 1
        x, b = trailing(use, 0 if shared else use.grads[0].ndim - 1)
        each = x.clamp(max=0) * b
        made.append(each.sum(dim=1, keepdim=True) if shared else each.transpose(1, 2).flatten(2).sum(dim=2))
    return {"weight": Materialized.flat(torch.stack(made).sum(dim=0))}
