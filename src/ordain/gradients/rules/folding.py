"""Helpers of rules for layers that give their last dimensions a meaning: channels, space, a normalized shape."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ordain.errors import UnsupportedModuleError
from ordain.gradients.param_grads import Materialized, ParamGrads
from ordain.gradients.rules.registry import Use


def trailing(use: Use, keep: int) -> tuple[Tensor, Tensor]:
    """The input and the output gradient, each ``[B, N, *last keep dimensions]``.

    N gathers the dimensions before the kept ones other than the batch dimension, so that a batch of one comes out the
    same with and without a batch dimension. A batch dimension among the kept ones is mixed by the layer, and refused.
    """
    x, grad, way = use.input(), use.grad(), use.layouts.get(0)
    if use.size > 1 and (way is None or way.axis >= use.grads[0].ndim - keep):
        raise UnsupportedModuleError(
            f"an input of shape {tuple(x.shape)} at {use.path!r}, whose examples the layer mixes",
            expected="examples in the layer's batch dimension",
            remedy="Give the layer a batch dimension, or say with batch_dim= where the model's inputs have it.",
        )
    kept = (t.reshape(len(t), t.shape[1 : t.ndim - keep].numel(), *t.shape[t.ndim - keep :]) for t in (x, grad))
    return next(kept), next(kept)


def per_channel(tensor: Tensor) -> Tensor:
    """``[B, N, C, *]`` to sums ``[B, C]``."""
    return tensor.transpose(1, 2).flatten(2).sum(dim=2)


def summed_uses(module: nn.Module, uses: list[Use], grads: Callable[[Use], dict[str, Tensor]]) -> dict[str, ParamGrads]:
    """``grads(use)`` ``[B, *shape]`` by name, added up over the uses, of the parameters that are trained."""
    found = [grads(use) for use in uses]
    trained = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
    return {name: Materialized.of(sum((one[name] for one in found[1:]), found[0][name])) for name in trained}
