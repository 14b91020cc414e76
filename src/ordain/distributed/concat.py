"""The ranks' gradients of each parameter as those of all their examples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ordain.gradients.factored import Placed, apart
from ordain.gradients.param_grads import Materialized, ParamGrads, lay_rows


def concat(batches: Sequence[Placed], places: Sequence[Tensor], ratios: Sequence[float]) -> Placed:
    """Gradients of all ranks' examples.

    Args:
        batches: each rank's gradients of parameters, by offset.
        places: for each rank ``[B_r]``, which row of the whole batch each of its examples is.
        ratios: what each rank's gradients are multiplied by, for reductions over batches of different sizes.
    """
    if len({tuple((offset, grads.numel) for offset, grads in batch) for batch in batches if batch}) > 1:
        batches = [apart(batch) for batch in batches]  # a bias that one rank has joined to its weight
    by_offset: dict[int, list[ParamGrads | None]] = {}
    for number, batch in enumerate(batches):
        for offset, grads in batch:
            scaled = grads if ratios[number] == 1.0 else grads.scaled(ratios[number])
            by_offset.setdefault(offset, [None] * len(batches))[number] = scaled
    joined: Placed = []
    for offset, several in sorted(by_offset.items()):
        like = max((grads for grads in several if grads is not None), key=lambda grads: grads.size)
        # A rank on which the parameter got no gradient has one of zeros.
        filled = [grads or like.zeros(len(place)) for grads, place in zip(several, places, strict=True)]
        joined.append((offset, _joined(filled, places)))
    return joined


def _joined(several: Sequence[ParamGrads], places: Sequence[Tensor]) -> ParamGrads:
    """The gradients of one parameter."""
    first = several[0]
    if len({(one.kind, len(one.parts())) for one in several}) == 1:
        if not first.parts():
            laid = type(first).laid(several, places)
            if laid is not None:
                return laid
        elif len({str(one.settings()) for one in several}) == 1:
            parts = [_joined(part, places) for part in zip(*(one.parts() for one in several), strict=True)]
            return type(first).build((), parts, **first.settings())
    return Materialized(lay_rows([one.materialize(0, one.rows) for one in several], places))
