"""A batch of gradients as bytes: for each parameter its factors or the gradients themselves, whichever is smaller.

A text says what there is (kinds, shapes, dtypes), and one run of bytes holds the numbers. Nothing is executed on
reading: only the kinds named here are known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ordain.gradients.composed import Shifted, Stacked, Total
from ordain.gradients.forms import Biased, Form, Made, Outer
from ordain.gradients.rows import Rows
from ordain.gradients.rules.conv import Convolved, Geometry

_ALIGN = 16  # bytes: a tensor begins where any dtype may
_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32)}

Spec = dict[str, Any]
Placed = list[tuple[int, Form]]  # (offset in the flat gradient, form)


def packed(forms: Placed, *, size: int, scale: float) -> tuple[str, Tensor]:
    """What is sent of a batch: a description and ``[bytes]``."""
    tensors: list[Tensor] = []
    specs = [[offset, _spec(_smaller(form), tensors)] for offset, form in forms]
    text = json.dumps({"size": size, "scale": scale, "forms": specs}, sort_keys=True)
    return text, _bytes(tensors)


def unpacked(text: str, data: Tensor) -> tuple[int, float, Placed]:
    """The batch that :func:`packed` was given: size, scale, forms."""
    told = json.loads(text)
    place = 0

    def take(dtype: str, shape: Sequence[int]) -> Tensor:
        nonlocal place
        count = torch.Size(shape).numel() * _DTYPES[dtype].itemsize
        piece = data[place : place + count].view(_DTYPES[dtype]).view(shape)
        place += -(-count // _ALIGN) * _ALIGN
        return piece

    forms = []
    for offset, spec in told["forms"]:
        tensors = iter([take(dtype, shape) for dtype, shape in _tensors_in(spec)])
        forms.append((offset, _form(spec, tensors)))
    return told["size"], told["scale"], forms


def _smaller(form: Form) -> Form:
    """The factors, or the gradients made out of them where that is less to send."""
    numbers = sum(tensor.numel() for tensor in _factors(form))
    made = not isinstance(form, Biased) and form.size * form.numel < numbers
    return Made(form.make(0, form.rows)) if made else form


def _factors(form: Form) -> list[Tensor]:
    tensors: list[Tensor] = []
    _spec(form, tensors)
    return tensors


def _spec(form: Form, tensors: list[Tensor]) -> Spec:
    """Describe a form, and add its tensors; what is linear in the gradient comes last."""
    spec: Spec = {"kind": type(form).__name__}
    mine: list[Tensor] = []
    if isinstance(form, Made):
        mine = [form._made]
    elif isinstance(form, Outer):  # and Biased
        mine = [form._a, form._b]
    elif isinstance(form, Rows):
        examples, ids, b = form._joined
        mine = [examples.to(torch.int32), ids.to(torch.int32), b]
        spec |= {"size": form.size, "rows": form.rows}
    elif isinstance(form, Convolved):
        mine = [form._x, form._b]
        spec["geometry"] = asdict(form._geometry)
    elif isinstance(form, Shifted):
        spec |= {"start": form._start, "rows": form.rows, "parts": [_spec(form._form, tensors)]}
    elif isinstance(form, Total):  # and Stacked
        spec["parts"] = [_spec(part, tensors) for part in form._forms]
    else:  # a form of a user's rule
        return _spec(Made(form.make(0, form.rows)), tensors)
    if mine:
        spec["tensors"] = [[str(tensor.dtype), list(tensor.shape)] for tensor in mine]
        tensors += mine
    return spec


def _tensors_in(spec: Spec) -> Iterator[tuple[str, list[int]]]:
    for part in spec.get("parts", []):
        yield from _tensors_in(part)
    yield from spec.get("tensors", [])


def _form(spec: Spec, tensors: Iterator[Tensor]) -> Form:
    kind, parts = spec["kind"], [_form(part, tensors) for part in spec.get("parts", [])]
    mine = [next(tensors) for _ in spec.get("tensors", [])]
    if kind == "Rows":
        return Rows(mine[0].long(), mine[1].long(), mine[2], size=spec["size"], rows=spec["rows"])
    if kind == "Convolved":
        told = spec["geometry"]
        padding = tuple((before, after) for before, after in told["padding"])
        kernel, stride, dilation = (tuple(told[name]) for name in ("kernel", "stride", "dilation"))
        return Convolved(mine[0], mine[1], Geometry(kernel, stride, dilation, padding, told["groups"]))
    if kind == "Shifted":
        return Shifted(parts[0], spec["start"], spec["rows"])
    if kind in ("Total", "Stacked"):
        return (Total if kind == "Total" else Stacked)(parts)
    if kind == "Made":
        return Made(mine[0])
    return (Biased if kind == "Biased" else Outer)(mine[0], mine[1])


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN for tensor in tensors]
    data = torch.zeros(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    place = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        data[place : place + len(raw)] = raw
        place += size
    return data
