"""Any other module: the vector-Jacobian product of its forward, vmapped over the examples.

Serves a module's own parameters (class tokens, scales, position tables) by running that module again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ordain.errors import UnsupportedModuleError
from ordain.gradients.combined import total
from ordain.gradients.memory import few_examples, out_of_memory
from ordain.gradients.param_grads import Materialized, ParamGrads
from ordain.gradients.rules.registry import Use


def fallback(module: nn.Module, uses: list[Use]) -> dict[str, ParamGrads]:
    """Gradients of the module's own trainable parameters."""
    own = {name: p.detach() for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    grads = [_of_use(module, own, use) for use in uses]
    return {name: total([Materialized.flat(one[name]) for one in grads]) for name in own}


def _of_use(module: nn.Module, own: dict[str, Tensor], use: Use) -> dict[str, Tensor]:
    kind, inputs = type(module).__name__, tree_leaves((use.args, use.kwargs))
    if use.size == 1:  # everything is that example's: run it as it is
        grads = vmapped_vjp(module, own, use, [None] * len(inputs), None)
        return {name: grad.unsqueeze(0) for name, grad in grads.items()}
    in_axes = [use.axes.get(("in", i)) if isinstance(leaf, Tensor) else None for i, leaf in enumerate(inputs)]
    out_axes = [axis for axis in (use.axes.get(("out", i)) for i in use.grads) if axis is not None]
    if all(axis is None for axis in in_axes) or len(out_axes) < len(use.grads):
        raise use.refusal(f"{kind}, with inputs or outputs whose examples cannot be told apart,")
    try:
        return vmapped_vjp(module, own, use, in_axes, out_axes, chunk_size=few_examples(use.size))
    except (RuntimeError, ValueError) as error:
        if out_of_memory(error):
            raise
        raise UnsupportedModuleError(
            f"{kind} at {use.path!r}, which owns {', '.join(own)} and could not be vmapped ({error})",
            expected="a module with a rule, or one whose forward torch.func can vmap",
            remedy="If it draws random numbers (dropout), set their probability to 0; register a rule with "
            "ordain.gradients.register_rule; or leave its parameters out with params=.",
        ) from error


def vmapped_vjp(
    module: nn.Module,
    params: Mapping[str, Tensor],
    use: Use,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int] | None,
    *,
    chunk_size: int | None = None,
) -> dict[str, Tensor]:
    """``[B, *shape]`` for each of ``params``: the gradients that ``use.grads`` bring to it, by example.

    Args:
        module: is run again.
        params: trained parameters by name, detached.
        use: the inputs and output gradients.
        in_axes: the batch dimension of each input leaf; None for one that all examples share.
        out_axes: the batch dimension of each output gradient; None: run as one example, which gives ``[*shape]``.
        chunk_size: examples at a time; all by default.
    """
    flat, spec = tree_flatten((use.args, use.kwargs))

    def gradient(batched: list[Tensor], cotangents: list[Tensor]) -> dict[str, Tensor]:
        rows = iter(batched)
        leaves = [x if axis is None else next(rows).unsqueeze(axis) for x, axis in zip(flat, in_axes, strict=True)]
        args, kwargs = tree_unflatten(leaves, spec)

        def outputs(weights: dict[str, Tensor]) -> list[Tensor]:
            out: list[Any] = tree_leaves(functional_call(module, weights, args, kwargs))
            return [out[i] for i in use.grads]

        if out_axes is not None:
            cotangents = [grad.unsqueeze(axis) for grad, axis in zip(cotangents, out_axes, strict=True)]
        grads: dict[str, Tensor] = vjp(outputs, dict(params))[1](cotangents)[0]
        return grads

    tensors = [x for x, axis in zip(flat, in_axes, strict=True) if axis is not None]
    cotangents = list(use.grads.values())
    # Without gradient: other parameters of the module would keep a graph. Attention as plain products: its fused
    # kernels cannot be vmapped, only looped over.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        if out_axes is None:
            return gradient(tensors, cotangents)
        in_dims = [axis for axis in in_axes if axis is not None], list(out_axes)
        grads: dict[str, Tensor] = vmap(gradient, in_dims=in_dims, chunk_size=chunk_size)(tensors, cotangents)
        return grads
