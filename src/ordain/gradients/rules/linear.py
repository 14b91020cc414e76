"""Linear and bilinear layers: W's gradient is b a', the bias's is b."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ordain.gradients.param_grads import Materialized, OuterProduct, ParamGrads, WithBias
from ordain.gradients.rules.registry import Names, Use, register_rule


@register_rule(nn.Linear)
def linear(module: nn.Linear, uses: list[Use]) -> dict[Names, ParamGrads]:
    """Input ``[B, *, in]``, output gradient ``[B, *, out]``; further dimensions and uses add along T."""
    return affine(*along_steps(uses), bias=module.bias is not None)


@register_rule("transformers.pytorch_utils.Conv1D")
def transposed_linear(module: nn.Module, uses: list[Use]) -> dict[Names, ParamGrads]:
    """GPT-2's linear layer, whose weight is ``[in, out]``: inputs and output gradients change places."""
    a, b = along_steps(uses)
    return {"weight": OuterProduct(b, a), "bias": Materialized(b.sum(dim=1, keepdim=True))}


@register_rule(nn.Bilinear)
def bilinear(module: nn.Bilinear, uses: list[Use]) -> dict[Names, ParamGrads]:
    """Inputs x ``[B, *, in1]`` and z ``[B, *, in2]``: the gradient of W ``[out, in1, in2]`` is b x' z', over all three.

    Two of them are multiplied first, those that leave fewer numbers.
    """
    inputs = [[use.batch_first(use.argument(i, f"input{i + 1}"), 0) for use in uses] for i in range(2)]
    x, z, b = (_joined(several, uses[0].size) for several in (*inputs, [use.grad() for use in uses]))
    if module.out_features >= module.in2_features:
        return affine(_outer(x, z), b, bias=module.bias is not None)
    found: dict[Names, ParamGrads] = {"weight": OuterProduct(z, _outer(b, x))}
    return found if module.bias is None else found | {"bias": Materialized(b.sum(dim=1, keepdim=True))}


def along_steps(uses: list[Use]) -> tuple[Tensor, Tensor]:
    """Inputs ``[B, T, in]`` and output gradients ``[B, T, out]`` of all uses, one after the other along T."""
    size = uses[0].size
    return _joined([use.input() for use in uses], size), _joined([use.grad() for use in uses], size)


def _joined(several: list[Tensor], size: int) -> Tensor:
    """``[B, *, F]`` each, as one ``[B, T, F]``."""
    flat = [t.unsqueeze(1) if t.ndim == 2 else t.reshape(size, -1, t.shape[-1]) for t in several]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def _outer(u: Tensor, v: Tensor) -> Tensor:
    """``[B, T, F]`` and ``[B, T, G]`` to all products ``[B, T, F G]``."""
    return (u[..., None] * v[..., None, :]).flatten(2)


def affine(a: Tensor, b: Tensor, *, bias: bool, names: tuple[str, str] = ("weight", "bias")) -> dict[Names, ParamGrads]:
    """Gradients for y = W a + c from a ``[B, T, in]`` and b ``[B, T, out]``."""
    if not bias:
        return {names[0]: OuterProduct(a, b)}
    if b.shape[1] == 1 and a.dtype is b.dtype:
        return {names: WithBias(a, b)}
    return {names[0]: OuterProduct(a, b), names[1]: Materialized(b.sum(dim=1, keepdim=True))}
