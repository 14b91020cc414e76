"""Linear layers: W's gradient is b a', the bias's is b."""

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


def along_steps(uses: list[Use]) -> tuple[Tensor, Tensor]:
    """Inputs ``[B, T, in]`` and output gradients ``[B, T, out]`` of all uses, one after the other along T."""
    pairs = [(_steps(use.input(), use.size), _steps(use.grad(), use.size)) for use in uses]
    if len(pairs) == 1:
        return pairs[0]
    a, b = zip(*pairs, strict=True)
    return torch.cat(a, dim=1), torch.cat(b, dim=1)


def _steps(tensor: Tensor, size: int) -> Tensor:
    return tensor.unsqueeze(1) if tensor.ndim == 2 else tensor.reshape(size, -1, tensor.shape[-1])


def affine(a: Tensor, b: Tensor, *, bias: bool, names: tuple[str, str] = ("weight", "bias")) -> dict[Names, ParamGrads]:
    """Gradients for y = W a + c from a ``[B, T, in]`` and b ``[B, T, out]``."""
    if not bias:
        return {names[0]: OuterProduct(a, b)}
    if b.shape[1] == 1 and a.dtype is b.dtype:
        return {names: WithBias(a, b)}
    return {names[0]: OuterProduct(a, b), names[1]: Materialized(b.sum(dim=1, keepdim=True))}
