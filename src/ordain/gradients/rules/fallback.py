"""Any other module: the vector-Jacobian product of its forward, vmapped over the examples.

Serves a module's own parameters (class tokens, scales, position tables) by running that module again.
"""

from __future__ import annotations

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
    """Forms of the module's own trainable parameters."""
    forms: dict[str, list[ParamGrads]] = {}
    for use in uses:
        # Without gradient: submodules have parameters that a graph would hold on to. Attention as plain
        # products: its fused kernels cannot be vmapped, only looped over.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            gradients = _gradients(module, use)
        for name, made in gradients.items():
            forms.setdefault(name, []).append(Materialized.flat(made))
    return {name: total(several) for name, several in forms.items()}


def _gradients(module: nn.Module, use: Use) -> dict[str, Tensor]:
    own = {name: p.detach() for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    flat, spec = tree_flatten((use.args, use.kwargs))
    # With one example everything is that example's: run it as it is.
    axes = [
        use.axes.get(("in", i)) if use.size > 1 and isinstance(leaf, Tensor) else None for i, leaf in enumerate(flat)
    ]
    tensors = [leaf for leaf, axis in zip(flat, axes, strict=True) if axis is not None]
    leaves = sorted(use.grads)
    out_axes = [use.axes.get(("out", i)) for i in leaves]
    if use.size > 1 and (not tensors or any(axis is None for axis in out_axes)):
        raise use.refusal(f"{type(module).__name__}, with inputs or outputs whose examples cannot be told apart,")

    def gradient(xs: list[Tensor], cotangents: list[Tensor]) -> dict[str, Tensor]:
        rows = iter(xs)
        whole = [leaf if axis is None else next(rows).unsqueeze(axis) for leaf, axis in zip(flat, axes, strict=True)]
        args, kwargs = tree_unflatten(whole, spec)

        def outputs(weights: dict[str, Tensor]) -> list[Tensor]:
            out: list[Any] = tree_leaves(functional_call(module, weights, args, kwargs))
            return [out[i] for i in leaves]

        pull = vjp(outputs, own)[1]
        answer: dict[str, Tensor] = pull(cotangents)[0]
        return answer

    grads = [use.grads[i] for i in leaves]
    if use.size == 1:
        return {name: made.unsqueeze(0) for name, made in gradient([], grads).items()}

    def row(xs: list[Tensor], cotangents: list[Tensor]) -> dict[str, Tensor]:
        return gradient(xs, [g.unsqueeze(axis or 0) for g, axis in zip(cotangents, out_axes, strict=True)])

    in_axes = [axis for axis in axes if axis is not None]
    try:
        mapped = vmap(row, in_dims=(in_axes, out_axes), chunk_size=few_examples(use.size))
        made: dict[str, Tensor] = mapped(tensors, grads)
    except (RuntimeError, ValueError) as error:
        if out_of_memory(error):
            raise
        raise UnsupportedModuleError(
            f"{type(module).__name__} at {use.path!r}, which owns {', '.join(own)} and could not be vmapped ({error})",
            expected="a module with a rule, or one whose forward torch.func can vmap",
            remedy="If it draws random numbers (dropout), set their probability to 0; register a rule with "
            "ordain.gradients.register_rule; or leave its parameters out with params=.",
        ) from error
    return made
