"""Batches kept until they make one: products of many rows take half the time of as many products of few.

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

from ordain.gradients import Gradients
from ordain.gradients.factored import Factored
from ordain.gradients.forms import PLAIN, Form
from ordain.gradients.memory import chunk_numbers
from ordain.orders.base import Indices
from ordain.orders.state import State, broken, check_vectors

MOST = 256  # rows: at twice as many the Gram matrix costs what the products save (``make bench``)
FEW_NUMBERS = 2**16  # in a gradient: such products are over before anything is gathered
_DTYPES = (torch.float32, torch.float64)  # of factors
_NOTHING = Factored([], dim=0, size=0, scale=1.0, like=torch.empty(0))


class Gathered:
    """Consecutive batches of one kind, and the slots that their rows belong to."""

    def __init__(self) -> None:
        self.rows = 0
        self._like = _NOTHING  # a batch of no rows, of the kind that is gathered
        self._kept: list[list[Tensor]] = []  # for each form of it, its parts: ``[room, ...]``, of which rows are used
        self._slots: list[Indices] = []

    def takes(self, batch: Gradients) -> bool:
        """Does gathering such batches pay, and has this one nothing that must be looked at at once?"""
        return isinstance(batch, Factored) and 3 * batch.size <= _room(batch) and _finite(batch)

    def fits(self, batch: Factored) -> bool:
        """Is it of the kind that is gathered, and is there room?"""
        return _kind(self._like) == _kind(batch) and self.rows + batch.size <= len(self._kept[0][0])

    def add(self, batch: Factored, slots: Indices) -> None:
        """Keep copies; where something else was gathered, that must have been cleared."""
        if not self.fits(batch):
            self._like = batch.select(torch.empty(0, dtype=torch.int64))
            room = _room(batch)
            self._kept = [[part.new_empty(room, *part.shape[1:]) for part in _parts(form)] for form in _forms(batch)]
        for form, kept in zip(_forms(batch), self._kept, strict=True):
            for part, into in zip(_parts(form), kept, strict=True):
                into[self.rows : self.rows + batch.size] = part
        self._slots.append(slots)
        self.rows += batch.size

    def batch(self) -> tuple[Factored, Indices]:
        """All that was gathered, as one."""
        forms = [
            (offset, type(form)(*(part[: self.rows] for part in kept)))
            for (offset, form), kept in zip(self._like.forms(), self._kept, strict=True)
        ]
        like = torch.empty(0, dtype=self._like.dtype)
        batch = Factored(forms, dim=self._like.dim, size=self.rows, scale=self._like.scale, like=like)
        return batch, np.concatenate(self._slots)

    def clear(self) -> None:
        """Nothing is gathered; the room stays."""
        self.rows, self._slots = 0, []

    # --- saving -----------------------------------------------------------------------------------

    def state(self) -> State:
        """What :meth:`load` needs."""
        batch, slots = self.batch()
        return {
            "slots": torch.from_numpy(slots),
            "scale": batch.scale,
            "dtype": _DTYPES.index(batch.dtype),
            "forms": [
                {"offset": offset, "kind": type(form).__name__, "parts": [part.clone() for part in _parts(form)]}
                for offset, form in batch.forms()
            ],
        }

    def load(self, state: State | None, dim: int) -> None:
        """As it was saved, after :meth:`check`."""
        self.clear()
        self._like, self._kept = _NOTHING, []
        if state is not None:
            slots = state["slots"].cpu().numpy().copy()
            forms = [(one["offset"], _loaded(one)) for one in state["forms"]]
            like = torch.empty(0, dtype=_DTYPES[state["dtype"]])
            self.add(Factored(forms, dim=dim, size=len(slots), scale=state["scale"], like=like), slots)

    @staticmethod
    def check(state: Any, *, dim: int, units: int) -> None:
        """Raise if no order can have written this."""
        try:
            slots, forms = state["slots"].cpu().numpy(), state["forms"]
            good = slots.dtype == np.int64 and slots.ndim == 1 and 0 < len(np.unique(slots)) == len(slots)
            good &= bool(slots.min() >= 0 and slots.max() < units)
            good &= type(state["scale"]) is float and 0 < state["scale"] < math.inf and state["dtype"] in (0, 1)
            end = 0
            for one in forms:
                for part in one["parts"]:
                    check_vectors("gathered", part, (len(slots), *part.shape[1:]))
                form = _loaded(one)
                good &= one["offset"] >= end and _plain(form)
                end = one["offset"] + form.numel
            good &= bool(forms) and end <= dim
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError):
            good = False
        if not good:
            raise broken("gathered", f"{str(state)[:80]}", "the factors of a few batches, and their slots")


def _loaded(one: State) -> Form:
    return PLAIN[one["kind"]](*(part.cpu() for part in one["parts"]))


def _forms(batch: Factored) -> Iterator[Form]:
    return (form for _, form in batch.forms())


def _parts(form: Form) -> tuple[Tensor, ...]:
    return form.parts() or ()


def _plain(form: Form) -> bool:
    return bool(_parts(form)) and all(p.dtype in _DTYPES and p.device.type == "cpu" for p in _parts(form))


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
