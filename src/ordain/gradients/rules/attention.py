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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from ordain.errors import UnsupportedModuleError
from ordain.gradients.combined import RowRange, Stacked, total
from ordain.gradients.param_grads import Materialized, OuterProduct, ParamGrads
from ordain.gradients.rules.registry import Use, register_rule


class _Part(NamedTuple):
    """So many rows of a parameter, from ``start`` on; of none of them, if it has no name."""

    name: str | None
    start: int
    rows: int


@dataclass
class _Projection:
    """One call of ``linear``: input ``[.., in]``, gradient ``[.., out]``, and which rows of which parameters it used.

    Those are found while the forward runs: parameters that are shared out over ranks are whole only then.
    """

    a: Tensor
    weight: _Part
    bias: _Part | None
    b: Tensor | None = None

    def reach(self, grad: Tensor) -> None:
        """What a backward brings to the output."""
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
    weights: dict[str, dict[tuple[int, int], list[tuple[Tensor, Tensor]]]] = {}  # name, rows: inputs and gradients
    biases: dict[str, Tensor] = {}
    for use in uses:
        _require_examples(module, use)
        for one in use.extra.seen or ():
            if one.b is None:
                continue
            a, b = _examples_first(one.a, use.size), _examples_first(one.b, use.size)
            one.b = None  # another backward through the same graph begins anew
            name, start, count = _named(one.weight)
            weights.setdefault(name, {}).setdefault((start, count), []).append((a, b))
            if one.bias is not None:
                name, start, count = _named(one.bias)
                if name not in biases:
                    biases[name] = b.new_zeros(use.size, parameters[name].numel())
                biases[name][:, start : start + count] += b.sum(dim=1)
    forms: dict[str, ParamGrads] = {name: Materialized.flat(made) for name, made in biases.items()}
    for name, parts in weights.items():
        forms[name] = _joined(parts, len(parameters[name]))
    return forms


def _require_examples(module: nn.MultiheadAttention, use: Use) -> None:
    """The examples must be where the module has its sequences: it attends along the other dimension."""
    for place, name in enumerate(("query", "key", "value")):
        given = use.argument(place, name)
        if use.size > 1 and (given.ndim != 3 or use.axis(given) != (0 if module.batch_first else 1)):
            raise use.refusal(
                f"MultiheadAttention with batch_first={module.batch_first}, whose {name} of shape "
                f"{tuple(given.shape)} does not have its examples where the layer has its sequences,"
            )


def _examples_first(tensor: Tensor, size: int) -> Tensor:
    """``[T, B, features]`` or ``[T B, features]`` to ``[B, T, features]``."""
    return tensor.reshape(-1, size, tensor.shape[-1]).transpose(0, 1).contiguous()


def _place(parameters: dict[str, nn.Parameter], part: Tensor) -> _Part:
    """The parameter that a tensor is rows of, and which."""
    for name, p in parameters.items():
        offset = (part.data_ptr() - p.data_ptr()) // p.element_size()
        if part.shape[1:] == p.shape[1:] and 0 <= offset < p.numel():
            return _Part(name, offset // (p.numel() // len(p)), len(part))
    return _Part(None, 0, len(part))


def _named(part: _Part) -> tuple[str, int, int]:
    if part.name is None:
        raise UnsupportedModuleError(
            f"MultiheadAttention that projects with a weight of {part.rows} rows which is none of its parameters",
            expected="plain parameters, without parametrization",
            remedy="Remove the parametrization, or leave the layer out with params=.",
        )
    return part.name, part.start, part.rows


def _joined(parts: dict[tuple[int, int], list[tuple[Tensor, Tensor]]], rows: int) -> ParamGrads:
    """One form of a parameter of ``rows`` rows from the inputs and gradients of ranges (start, length) of them."""
    forms: list[ParamGrads] = []
    for (start, count), several in parts.items():
        a, b = (torch.cat(pair, dim=1) if len(pair) > 1 else pair[0] for pair in zip(*several, strict=True))
        forms.append(OuterProduct(a, b) if count == rows else RowRange(OuterProduct(a, b), start=start, rows=rows))
    ranges = sorted(parts)
    apart = all(lo + count <= after for (lo, count), (after, _) in pairwise(ranges))
    return Stacked(*forms) if apart and len(forms) > 1 else total(forms)
