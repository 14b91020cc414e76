"""The examples of all ranks as one batch: the work of multiplying is shared out by parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ordain.distributed.ranks import Ranks, agreed, failed_on
from ordain.distributed.wire import Placed
from ordain.gradients.factored import Factored
from ordain.gradients.memory import shrinking


class Gathered(Factored):
    """All ranks' gradients, held by every rank.

    Each rank multiplies out its share of the parameters, and the products are added up: so every rank decides by
    the very same numbers, to the last bit. Where there are more products than ``most`` numbers (the examples' square
    outgrows their factors) every rank multiplies all out for itself. Sums are always made so, without traffic.
    """

    def __init__(
        self, forms: Placed, *, ranks: Ranks, dim: int, size: int, scale: float, like: Tensor, most: int
    ) -> None:
        super().__init__(forms, dim=dim, size=size, scale=scale, like=like)
        self._ranks = ranks
        self._like, self._most = like, most
        self._alone = size * (size + 1) // 2 > most
        mine = [] if self._alone else shared_out(forms, ranks)
        self._share = Factored(mine, dim=dim, size=size, scale=scale, like=like)

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        if self._alone:
            return super().products(vectors)
        return self._added(partial(self._share.products, vectors), self.size, len(vectors))

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        if self._alone:
            return super().paired_products(vectors)
        return self._added(partial(self._share.paired_products, vectors), self.size // 2, len(vectors))

    def dot(self, vectors: Tensor) -> Tensor:
        return self.products(vectors)[1]

    def _added(self, job: Callable[[], tuple[Tensor, Tensor]], size: int, vectors: int) -> tuple[Tensor, Tensor]:
        """Every rank's ``job``, its share of a gram matrix ``[size, size]`` and of ``[vectors, size]`` products."""
        error: Exception | None = None
        try:
            gram, dots = shrinking(job)
        except Exception as raised:  # the others must hear of it, or wait for ever
            error = raised
            gram, dots = self._room(size, vectors)
        upper = torch.triu_indices(size, size, device=gram.device).unbind()
        both = torch.cat([gram[upper], dots.flatten(), gram.new_tensor([float(error is not None)])])
        self._ranks.add(both)
        if error is not None:
            raise agreed(error)
        if both[-1]:
            raise agreed(failed_on("another rank"))
        count = len(upper[0])
        gram = torch.zeros_like(gram)
        gram[upper] = both[:count]
        return gram, both[count:-1].view_as(dots)

    def select(self, rows: Tensor) -> Gathered:
        forms = [(offset, form.select(rows)) for offset, form in self._forms]
        return Gathered(
            forms,
            ranks=self._ranks,
            dim=self.dim,
            size=len(rows),
            scale=self.scale,
            like=self._like,
            most=self._most,
        )

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
