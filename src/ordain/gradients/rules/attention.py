"""Multi-head attention: its projections are linear layers, seen while its forward runs.

``nn.MultiheadAttention`` calls no submodule: one function takes all its weights, projects, attends and
projects again. While the forward runs, that function runs with a ``linear`` that keeps its input and asks
for the gradient at its output. Nothing is computed again, so dropout of the attention is no obstacle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from ordain.errors import UnsupportedModuleError
from ordain.gradients.combined import RowRange, Stacked, total
from ordain.gradients.param_grads import Materialized, OuterProduct, ParamGrads
from ordain.gradients.rules.registry import Use, register_rule


@dataclass
class _Projection:
    """One call of ``linear``: input ``[.., in]``, gradient ``[.., out]``, and the first rows that it used.

    ``weight`` and ``bias`` are (name, row); the name is empty if that is none of the module's parameters. They are
    found while the forward runs: sharded parameters are whole only then.
    """

    a: Tensor
    weight: tuple[str, int]
    bias: tuple[str, int] | None
    b: Tensor | None = None

    def reach(self, grad: Tensor) -> None:
        """Add the gradient that a backward brings to the output."""
        grad = _single(grad.detach())
        self.b = grad if self.b is None else self.b + grad


def _single(tensor: Tensor) -> Tensor:
    """No less than float32, which autocast may have made it."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class _Watched(TorchFunctionMode):
    """Around one forward of the module: its projections, as :attr:`seen`."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self._parameters = parameters
        self.seen: list[_Projection] | None = None

    def __enter__(self) -> Any:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        """From wherever it is in the stack of modes: after an interrupt it may no longer be the innermost."""
        above = []
        while torch._C._len_torch_function_stack():
            mode = _pop_mode()  # type: ignore[no-untyped-call]
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.multi_head_attention_forward and self.seen is None:
            self.seen = []
            func = _with_linear(func, self._linear)
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        out = functional.linear(input, weight, bias)
        if out.requires_grad and self.seen is not None:
            at_bias = None if bias is None else _place(self._parameters, bias)
            projection = _Projection(_single(input.detach()), _place(self._parameters, weight), at_bias)
            out.register_hook(projection.reach)  # type: ignore[no-untyped-call]
            self.seen.append(projection)
        return out


def _with_linear(function: Callable[..., Any], linear: Callable[..., Tensor]) -> Callable[..., Any]:
    """The same function of ``torch.nn.functional`` with another ``linear``, there and in what it calls.

    Only this call sees it: the module's names are copied, not changed. It must not ask the modes that are
    active (a default device is one) to run it, as they would run the original.
    """
    names = {**vars(functional), "linear": linear, "has_torch_function": lambda _: False}
    copied: Any = function
    for name in copied.__code__.co_names:
        inner = names.get(name)
        if isinstance(inner, FunctionType) and "linear" in inner.__code__.co_names:
            names[name] = _rebound(inner, names)
    return _rebound(copied, names)


def _rebound(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def watch(
    module: nn.MultiheadAttention, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[_Watched]:
    """See the projections of one forward."""
    if module.bias_k is not None and module.bias_k.requires_grad:
        raise UnsupportedModuleError(
            f"MultiheadAttention at {path!r} with add_bias_kv=True",
            expected="add_bias_kv=False",
            remedy="Build it with add_bias_kv=False, or freeze bias_k and bias_v with requires_grad_(False).",
        )
    return _Watched(dict(module.named_parameters()))


@register_rule(nn.MultiheadAttention, watch=watch)
def attention(module: nn.MultiheadAttention, uses: list[Use]) -> dict[str, ParamGrads]:
    """Query ``[T, B, E]``, or ``[B, T, E]`` if batch_first; the projections see steps first either way."""
    parameters = dict(module.named_parameters())
    weights: dict[str, dict[tuple[int, int], list[tuple[Tensor, Tensor]]]] = {}  # by name and range of rows
    biases: dict[str, Tensor] = {}
    for use in uses:
        _require_examples(module, use)
        for one in use.extra.seen or ():
            if one.b is None:
                continue
            # [T, B, features] or [T B, features] to [B, T, features]
            a, b = (t.reshape(-1, use.size, t.shape[-1]).transpose(0, 1).contiguous() for t in (one.a, one.b))
            one.b = None  # another backward through the same graph begins anew
            if not one.weight[0] or one.bias == ("", 0):
                raise UnsupportedModuleError(
                    f"MultiheadAttention that projects with {b.shape[2]} rows which are none of its parameters",
                    expected="plain parameters, without parametrization",
                    remedy="Remove the parametrization, or leave the layer out with params=.",
                )
            name, start = one.weight
            weights.setdefault(name, {}).setdefault((start, start + b.shape[2]), []).append((a, b))
            if one.bias is not None:
                name, start = one.bias
                if name not in biases:
                    biases[name] = b.new_zeros(use.size, parameters[name].numel())
                biases[name][:, start : start + b.shape[2]] += b.sum(dim=1)
    grads: dict[str, ParamGrads] = {name: Materialized.flat(bias) for name, bias in biases.items()}
    return grads | {name: _joined(parts, len(parameters[name])) for name, parts in weights.items()}


def _require_examples(module: nn.MultiheadAttention, use: Use) -> None:
    """The examples must be where the module has its sequences: it attends along the other dimension."""
    for place, name in enumerate(("query", "key", "value")):
        given = use.argument(place, name)
        if use.size > 1 and (given.ndim != 3 or use.axis(given) != (0 if module.batch_first else 1)):
            raise use.refusal(
                f"MultiheadAttention with batch_first={module.batch_first}, whose {name} of shape "
                f"{tuple(given.shape)} does not have its examples where the layer has its sequences,"
            )


def _place(parameters: dict[str, nn.Parameter], part: Tensor) -> tuple[str, int]:
    """The parameter that a tensor is rows of, and its first row there."""
    for name, p in parameters.items():
        offset = (part.data_ptr() - p.data_ptr()) // p.element_size()
        if part.shape[1:] == p.shape[1:] and 0 <= offset < p.numel():
            return name, offset // (p.numel() // len(p))
    return "", 0


def _joined(parts: dict[tuple[int, int], list[tuple[Tensor, Tensor]]], rows: int) -> ParamGrads:
    """A parameter of ``rows`` rows, from the inputs and gradients of ranges of them."""
    grads: list[ParamGrads] = []
    for (start, stop), several in parts.items():
        a, b = (torch.cat(column, dim=1) for column in zip(*several, strict=True))
        outer = OuterProduct(a, b)
        grads.append(outer if stop - start == rows else RowRange(outer, start=start, rows=rows))
    disjoint = all(stop <= after for (_, stop), (after, _) in pairwise(sorted(parts)))
    return Stacked(*grads) if disjoint and len(grads) > 1 else total(grads)
