"""The examples of all ranks as one batch; the work of multiplying is shared out by parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ordain.distributed.ranks import Ranks, agreed, failed_on
from ordain.gradients.factored import Factored, Placed, apart
from ordain.gradients.memory import shrinking
from ordain.gradients.param_grads import Materialized, ParamGrads, lay_rows


class GlobalBatch(Factored):
    """All ranks' gradients, held by every rank.

    Each rank computes the products of its share of the parameters, and these are added up over ranks: so every rank
    decides by the very same numbers, to the last bit. Where there are more products than ``most`` numbers (the square
    of the number of examples outgrows their factors) every rank computes all of them. So it does with sums, always.
    """

    def __init__(
        self, placed: Placed, *, ranks: Ranks, dim: int, size: int, scale: float, like: Tensor, most: int
    ) -> None:
        super().__init__(placed, dim=dim, size=size, scale=scale, like=like)
        self._ranks, self._like, self._most = ranks, like, most
        self._alone = size * (size + 1) // 2 > most
        mine = placed if self._alone else shared_out(placed, ranks)
        self.mine = Factored(mine, dim=dim, size=size, scale=scale, like=like)

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return self._added(self.mine.products, vectors, self.size)

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return self._added(self.mine.paired_products, vectors, self.size // 2)

    def dot(self, vectors: Tensor) -> Tensor:
        return self.products(vectors)[1]

    def _added(
        self, job: Callable[[Tensor], tuple[Tensor, Tensor]], vectors: Tensor, size: int
    ) -> tuple[Tensor, Tensor]:
        """Every rank's ``job``, its share of a gram matrix ``[size, size]`` and of products with ``vectors``."""
        if self._alone:
            return job(vectors)
        error: Exception | None = None
        try:
            gram, dots = shrinking(lambda: job(vectors))
        except Exception as raised:  # the others must hear of it, or wait forever
            error = raised
            gram, dots = self._zeros(size, len(vectors))
        upper = torch.triu_indices(size, size, device=gram.device).unbind()
        both = torch.cat([gram[upper], dots.flatten(), gram.new_tensor([float(error is not None)])])
        self._ranks.add(both)
        if error is not None:
            raise agreed(error)
        if both[-1]:
            raise failed_on("another rank")
        count = len(upper[0])
        gram = torch.zeros_like(gram)
        gram[upper] = both[:count]
        return gram, both[count:-1].view_as(dots)

    def select(self, rows: Tensor) -> GlobalBatch:
        return self._with([(offset, grads.select(rows)) for offset, grads in self.placed], len(rows), self._like)

    def double(self) -> GlobalBatch:
        return self._with([(offset, grads.double()) for offset, grads in self.placed], self.size, self._like.double())

    def _with(self, placed: Placed, size: int, like: Tensor) -> GlobalBatch:
        scale, most = self.scale, self._most
        return GlobalBatch(placed, ranks=self._ranks, dim=self.dim, size=size, scale=scale, like=like, most=most)

    def linear_layer(self) -> None:
        """None: the compiled pass over one layer shares no work."""
        return


def shared_out(placed: Placed, ranks: Ranks) -> Placed:
    """This rank's share of the parameters: the largest first, each to the rank with the least so far."""
    loads = [0] * ranks.size
    mine: Placed = []
    for offset, grads in sorted(placed, key=lambda one: (-one[1].numel, one[0])):
        least = loads.index(min(loads))
        loads[least] += grads.numel
        if least == ranks.rank:
            mine.append((offset, grads))
    return mine


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
