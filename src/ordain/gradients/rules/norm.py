"""Normalizations: y = w * n + c with n the normalized input, so w's gradient is b * n and c's is b, summed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ordain.gradients.param_grads import Materialized, ParamGrads
from ordain.gradients.rules.registry import Use, register_rule
from ordain.gradients.rules.trailing import trailing


@register_rule(nn.LayerNorm)
def layer_norm(module: nn.LayerNorm, uses: list[Use]) -> dict[str, ParamGrads]:
    """Input ``[B, *, *normalized_shape]``."""
    pairs = []
    for use in uses:
        x, b = trailing(use, len(module.normalized_shape))
        pairs.append((functional.layer_norm(x, module.normalized_shape, eps=module.eps), b))
    return _elementwise(module, pairs)


@register_rule(nn.RMSNorm)
def rms_norm(module: nn.RMSNorm, uses: list[Use]) -> dict[str, ParamGrads]:
    """Input ``[B, *, *normalized_shape]``."""
    pairs = []
    for use in uses:
        x, b = trailing(use, len(module.normalized_shape))
        pairs.append((functional.rms_norm(x, module.normalized_shape, eps=module.eps), b))
    return _elementwise(module, pairs)


@register_rule(nn.GroupNorm)
def group_norm(module: nn.GroupNorm, uses: list[Use]) -> dict[str, ParamGrads]:
    """Input ``[B, C, *]``."""
    pairs = []
    for use in uses:
        x, b = trailing(use, use.grads[0].ndim - 1)
        images = functional.group_norm(x.flatten(0, 1), module.num_groups, eps=module.eps)
        pairs.append((images.view_as(x), b))
    return _channelwise(module, pairs)


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(
    module: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d, uses: list[Use]
) -> dict[str, ParamGrads]:
    """Input ``[B, C, *space]``; unbatched for one example. In eval mode it may use running statistics."""
    dims = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}
    space = next(number for kind, number in dims.items() if isinstance(module, kind))
    own = module.training or not module.track_running_stats
    mean, variance = (None, None) if own else (module.running_mean, module.running_var)
    pairs = []
    for use in uses:
        x, b = trailing(use, space + 1)
        images = functional.instance_norm(x.flatten(0, 1), mean, variance, use_input_stats=own, eps=module.eps)
        pairs.append((images.view_as(x), b))
    return _channelwise(module, pairs)


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, uses: list[Use]) -> dict[str, ParamGrads]:
    """Input ``[B, C, *]``, with running statistics: those of a batch mix examples and never come this far."""
    pairs = []
    for use in uses:
        x, b = trailing(use, use.grads[0].ndim - 1)
        images = functional.batch_norm(x.flatten(0, 1), module.running_mean, module.running_var, eps=module.eps)
        pairs.append((images.view_as(x), b))
    return _channelwise(module, pairs)


def _elementwise(module: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> dict[str, ParamGrads]:
    """From (normalized input, output gradient), each ``[B, N, *shape of the weight]``."""
    return _affine(
        module,
        weight=[(n * b).sum(dim=1) for n, b in pairs],
        bias=[b.sum(dim=1) for _, b in pairs],
    )


def _channelwise(module: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> dict[str, ParamGrads]:
    """From (normalized input, output gradient), each ``[B, N, C, *]``."""
    return _affine(
        module,
        weight=[(n * b).transpose(1, 2).flatten(2).sum(dim=2) for n, b in pairs],
        bias=[b.transpose(1, 2).flatten(2).sum(dim=2) for _, b in pairs],
    )


def _affine(module: nn.Module, *, weight: list[Tensor], bias: list[Tensor]) -> dict[str, ParamGrads]:
    """Forms of the parameters that are there and trained, from gradients ``[B, *shape]`` of each use."""
    own = {name for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    each = {"weight": weight, "bias": bias}
    return {
        name: Materialized.flat(several[0] if len(several) == 1 else torch.stack(several).sum(dim=0))
        for name, several in each.items()
        if name in own
    }
