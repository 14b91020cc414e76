"""The examples of all ranks as one batch: the work of multiplying is shared out by parameters."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ordain.distributed.ranks import Ranks
from ordain.distributed.wire import Placed
from ordain.gradients.factored import Factored
from ordain.gradients.memory import shrinking


class Gathered(Factored):
    """All ranks' gradients, held by every rank.

    Each rank multiplies out its share of the parameters, and the products are added up: so every rank decides by
    the very same numbers, to the last bit. Sums are made by every rank for itself, without traffic.
    """

    def __init__(self, forms: Placed, *, ranks: Ranks, dim: int, size: int, scale: float, like: Tensor) -> None:
        super().__init__(forms, dim=dim, size=size, scale=scale, like=like)
        self._ranks = ranks
        self._like = like
        self._share = Factored(shared_out(forms, ranks), dim=dim, size=size, scale=scale, like=like)

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return self._added(*shrinking(partial(self._share.products, vectors)))

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return self._added(*shrinking(partial(self._share.paired_products, vectors)))

    def dot(self, vectors: Tensor) -> Tensor:
        return self.products(vectors)[1]

    def _added(self, gram: Tensor, dots: Tensor) -> tuple[Tensor, Tensor]:
        upper = torch.triu_indices(len(gram), len(gram), device=gram.device).unbind()
        both = torch.cat([gram[upper], dots.flatten()])
        self._ranks.add(both)
        count = len(upper[0])
        gram = torch.zeros_like(gram)
        gram[upper] = both[:count]
        return gram, both[count:].view_as(dots)

    def select(self, rows: Tensor) -> Gathered:
        forms = [(offset, form.select(rows)) for offset, form in self._forms]
        return Gathered(forms, ranks=self._ranks, dim=self.dim, size=len(rows), scale=self.scale, like=self._like)

    def layer(self) -> None:
        """Never: the compiled pass over one layer shares no work and no numbers."""
        return


def shared_out(forms: Placed, ranks: Ranks) -> Placed:
    """This rank's share of the parameters: the largest first, each to the rank with the least so far."""
    loads = [0] * ranks.size
    mine: Placed = []
    for offset, form in sorted(forms, key=lambda one: (-one[1].numel, one[0])):
        least = loads.index(min(loads))
        loads[least] += form.numel
        if least == ranks.rank:
            mine.append((offset, form))
    return mine
