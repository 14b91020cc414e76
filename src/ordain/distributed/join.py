"""The ranks' forms of one parameter as one form of all their examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ordain.distributed.wire import Placed
from ordain.gradients.composed import Shifted, Total
from ordain.gradients.forms import Biased, Form, Made, Outer
from ordain.gradients.rows import Rows
from ordain.gradients.rules.conv import Convolved


def joined(batches: Sequence[Placed], places: Sequence[Tensor], ratios: Sequence[float]) -> Placed:
    """Forms of all ranks' examples.

    Args:
        batches: each rank's forms by offset.
        places: for each rank ``[B_r]``, which row of the joined batch each of its examples is.
        ratios: what each rank's gradients are multiplied by, for reductions over batches of different sizes.
    """
    if len({tuple((offset, form.numel) for offset, form in batch) for batch in batches if batch}) > 1:
        batches = [_split(batch) for batch in batches]  # a bias that one rank has joined to its weight
    by_offset: dict[int, list[Form | None]] = {}
    for number, batch in enumerate(batches):
        for offset, form in batch:
            by_offset.setdefault(offset, [None] * len(batches))[number] = _scaled(form, ratios[number])
    return [(offset, _join(_filled(forms, places), places)) for offset, forms in sorted(by_offset.items())]


def _join(forms: Sequence[Form], places: Sequence[Tensor]) -> Form:
    """One form of several of the same parameter."""
    first = forms[0]
    if len({type(form) for form in forms}) == 1:
        if isinstance(first, Outer):
            steps = max(form._steps for form in forms)  # type: ignore[attr-defined]
            a, b = (_laid([_longer(getattr(form, name), steps) for form in forms], places) for name in ("_a", "_b"))
            return type(first)(a, b)
        if isinstance(first, Rows):
            entries = [form._entries for form in forms]  # type: ignore[attr-defined]
            examples = torch.cat([place[one[0]] for place, one in zip(places, entries, strict=True)])
            ids, b = (torch.cat([one[k] for one in entries]) for k in (1, 2))
            return Rows(examples, ids, b, size=sum(len(place) for place in places), rows=first.rows)
        if isinstance(first, Convolved) and len({_geometry(form) for form in forms}) == 1:  # type: ignore[arg-type]
            x, b = (_laid([getattr(form, name) for form in forms], places) for name in ("_x", "_b"))
            return Convolved(x, b, first._geometry)
        if isinstance(first, Shifted) and len({form._start for form in forms}) == 1:  # type: ignore[attr-defined]
            inner = _join([form._form for form in forms], places)  # type: ignore[attr-defined]
            return Shifted(inner, first._start, first.rows)
        if isinstance(first, Total) and len({len(form._forms) for form in forms}) == 1:  # type: ignore[attr-defined]
            parts = zip(*(form._forms for form in forms), strict=True)  # type: ignore[attr-defined]
            return type(first)([_join(part, places) for part in parts])
    return Made(_laid([form.make(0, form.rows) for form in forms], places))


def _laid(parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """``[B_r, ...]`` of each rank into ``[B, ...]``, each row in its place."""
    whole = parts[0].new_empty(sum(len(place) for place in places), *parts[0].shape[1:])
    for part, place in zip(parts, places, strict=True):
        whole[place] = part.to(whole.dtype)
    return whole


def _longer(factor: Tensor, steps: int) -> Tensor:
    """``[B, T, k]`` with steps of zeros behind: they add nothing."""
    return pad(factor, (0, 0, 0, steps - factor.shape[1]))


def _geometry(form: Convolved) -> tuple[object, ...]:
    return (*form._x.shape[1:], *form._b.shape[1:], form._geometry)


def _split(batch: Placed) -> Placed:
    """Weights and biases apart."""
    apart: Placed = []
    for offset, form in batch:
        if isinstance(form, Biased):
            apart += [(offset, Outer(form._a, form._b)), (offset + form.rows * form.cols, Made(form._b))]
        else:
            apart.append((offset, form))
    return apart


def _scaled(form: Form, ratio: float) -> Form:
    if ratio == 1.0:
        return form
    if isinstance(form, Made):
        return Made(_times(form._made, ratio))
    if isinstance(form, Outer):
        return type(form)(form._a, _times(form._b, ratio))
    if isinstance(form, Rows):
        examples, ids, b = form._entries
        return Rows(examples, ids, _times(b, ratio), size=form.size, rows=form.rows)
    if isinstance(form, Convolved):
        return Convolved(form._x, _times(form._b, ratio), form._geometry)
    if isinstance(form, Shifted):
        return Shifted(_scaled(form._form, ratio), form._start, form.rows)
    if isinstance(form, Total):
        return type(form)([_scaled(part, ratio) for part in form._forms])
    raise TypeError(f"a form of type {type(form).__name__} was never sent")


def _filled(forms: Sequence[Form | None], places: Sequence[Tensor]) -> list[Form]:
    """Ranks on which the parameter got no gradient have one of zeros."""
    model = max((form for form in forms if form is not None), key=lambda form: form.size)
    return [_zeros(model, len(place)) if form is None else form for form, place in zip(forms, places, strict=True)]


def _zeros(form: Form, size: int) -> Form:
    if isinstance(form, Rows):
        examples, ids, b = (part[:0] for part in form._entries)
        return Rows(examples, ids, b, size=size, rows=form.rows)
    return _scaled(form.select(torch.zeros(size, dtype=torch.int64, device=form.make(0, 1).device)), 0.0)


def _times(tensor: Tensor, ratio: float) -> Tensor:
    return tensor * ratio if ratio else torch.zeros_like(tensor)  # not so with what is not finite
