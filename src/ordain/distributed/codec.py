"""A batch of gradients as bytes: for each parameter its factors or the gradients themselves, whichever is smaller.

A text says what there is (kinds, shapes, dtypes), and one run of bytes holds the numbers. Nothing is executed on
reading: only the kinds named here are known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ordain.gradients.combined import RowRange, Stacked, Sum
from ordain.gradients.factored import Placed
from ordain.gradients.param_grads import Materialized, OuterProduct, ParamGrads, WithBias
from ordain.gradients.rules.conv import Convolved
from ordain.gradients.sparse_rows import SparseRows

_ALIGN = 16  # bytes: a tensor begins where any dtype may
_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32)}
_KINDS: dict[str | None, type[ParamGrads]] = {
    kind.kind: kind for kind in (Materialized, OuterProduct, WithBias, SparseRows, Convolved, RowRange, Sum, Stacked)
}

Spec = dict[str, Any]


def encode(placed: Placed, *, size: int, scale: float) -> tuple[str, Tensor]:
    """What is sent of a batch: a description and ``[bytes]``."""
    tensors: list[Tensor] = []
    specs = [[offset, _describe(_smaller(grads), tensors)] for offset, grads in placed]
    text = json.dumps({"size": size, "scale": scale, "parameters": specs}, sort_keys=True)
    return text, _bytes(tensors)


def decode(text: str, data: Tensor) -> tuple[int, float, Placed]:
    """The batch that :func:`encode` was given: size, scale, gradients of each parameter."""
    told = json.loads(text)
    place = 0

    def take(dtype: str, shape: Sequence[int]) -> Tensor:
        nonlocal place
        count = torch.Size(shape).numel() * _DTYPES[dtype].itemsize
        piece = data[place : place + count].view(_DTYPES[dtype]).view(shape)
        place += count + -count % _ALIGN
        return piece

    return told["size"], told["scale"], [(offset, _build(spec, take)) for offset, spec in told["parameters"]]


def _smaller(grads: ParamGrads) -> ParamGrads:
    """The factors, or the materialised gradients where that is less to send."""
    tensors: list[Tensor] = []
    _describe(grads, tensors)
    alone = len(grads.apart()) == 1
    if alone and grads.size * grads.numel < sum(tensor.numel() for tensor in tensors):
        return Materialized(grads.materialize(0, grads.rows))
    return grads


def _describe(grads: ParamGrads, tensors: list[Tensor]) -> Spec:
    """Describe gradients, and add their tensors. A kind that is not known here is sent materialised."""
    if grads.kind not in _KINDS:
        grads = Materialized(grads.materialize(0, grads.rows))
    spec: Spec = {"kind": grads.kind, "settings": grads.settings()}
    parts = grads.parts()
    if parts:
        return spec | {"parts": [_describe(part, tensors) for part in parts]}
    mine = [tensor.to(torch.int32) if tensor.dtype == torch.int64 else tensor for tensor in grads.tensors()]
    tensors += mine
    return spec | {"tensors": [[str(tensor.dtype), list(tensor.shape)] for tensor in mine]}


def _build(spec: Spec, take: Callable[[str, Sequence[int]], Tensor]) -> ParamGrads:
    parts = [_build(part, take) for part in spec.get("parts", [])]
    mine = [take(dtype, shape) for dtype, shape in spec.get("tensors", [])]
    return _KINDS[spec["kind"]].build(mine, parts, **spec["settings"])


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat([nn.functional.pad(one, (0, -len(one) % _ALIGN)) for one in raw])
