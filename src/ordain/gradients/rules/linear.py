"""Linear layers: W's gradient is b a', the bias's is b."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ordain.gradients.param_grads import Materialized, OuterProduct, ParamGrads
from ordain.gradients.rules.registry import Use, register_rule


@register_rule(nn.Linear)
def linear(module: nn.Linear, uses: list[Use]) -> dict[str, ParamGrads]:
    """Input ``[B, *, in]``, output gradient ``[B, *, out]``; further dimensions and uses add along T."""
    a = along_steps([use.input() for use in uses])
    b = along_steps([use.grad() for use in uses])
    return affine(a, b, bias=module.bias is not None)


@register_rule("transformers.pytorch_utils.Conv1D")
def transposed_linear(module: nn.Module, uses: list[Use]) -> dict[str, ParamGrads]:
    """GPT-2's linear layer, whose weight is ``[in, out]``: inputs and output gradients change places."""
    a = along_steps([use.input() for use in uses])
    b = along_steps([use.grad() for use in uses])
    return {"weight": OuterProduct(b, a), "bias": Materialized(b.sum(dim=1, keepdim=True))}


def along_steps(tensors: list[Tensor]) -> Tensor:
    """``[B, *, features]`` each, to one ``[B, T, features]``."""
    flat = [t if t.ndim == 3 else t.reshape(t.shape[0], -1, t.shape[-1]) for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def affine(a: Tensor, b: Tensor, *, bias: bool, names: tuple[str, str] = ("weight", "bias")) -> dict[str, ParamGrads]:
    """Forms of y = W a + c from a ``[B, T, in]`` and b ``[B, T, out]``."""
    forms: dict[str, ParamGrads] = {names[0]: OuterProduct(a, b)}
    if bias:
        forms[names[1]] = Materialized(b if b.shape[1] == 1 else b.sum(dim=1, keepdim=True))
    return forms
