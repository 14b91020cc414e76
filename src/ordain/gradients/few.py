"""A few examples of a batch at a time, with their gradients made once for everything.

Where products are had by making gradients, a whole batch's need not be there together: its first examples may be
signed and added up before the next are made. Then a Gram matrix is of those few only, and what it was made of is
still there to be added. Signs are the same: to balance is to go through the examples one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain.gradients.base import Gradients
from ordain.gradients.factored import Factored
from ordain.gradients.forms import Form, Made
from ordain.gradients.memory import chunk_numbers, scratch
from ordain.gradients.small import DTYPES, add_products

FEW, FEWEST = 8, 4  # vectors at a time: twice as many make the Gram matrix dearer, half as many every pass over s
FEW_NUMBERS = 2**16  # in a gradient: what is smaller is over before it is cut up
MOSTLY = 0.75  # of a gradient's numbers must be such that are made once; the others would be made for nothing

Piece = tuple[slice, Callable[[], "Few"]]  # which examples of a batch, and how to take them


class Few(Factored):
    """Some of a batch's examples. What was made for the last products is there for the sum that follows them.

    Args:
        forms: as in :class:`Factored`.
        **options: as there.
    """

    def __init__(self, forms: list[tuple[int, Form]], **options: Any) -> None:
        super().__init__(forms, **options)
        self._dense = [(offset, form) for offset, form in self._forms if not form.sparse]
        self._sparse = [(offset, form) for offset, form in self._forms if form.sparse]
        self._width = sum(form.numel for _, form in self._dense)
        # By offset, ``[vectors, numbers]`` of parameters side by side; None where there was no room.
        self._made: list[tuple[int, Tensor]] | None = None

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return self._make(vectors, self.size, lambda form: form) or super().products(vectors)

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return self._make(vectors, self.size // 2, _differences) or super().paired_products(vectors)

    def _make(self, vectors: Tensor, count: int, of: Callable[[Form], Form]) -> tuple[Tensor, Tensor] | None:
        """The products of ``count`` vectors, keeping them; None if memory has run out for so many."""
        self._made = None
        if count * self._width > chunk_numbers():
            return None
        gram, dots = self._room(count, len(vectors))
        room = scratch(count * self._width, like=gram, name="few")
        parts = []
        for offset, width, forms in _side_by_side(self._dense):
            made, room = room[: count * width].view(count, width), room[count * width :]
            for place, form in forms:
                of(form).fill(made[:, place - offset : place - offset + form.numel])
            add_products(made, vectors[:, offset : offset + width], gram, dots)
            parts.append((offset, made))
        for offset, form in self._sparse:
            of(form).add_products(self._view(vectors, offset, form), gram, dots)
        self._made = parts
        return self._scaled(gram, dots)

    def add_signed(self, signs: NDArray[Any], signed: Tensor, total: Tensor) -> None:
        if self._made is None:
            super().add_signed(signs, signed, total)
            return
        from ordain import _products

        each = torch.from_numpy(signs).to(self.dtype) * self.scale
        for offset, made in self._made:
            part = slice(offset, offset + made.shape[1])
            _products.add_rows(made.numpy(), each.numpy(), self.scale, signed[part].numpy(), total[part].numpy())
        for offset, form in self._sparse:
            into, also = (self._view(sums.unsqueeze(0), offset, form) for sums in (signed, total))
            form.add_signed(each, self.scale, into, also)

    def add_paired(self, signs: NDArray[Any], out: Tensor) -> None:
        if self._made is None:
            super().add_paired(signs, out)
            return
        each = torch.from_numpy(signs).to(self.dtype).unsqueeze(0) * self.scale
        for offset, made in self._made:
            out[:, offset : offset + made.shape[1]].addmm_(each[:, 0::2], made)
        for offset, form in self._sparse:
            form.add_weighted(each, self._view(out, offset, form))


def pieces(batch: Gradients, *, paired: bool) -> Iterator[Piece] | None:
    """A batch cut up so that everything needed of it can be made at once; None where that is no faster."""
    if batch.dim < FEW_NUMBERS or type(batch) is not Factored or batch.device.type != "cpu":
        return None
    dense = [form for _, form in batch.forms() if not form.sparse]
    width = sum(form.numel for form in dense)
    if width < FEW_NUMBERS or batch.dtype not in DTYPES:
        return None
    few = min(FEW, chunk_numbers() // width)
    made = sum(form.numel for form in dense if form.made_once)
    return cut(batch, few * (1 + paired)) if few >= FEWEST and made >= MOSTLY * width else None


def cut(batch: Factored, few: int) -> Iterator[Piece]:
    """``few`` examples after another."""
    for lo in range(0, batch.size, few):
        rows = slice(lo, min(lo + few, batch.size))
        yield rows, partial(_some, batch, rows)


def _some(batch: Factored, rows: slice) -> Few:
    like = torch.empty(0, dtype=batch.dtype, device=batch.device)
    forms = [(offset, form.select(rows)) for offset, form in batch.forms()]
    return Few(forms, dim=batch.dim, size=rows.stop - rows.start, scale=batch.scale, like=like)


def _side_by_side(placed: list[tuple[int, Form]]) -> Iterator[tuple[int, int, list[tuple[int, Form]]]]:
    """Offset, width and forms of parameters without a gap between them."""
    run: list[tuple[int, Form]] = []
    end = 0
    for offset, form in placed:
        if run and offset != end:
            yield run[0][0], end - run[0][0], run
            run = []
        run.append((offset, form))
        end = offset + form.numel
    if run:
        yield run[0][0], end - run[0][0], run


def _differences(form: Form) -> Form:
    pairs = form.paired()
    if pairs is None:  # it saves nothing where a Gram matrix is had without making them
        made = form.make(0, 1).new_empty(form.size, form.numel)
        form.fill(made)
        pairs = Made.flat(made).paired()
    return pairs
