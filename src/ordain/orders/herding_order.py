"""SGD with offline herding of stored gradients (Algorithm 2); greedy ordering is one case of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ordain import herding
from ordain.errors import InputError, MemoryLimitError, OrdainError
from ordain.gradients import Gradients
from ordain.gradients.each import fill
from ordain.gradients.memory import scratch
from ordain.orders.base import Indices
from ordain.orders.learned import LearnedOrder
from ordain.orders.placed import ASIDE, UNSEEN
from ordain.orders.state import State, array, broken, check_vectors

Routine = Callable[[Tensor], Any]


class Herding(LearnedOrder):
    """Algorithm 2: store every example's gradient during an epoch, then herd them.

    Args:
        model: as in :class:`~ordain.GraB`.
        n: as in :class:`~ordain.GraB`.
        routine: takes the stored gradients ``[n, d]`` in visiting order and gives a permutation of
            their rows; :func:`ordain.herding.herd` by default.
        memory_limit: bytes that may be stored. n*d numbers are needed: if that is more, it is refused at
            once, with the figure.
        fresh: herd gradients at the weights the epoch begins with, from an extra pass made inside
            ``with order.rehearsal():``, instead of the last epoch's stale ones.
        **options: as in :class:`~ordain.GraB`: gradients, params, loss_reduction, group, sketch, seed.
    """

    def __init__(
        self,
        model: nn.Module | None,
        n: Any,
        *,
        routine: Routine | None = None,
        memory_limit: int = 2 * 2**30,
        fresh: bool = False,
        **options: Any,
    ) -> None:
        if routine is not None and not callable(routine):
            raise InputError(
                f"routine={routine!r}",
                expected="a function from [n, d] to a permutation of its rows",
                remedy="Pass ordain.herding.herd or ordain.herding.greedy, for example.",
            )
        super().__init__(model, n, **options)
        self._routine: Routine = routine or herding.herd
        self._memory_limit = memory_limit
        self._fresh = fresh
        self._rehearsing = False
        self._stored: Tensor | None = None
        self._counts = np.zeros(self._units, dtype=np.int64)
        self._past = np.empty((0, self._units), dtype=np.int64)  # arrangements of the epochs since _origin
        if model is not None:
            try:
                self._check_memory(self._dim or 0, torch.get_default_dtype().itemsize)
            except OrdainError:
                self.detach()
                raise

    def history(self, epoch: int) -> Indices:
        self._check_epoch(epoch)
        return self._expand(self._past[epoch - self._origin] if epoch < self._epoch else self._arrangement)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """An extra pass, without optimizer steps, whose gradients decide the coming epoch's order.

        with order.rehearsal():
            for x, y in loader:
                loss_fn(model(x), y).backward(); order.step(); model.zero_grad()
        """
        if not self._fresh:
            raise InputError(
                "rehearsal() of an order with fresh=False",
                expected="fresh=True",
                remedy=f"Write {type(self).__name__}(model, n, fresh=True).",
            )
        if self._touched:
            self._advance()
        self._drawn = self._taken = 0
        self._rehearsing = True
        try:
            yield
            self._arrangement = self._herded()
        finally:
            self._rehearsing = False
            self._clear()
            self._drawn = self._taken = 0
            self._touched = False
            self._ticket += 1

    def _take(self, batch: Gradients, slots: Indices) -> None:
        self._store(batch, slots, shares=1.0 / self._sizes(slots), counts=1)

    def _take_units(self, batch: Gradients, slots: Indices) -> None:
        self._store(batch, slots, shares=np.ones(len(slots)), counts=self._sizes(slots))

    def _store(self, batch: Gradients, slots: Indices, *, shares: Any, counts: Any) -> None:
        """Add each row's share of its unit's mean gradient; it stands for ``counts`` examples."""
        if self._fresh and not self._rehearsing:
            return
        if self._stored is None:
            self._check_memory(batch.dim, batch.dtype.itemsize)
            self._stored = torch.zeros(self._units, batch.dim, dtype=batch.dtype)
        like = torch.empty(0, dtype=batch.dtype, device=batch.device)
        rows = scratch(batch.size, batch.dim, like=like, name="stored")
        fill(batch, rows)
        rows = rows.mul_(torch.from_numpy(shares).to(rows)[:, None]).cpu()
        least, most = rows.aminmax()
        if not (least >= -herding.LARGEST and most <= herding.LARGEST):  # as NaN is not, nor can any routine take more
            squares = batch.gram().diagonal().to("cpu", torch.float64)
            bad = ~(squares.numpy() <= herding.LARGEST**2)
            kept = np.flatnonzero(~bad)
            if len(kept):
                good = batch.select(torch.from_numpy(kept).to(batch.device))
                self._store(good, slots[kept], shares=shares[kept], counts=np.broadcast_to(counts, len(slots))[kept])
            self._put_aside(np.unique(slots[bad]), int(bad.sum()))  # last: a second start counts nothing twice
            return
        self._stored.index_add_(0, torch.from_numpy(slots), rows)
        np.add.at(self._counts, slots, counts)
        if self.group == 1:  # seen: a place other than UNSEEN; there are no signs here
            self._places[slots] = 1

    def _herded(self) -> Indices:
        """Herd the units whose gradients are complete; the others keep the middle, in their order."""
        complete = (self._counts == self._sizes(np.arange(self._units))) & (self._places != ASIDE)
        known = np.flatnonzero(complete)
        if not len(known) or self._stored is None:
            return self._arrangement
        found = np.asarray(self._routine(self._stored if complete.all() else self._stored[known]))
        if found.shape != known.shape or not np.array_equal(np.sort(found), np.arange(len(known))):
            raise InputError(
                f"an answer of shape {found.shape} from the herding routine",
                expected=f"a permutation of range({len(known)})",
                remedy="A routine takes [n, d] and names each row once.",
            )
        sigma = self._arrangement[known[found]]
        half = len(sigma) // 2
        return np.concatenate([sigma[:half], self._arrangement[~complete], sigma[half:]])

    def _advance(self) -> None:
        following = self._arrangement if self._fresh else self._herded()  # Alg. 2: sigma_{k+1}
        self._past = np.append(self._past, self._arrangement[None], axis=0)
        self._arrangement = self._settled(following)
        super()._advance()
        self._clear()

    def _clear(self) -> None:
        self._counts[:] = 0
        self._places[:] = UNSEEN
        if self._stored is not None:
            self._stored.zero_()

    def _check_memory(self, d: int, itemsize: int) -> None:
        needed = self._units * d * itemsize
        if needed > self._memory_limit:
            raise MemoryLimitError(
                f"{self._units:,} gradients of {d:,} numbers to store: {needed / 2**30:.2f} GiB",
                expected=f"at most memory_limit={self._memory_limit / 2**30:.2f} GiB",
                remedy="Raise memory_limit, order larger units with group=, choose fewer params=, "
                "or use GraB, which stores a few vectors of length d.",
            )

    def state_dict(self, *, vectors: bool = True, history: bool = True) -> State:
        state = super().state_dict(vectors=vectors, history=history)
        if self._rehearsing:  # nobody can go on with half a rehearsal: it begins again
            places = torch.zeros_like(state["places"])
            state |= {"taken": 0, "touched": False, "out_of_turn": False, "places": places}
        # Without the gradients nothing is complete: what was seen so far keeps the middle.
        kept = vectors and not self._rehearsing
        return state | {
            "stored": self._stored.clone() if kept and self._stored is not None else None,
            "counts": torch.from_numpy(self._counts.copy() if kept else np.zeros_like(self._counts)),
            "past": torch.from_numpy(self._past if history else self._past[:0]),
        }

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        if len(state["counts"]) != self._units:
            raise broken("counts", f"{len(state['counts'])} numbers", f"{self._units}")
        if len(state["past"]) != state["epoch"] - state["origin"]:
            raise broken("past", f"of {len(state['past'])} epochs", f"{state['epoch'] - state['origin']}")
        check_vectors("stored", state["stored"], (self._units, state["dim"]))

    def _load(self, state: State) -> None:
        super()._load(state)
        self._stored = None if state["stored"] is None else state["stored"].clone()
        self._counts = array(state["counts"])
        self._past = array(state["past"])

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"fresh": self._fresh}


class Greedy(Herding):
    """Algorithm 2 with greedy herding (Algorithm 1). O(n^2 d) work and O(nd) memory an epoch.

    Args:
        model: as in :class:`~ordain.GraB`.
        n: as in :class:`~ordain.GraB`.
        **options: as in :class:`Herding`, but for ``routine``.
    """

    def __init__(self, model: nn.Module | None, n: Any, **options: Any) -> None:
        super().__init__(model, n, routine=herding.greedy, **options)
