"""Batches kept until they make one: a product of many rows takes less time than several of few.

Signs are due when the epoch ends, and they are the same whatever the batches are: so factors of a few batches may wait
for each other. Copies, since a training loop may write its next batch where this one was. They are few numbers beside
the vectors that they spare reading, and no more than what is made at a time anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ordain.gradients.factored import Factored
from ordain.gradients.forms import PLAIN, Form
from ordain.gradients.memory import chunk_numbers
from ordain.gradients.small import DTYPES
from ordain.orders.base import Indices
from ordain.orders.state import State, array, broken, check_vectors

MOST = 256  # rows: at twice as many the Gram matrix costs what the products save
FEW_NUMBERS = 2**16  # in a gradient: such products are over before anything is gathered
_LIKE = {dtype: torch.empty(0, dtype=dtype, device="cpu") for dtype in DTYPES}
_NOTHING = Factored([], dim=0, size=0, scale=1.0, like=_LIKE[torch.float32])


class Gathered:
    """Consecutive batches of one kind, and the slots that their rows belong to."""

    def __init__(self) -> None:
        self.rows = 0  # how many are there: set last, so that what breaks off has added nothing
        self._like = _NOTHING  # a batch of no rows, of the kind that is gathered
        self._kept: list[list[Tensor]] = []  # for each form of it, its parts: ``[room, ...]``
        self._slots: Indices = np.empty(0, dtype=np.int64)  # ``[room]``

    def takes(self, batch: Factored) -> bool:
        """Does gathering such batches pay, and has this one nothing that must be looked at at once?"""
        return 3 * batch.size <= _room(batch) and _finite(batch)

    def fits(self, batch: Factored) -> bool:
        """Is it of the kind that is gathered, and is there room?"""
        return self.rows + batch.size <= len(self._slots) and _kind(self._like) == _kind(batch)

    def add(self, batch: Factored, slots: Indices) -> None:
        """Keep copies. Where it does not fit, what was gathered must have been cleared."""
        if not self.fits(batch):
            room = _room(batch)
            kept = [[part.new_empty(room, *part.shape[1:]) for part in _parts(form)] for form in _forms(batch)]
            like = batch.select(torch.empty(0, dtype=torch.int64, device="cpu"))
            self._like, self._kept, self._slots = like, kept, np.empty(room, dtype=np.int64)
        there = slice(self.rows, self.rows + batch.size)
        for form, kept_parts in zip(_forms(batch), self._kept, strict=True):
            for part, into in zip(_parts(form), kept_parts, strict=True):
                into[there] = part
        self._slots[there] = slots
        self.rows += batch.size

    def batch(self) -> tuple[Factored, Indices]:
        """All that was gathered, as one."""
        forms = [
            (offset, type(form)(*(part[: self.rows] for part in kept)))
            for (offset, form), kept in zip(self._like.forms(), self._kept, strict=True)
        ]
        whole = _factored(forms, size=self.rows, dim=self._like.dim, scale=self._like.scale, dtype=self._like.dtype)
        return whole, self._slots[: self.rows].copy()

    def clear(self) -> None:
        """Nothing is gathered; the room stays."""
        self.rows = 0

    # --- saving -----------------------------------------------------------------------------------

    def state(self) -> State:
        """What :meth:`load` needs."""
        batch, slots = self.batch()
        return {
            "slots": torch.from_numpy(slots),
            "scale": batch.scale,
            "dtype": DTYPES.index(batch.dtype),
            "forms": [
                {"offset": offset, "kind": type(form).__name__, "parts": [part.clone() for part in _parts(form)]}
                for offset, form in batch.forms()
            ],
        }

    def load(self, state: State | None, dim: int) -> None:
        """As it was saved, after :func:`check_gathered`; None is nothing."""
        self.clear()
        if state is not None:
            self.add(_loaded(state, dim), array(state["slots"]))


def check_gathered(state: Any, *, dim: int, units: int, dtype: torch.dtype | None) -> None:
    """Raise if no order of so many units, with vectors ``[dim]`` of this dtype, can have written this."""
    try:
        slots = state["slots"]
        for part in (part for one in state["forms"] for part in one["parts"]):  # before anything is made of them
            check_vectors("gathered", part, (len(slots), *part.shape[1:]))
        batch = _loaded(state, dim)
        good = slots.dtype == torch.int64 and slots.ndim == 1 and 0 <= int(slots.min()) <= int(slots.max()) < units
        good &= len(torch.unique(slots)) == len(slots) <= _room(batch)
        good &= type(state["scale"]) is float and 0 < state["scale"] < math.inf and dtype in (None, batch.dtype)
        end = 0
        for offset, form in batch.forms():
            parts, dtypes = _parts(form), {p.dtype for p in _parts(form)}
            good &= type(offset) is int and offset >= end and form.numel > 0
            good &= len(dtypes) == 1 and dtypes <= {torch.float32, batch.dtype}
            good &= all(p.ndim == 3 and not p.requires_grad and (len(parts) == 1 or p.shape[1] == 1) for p in parts)
            end = offset + form.numel
        good &= end <= dim
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError):
        good = False
    if not good:
        raise broken("gathered", str(state)[:80], "the factors of a few batches, and their slots")


def _loaded(state: State, dim: int) -> Factored:
    forms = [(one["offset"], PLAIN[one["kind"]](*(part.cpu() for part in one["parts"]))) for one in state["forms"]]
    dtype = DTYPES[state["dtype"]]
    return _factored(forms, size=len(state["slots"]), dim=dim, scale=state["scale"], dtype=dtype)


def _factored(forms: list[tuple[int, Form]], *, size: int, dim: int, scale: float, dtype: torch.dtype) -> Factored:
    return Factored(forms, dim=dim, size=size, scale=scale, like=_LIKE[dtype])


def _forms(batch: Factored) -> Iterator[Form]:
    return (form for _, form in batch.forms())


def _parts(form: Form) -> tuple[Tensor, ...]:
    return form.parts() or ()


def _plain(form: Form) -> bool:
    return bool(_parts(form)) and all(p.dtype in DTYPES and p.device.type == "cpu" for p in _parts(form))


def _room(batch: Factored) -> int:
    """How many rows to gather, of which each is so many numbers to keep and to make the Gram matrix of."""
    if batch.dim < FEW_NUMBERS or batch.device.type != "cpu" or not all(_plain(form) for form in _forms(batch)):
        return 0
    width = sum(part.shape[1:].numel() for form in _forms(batch) for part in _parts(form))
    return min(MOST, batch.dim // width, chunk_numbers() // width) if width else 0


def _kind(batch: Factored) -> tuple[Any, ...]:
    forms = [(offset, type(form), *((p.shape[1:], p.dtype) for p in _parts(form))) for offset, form in batch.forms()]
    return batch.dim, batch.scale, batch.dtype, *forms


def _finite(batch: Factored) -> bool:
    """What is not finite is set aside when it comes, with a warning that says so then."""
    flats = (part.reshape(-1) for form in _forms(batch) for part in _parts(form))
    return math.isfinite(sum(float(torch.dot(flat, flat)) for flat in flats))
