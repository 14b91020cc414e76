"""Inputs and output gradients of layers that give their last dimensions a meaning."""

from __future__ import annotations

from torch import Tensor

from ordain.gradients.rules.registry import Use


def trailing(use: Use, keep: int) -> tuple[Tensor, Tensor]:
    """The input and the output gradient, each ``[B, N, *last keep dimensions]``.

    N gathers whatever stands before the kept dimensions besides the examples, so that a batch of one comes
    out the same with and without a dimension that counts it. Examples counted inside the kept dimensions
    are mixed by the layer, and refused.
    """
    x, grad = use.input(), use.grad()
    if use.size > 1:
        for place in ("in", "out"):
            axis = use.axes[place, 0]
            if axis is None or axis >= x.ndim - keep:
                raise use.refusal(f"an input of shape {tuple(x.shape)} whose examples the layer mixes")
    return _folded(x, keep), _folded(grad, keep)


def _folded(tensor: Tensor, keep: int) -> Tensor:
    last = tensor.shape[tensor.ndim - keep :]
    between = tensor.shape[1 : tensor.ndim - keep]
    return tensor.reshape(tensor.shape[0], between.numel(), *last)
