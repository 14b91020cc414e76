"""Multi-head attention: its projections are linear layers, seen while its forward runs.

``nn.MultiheadAttention`` calls no submodule: one function takes all its weights, projects, attends and
projects again. While the forward runs, that function runs with a ``linear`` that keeps its inputs and outputs.
Nothing is computed again, so dropout of the attention is no obstacle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import pairwise
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from ordain.gradients.combined import RowRange, Stacked, total
from ordain.gradients.layout import Layout
from ordain.gradients.param_grads import Materialized, OuterProduct, ParamGrads
from ordain.gradients.rules.registry import Use, register_rule


class _Projection(NamedTuple):
    """One call of ``linear``: its input ``[.., in]``, and the first rows that it used of its weight and bias.

    ``weight`` and ``bias`` are (name, row); the name is empty if that is none of the module's parameters. They are
    found while the forward runs: sharded parameters are whole only then.
    """

    a: Tensor
    weight: tuple[str, int]
    bias: tuple[str, int] | None


class _Watched(TorchFunctionMode):
    """Around one forward of the module: its projections, as :attr:`seen`, and their :attr:`outputs`."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self._parameters = parameters
        self.seen: list[_Projection] | None = None
        self.outputs: list[Tensor] = []

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
            self.seen.append(_Projection(input.detach(), _place(self._parameters, weight), at_bias))
            self.outputs.append(out)
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
    return _Watched(dict(module.named_parameters()))


@register_rule(nn.MultiheadAttention, watch=watch)
def attention(module: nn.MultiheadAttention, uses: list[Use]) -> dict[str, ParamGrads]:
    """Query ``[T, B, E]``, or ``[B, T, E]`` if batch_first."""
    parameters = dict(module.named_parameters())
    weights: dict[str, dict[tuple[int, int], list[tuple[Tensor, Tensor]]]] = {}  # by name and range of rows
    biases: dict[str, Tensor] = {}
    for use in uses:
        for number, one in enumerate(use.extra.seen or ()):
            leaf = use.inner(number)
            if leaf not in use.grads:
                continue
            # Inside, steps come first. (Where parameters are sharded, nothing has shown it.)
            use.layouts.setdefault(leaf, Layout(1) if one.a.ndim == 3 else Layout(0, interleaved=True))
            a, b = (use.batch_first(t, leaf) for t in (one.a, use.grads[leaf]))
            a, b = (t.reshape(use.size, -1, t.shape[-1]).contiguous() for t in (a, b))  # [B, T, features]
            name, start = one.weight
            if name:
                weights.setdefault(name, {}).setdefault((start, start + b.shape[2]), []).append((a, b))
            if one.bias is not None and one.bias[0]:
                name, start = one.bias
                if name not in biases:
                    biases[name] = b.new_zeros(use.size, parameters[name].numel())
                biases[name][:, start : start + b.shape[2]] += b.sum(dim=1)
    grads: dict[str, ParamGrads] = {name: Materialized.of(bias) for name, bias in biases.items()}
    return grads | {name: _joined(parts, len(parameters[name])) for name, parts in weights.items()}


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
