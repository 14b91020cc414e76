"""SGD with offline herding of stored gradients (Algorithm 2); greedy ordering is one case of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ordain import herding
from ordain.balancing.state import broken, check_vectors
from ordain.balancing.step import ASIDE, Decision
from ordain.errors import GradientError, InputError, MemoryLimitError, StepError
from ordain.gradients import Gradients
from ordain.gradients.memory import scratch, shrinking
from ordain.orders.arrangement import Arrangement
from ordain.orders.cursor import Cursor
from ordain.orders.order import Order
from ordain.orders.report import Report, report
from ordain.orders.saved_state import State, array
from ordain.orders.sign_log import OrderLog, Settle
from ordain.orders.steps import Clock
from ordain.orders.units import Indices

__all__ = ["Greedy", "Herding"]

Routine = Callable[[Tensor], Any]
_MEMORY = 2 * 2**30


class Herding(Order):
    """Offline herding (Algorithm 2): store every example's gradient during an epoch, then herd them.

    Args:
        model: as in :class:`~ordain.GraB`.
        n: as in :class:`~ordain.GraB`.
        rounds: the maximum number of rounds of balancing and reordering.
        tolerance: stop once a round lowers the largest prefix sum by less than this fraction; 0 runs all rounds.
        routine: takes the stored gradients ``[n, d]`` in visiting order and returns a permutation of
            their rows, instead of :func:`ordain.herding.herd`.
        memory_limit: the maximum number of bytes to store. If the n*d numbers need more, an error reports the size
            before anything is stored.
        fresh: herd gradients at the weights with which the epoch begins, from an extra pass inside
            ``with order.rehearsal():``, instead of the last epoch's stale ones.
        **options: as in :class:`~ordain.GraB`: learn, gradients, params, loss_reduction, group, sketch,
            precondition, seed.
    """

    def __init__(
        self,
        model: nn.Module | None,
        n: Any,
        *,
        rounds: int = 10,
        tolerance: float = 0.2,
        routine: Routine | None = None,
        memory_limit: int = _MEMORY,
        fresh: bool = False,
        **options: Any,
    ) -> None:
        herding.check_tolerance(tolerance)
        herd = partial(herding.herd, rounds=herding.check_rounds(rounds), tolerance=tolerance)
        self._herding = HerdingLearner(routine or herd, memory_limit=memory_limit, fresh=fresh)
        super().__init__(n, model=model, learner=self._herding, **options)

    def rehearsal(self) -> AbstractContextManager[None]:
        """Context manager for an extra pass, without optimizer steps, whose gradients determine the next order.

        with order.rehearsal():
            for x, y in loader:
                loss_fn(model(x), y).backward(); order.step(); model.zero_grad()
        """
        return self._herding.rehearsal(self._cursor, type(self).__name__)

    def report(self) -> Report:
        """Report what the epoch's gradients say about ordering; call it after the epoch, before the next one begins.

        >>> import torch
        >>> order = Herding(None, 4, seed=1)
        >>> indices = list(order.sampler)
        >>> order.observe(torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]))
        >>> order.report().noise
        1.0
        """
        return self._herding.report(self._cursor.epoch, seed=self.seed, clock=self._clock)


class Greedy(Order):
    """Algorithm 2 with greedy herding (Algorithm 1). O(n^2 d) work and O(nd) memory per epoch.

    The arguments are those of :class:`Herding`, without ``routine``.
    """

    def __init__(
        self, model: nn.Module | None, n: Any, *, memory_limit: int = _MEMORY, fresh: bool = False, **options: Any
    ) -> None:
        self._herding = HerdingLearner(herding.greedy, memory_limit=memory_limit, fresh=fresh)
        super().__init__(n, model=model, learner=self._herding, **options)

    def rehearsal(self) -> AbstractContextManager[None]:
        """See :meth:`Herding.rehearsal`."""
        return self._herding.rehearsal(self._cursor, type(self).__name__)


class HerdingLearner:
    """Stores the mean gradient of each unit, ``[units, d]``, and herds them at the end of the epoch."""

    def __init__(self, routine: Routine, *, memory_limit: int, fresh: bool) -> None:
        if not callable(routine):
            raise InputError(
                f"routine={routine!r}",
                expected="a function from [n, d] to a permutation of its rows",
                remedy="Pass ordain.herding.herd or ordain.herding.greedy, for example.",
            )
        if isinstance(memory_limit, bool) or not isinstance(memory_limit, (int, float)):
            raise InputError(f"memory_limit={memory_limit!r}", expected="bytes", remedy="2 * 2**30 is 2 GiB.")
        if not isinstance(fresh, bool):
            raise InputError(f"fresh={fresh!r}", expected="True or False", remedy="See docs/orders.md.")
        self._routine, self._memory_limit, self._fresh = routine, memory_limit, fresh
        self._rehearsing = False
        self._stored: Tensor | None = None

    def log(self, units: int, settle: Settle) -> OrderLog:
        return OrderLog(units, settle)

    def begin(self, arrangement: Arrangement, *, seed: int, dim: int | None) -> None:
        self._arrangement = arrangement
        self._counts = np.zeros(arrangement.units.count, dtype=np.int64)  # examples stored, by slot
        if dim is not None:
            self._check_memory(dim, torch.get_default_dtype().itemsize)

    def learn(self, batch: Gradients, slots: Indices, *, whole_units: bool, epoch: int) -> Decision:
        single = self._arrangement.units.group == 1
        # Seen: a place other than UNSEEN. There are no signs here.
        decision = Decision(slots if single else slots[:0], np.ones(len(slots) * single, dtype=np.int8))
        if self._fresh and not self._rehearsing:
            return decision
        if self._stored is not None and self._stored.dtype is not batch.dtype:
            raise GradientError(
                f"gradients of {batch.dtype}",
                expected=f"{self._stored.dtype}, as earlier in this epoch",
                remedy="Convert them: all gradients stored in an epoch must have the same dtype.",
            )
        if self._stored is None:
            self._check_memory(batch.dim, batch.dtype.itemsize)
            self._stored = torch.zeros(len(self._counts), batch.dim, dtype=batch.dtype)
        store = self._write if single and batch.device.type == "cpu" else partial(self._add, whole_units=whole_units)
        lost, bad = shrinking(partial(store, self._stored, batch, slots))
        return decision if not bad else decision.with_aside(lost, bad)

    def _write(self, stored: Tensor, batch: Gradients, slots: Indices) -> tuple[Indices, int]:
        """Each row to its place: in turn, in one piece. Returns those that are not finite, and how many."""
        first, size = int(slots[0]), len(slots)
        in_turn = int(slots[-1]) - first == size - 1 and bool((slots[1:] > slots[:-1]).all())
        rows = stored[first : first + size] if in_turn else stored.new_empty(size, batch.dim)
        good = _fill(rows, batch)
        if not in_turn:
            stored[torch.from_numpy(slots)] = rows
        self._counts[slots] = 1
        if good is None:
            return slots[:0], 0
        stored[torch.from_numpy(slots[~good])] = 0.0
        self._counts[slots[~good]] = 0
        return slots[~good], int((~good).sum())

    def _add(self, stored: Tensor, batch: Gradients, slots: Indices, *, whole_units: bool) -> tuple[Indices, int]:
        """The same for each row's share of its unit's mean gradient."""
        sizes = self._arrangement.sizes(slots)
        shares, counts = (np.ones(len(slots)), sizes) if whole_units else (1.0 / sizes, np.ones_like(sizes))
        like = torch.empty(0, dtype=batch.dtype, device=batch.device)
        rows = batch.rows(out=scratch(batch.size, batch.dim, like=like, name="stored"))
        rows = rows.mul_(torch.from_numpy(shares).to(rows)[:, None]).cpu()
        good = _finite(rows)
        kept = np.ones(len(slots), dtype=bool) if good is None else good
        stored.index_add_(0, torch.from_numpy(slots[kept]), rows[torch.from_numpy(kept)])
        np.add.at(self._counts, slots[kept], counts[kept])
        return np.unique(slots[~kept]), int((~kept).sum())

    def choose(self) -> Indices:
        return self._arrangement.order if self._fresh else self._herded()  # Alg. 2: sigma_{k+1}

    def _complete(self) -> NDArray[np.bool_]:
        """By slot: whether all gradients of the unit are stored."""
        sizes = self._arrangement.sizes(np.arange(len(self._counts)))
        complete: NDArray[np.bool_] = (self._counts == sizes) & (self._arrangement.places != ASIDE)
        return complete

    def _herded(self) -> Indices:
        """Herd the units whose gradients are complete; the others go in the middle, in their order."""
        order, complete = self._arrangement.order, self._complete()
        known = np.flatnonzero(complete)
        if not len(known) or self._stored is None:
            return order
        found = np.asarray(self._routine(self._stored if complete.all() else self._stored[known]))
        integers = found.shape == known.shape and found.dtype.kind in "iu"
        if not integers or not np.array_equal(np.sort(found), np.arange(len(known))):
            raise InputError(
                f"a result of shape {found.shape} and dtype {found.dtype} from the herding routine",
                expected=f"a permutation of range({len(known)})",
                remedy="A routine takes [n, d] and returns each row index once.",
            )
        sigma = order[known[found]]
        half = len(sigma) // 2
        return np.concatenate([sigma[:half], order[~complete], sigma[half:]])

    def report(self, epoch: int, *, seed: int, clock: Clock) -> Report:
        """See :meth:`Herding.report`."""
        known = np.flatnonzero(self._complete())
        if self._stored is None or len(known) < len(self._counts) / 2:
            raise StepError(
                f"report() with {len(known)} of {len(self._counts)} gradients of epoch {epoch} observed",
                expected="a complete epoch, before the next one begins",
                remedy="Call it after the loop over the loader, in an epoch that learns.",
            )
        return report(epoch, self._stored[torch.from_numpy(known)], seed=seed, clock=clock)

    def next_epoch(self) -> None:
        self._counts[:] = 0
        if self._stored is not None:
            self._stored.zero_()

    def release(self) -> None:
        self._stored = None

    def abandoned(self) -> list[int]:
        return []

    def skip(self, slots: Indices) -> None:
        """Nothing: a unit that is not complete is not herded."""

    @contextmanager
    def rehearsal(self, cursor: Cursor, order: str) -> Iterator[None]:
        """See :meth:`Herding.rehearsal`."""
        if not self._fresh:
            raise InputError(
                "rehearsal() of an order with fresh=False",
                expected="fresh=True",
                remedy=f"Write {order}(model, n, fresh=True).",
            )
        if cursor.resuming and cursor.touched:
            raise StepError(
                "rehearsal() in the middle of an epoch that is resumed",
                expected="a rehearsal before an epoch begins",
                remedy="Rehearse the following epochs only: the order of this one is in the state that was loaded.",
            )
        if cursor.touched:
            cursor.advance()
        cursor.rewind()
        self._rehearsing = True
        try:
            yield
            self._arrangement.order = self._arrangement.settle(self._herded())
        finally:
            self._rehearsing = False
            self.next_epoch()
            self._arrangement.clear()
            cursor.abandon()

    def _check_memory(self, d: int, itemsize: int) -> None:
        units = len(self._counts)
        needed = units * d * itemsize
        if needed > self._memory_limit:
            raise MemoryLimitError(
                f"{units:,} gradients of {d:,} numbers to store: {needed / 2**30:.2f} GiB",
                expected=f"at most memory_limit={self._memory_limit / 2**30:.2f} GiB",
                remedy="Raise memory_limit, order larger units with group=, choose fewer params=, "
                "or use GraB, which stores a few vectors of length d.",
            )

    # --- saving -----------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        return {"fresh": self._fresh}

    def save(self, *, vectors: bool) -> State:
        # Without the gradients nothing is complete: what was seen so far goes in the middle.
        kept = vectors and not self._rehearsing
        state: State = {
            "stored": self._stored.clone() if kept and self._stored is not None else None,
            "counts": torch.from_numpy(self._counts.copy() if kept else np.zeros_like(self._counts)),
        }
        if self._rehearsing:  # half a rehearsal is of no use: it begins again
            places = torch.zeros(len(self._counts), dtype=torch.int8)
            state |= {"taken": 0, "touched": False, "out_of_turn": False, "places": places}
        return state

    def check(self, state: State) -> None:
        units = len(self._counts)
        if len(state["counts"]) != units:
            raise broken("counts", f"{len(state['counts'])} numbers", str(units))
        if (stored := state["stored"]) is not None:
            check_vectors("stored", stored, (units, state["dim"]), like=stored)
            least, most = map(float, stored.aminmax())
            if not (least >= -herding.LARGEST and most <= herding.LARGEST):  # no routine takes those
                raise broken("stored", "not finite or too large", f"numbers up to {herding.LARGEST:g}")

    def load(self, state: State) -> list[int]:
        self._stored = None if state["stored"] is None else state["stored"].clone()
        self._counts = array(state["counts"])
        return []

    def marks(self) -> Indices:
        return self._counts


def _fill(rows: Tensor, batch: Gradients) -> NDArray[np.bool_] | None:
    """Write the gradients to ``rows``, and say which are finite: see :func:`_finite`."""
    from ordain.kernels.layer_rows import layer_rows

    layer = batch.linear_layer()
    if layer is not None and layer_rows(*layer, herding.LARGEST, rows.numpy()):
        return None
    return _finite(batch.rows(out=rows))


def _finite(rows: Tensor) -> NDArray[np.bool_] | None:
    """Which rows are finite, and no larger than a routine can take; None if all are."""
    least, most = rows.aminmax()
    if least >= -herding.LARGEST and most <= herding.LARGEST:  # as NaN is not
        return None
    good: NDArray[np.bool_] = rows.double().square().sum(dim=1).numpy() <= herding.LARGEST**2
    return good
