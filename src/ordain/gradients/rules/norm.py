"""Normalizations and PReLU: y = w * n + c with n the normalized input, so w's gradient is b * n and c's is b, summed.

PReLU's slope is such a w, with n = min(x, 0).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ordain.gradients.param_grads import ParamGrads
from ordain.gradients.rules.folding import per_channel, summed_uses, trailing
from ordain.gradients.rules.registry import Use, register_rule

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
_INSTANCE_NORMS = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d


@register_rule(nn.LayerNorm, nn.RMSNorm)
def elementwise_norm(module: nn.LayerNorm | nn.RMSNorm, uses: list[Use]) -> dict[str, ParamGrads]:
    """Input ``[B, *, *normalized_shape]``, the shape of the weight."""
    shape: Any = module.normalized_shape
    normalize: Any = functional.rms_norm if isinstance(module, nn.RMSNorm) else functional.layer_norm

    def grads(use: Use) -> dict[str, Tensor]:
        x, b = trailing(use, len(shape))
        return {"weight": (normalize(x, shape, eps=module.eps) * b).sum(dim=1), "bias": b.sum(dim=1)}

    return summed_uses(module, uses, grads)


@register_rule(nn.GroupNorm, *_BATCH_NORMS, *_INSTANCE_NORMS)
def channelwise_norm(module: Any, uses: list[Use]) -> dict[str, ParamGrads]:
    """Input ``[B, C, *]``; for one example, InstanceNorm also takes ``[C, *]``."""
    dims = next((i + 2 for i, kind in enumerate(_INSTANCE_NORMS) if isinstance(module, kind)), None)

    def grads(use: Use) -> dict[str, Tensor]:
        x, b = trailing(use, dims or use.grads[0].ndim - 1)
        n = _normalized(module, x.flatten(0, 1)).view_as(x)
        return {"weight": per_channel(n * b), "bias": per_channel(b)}

    return summed_uses(module, uses, grads)


def _normalized(module: Any, x: Tensor) -> Tensor:
    """``[N, C, *]`` without weight and bias. Batch statistics mix examples and never come this far."""
    if isinstance(module, nn.GroupNorm):
        return functional.group_norm(x, module.num_groups, eps=module.eps)
    if isinstance(module, _BATCH_NORMS):
        return functional.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)
    own = module.training or not module.track_running_stats
    mean, variance = (None, None) if own else (module.running_mean, module.running_var)
    return functional.instance_norm(x, mean, variance, use_input_stats=own, eps=module.eps)


@register_rule(nn.PReLU)
def prelu(module: nn.PReLU, uses: list[Use]) -> dict[str, ParamGrads]:
    """Input of any shape with one slope, ``[B, C, *]`` with C of them."""
    shared = module.num_parameters == 1

    def grads(use: Use) -> dict[str, Tensor]:
        x, b = trailing(use, 0 if shared else use.grads[0].ndim - 1)
        each = x.clamp(max=0) * b
        return {"weight": each.sum(dim=1) if shared else per_channel(each)}

    return summed_uses(module, uses, grads)
