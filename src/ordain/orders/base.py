"""What every order has: a first epoch, a cursor for its sampler, and a rule for when an epoch ends.

Two states, never mixed. What an order has *learned* changes only when gradients arrive; where its
sampler *stands* changes only when indices are drawn, which loaders do ahead of time. The next
epoch's order is adopted at its first draw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ordain import _rng
from ordain.distributed.share import check_agreement, other_ranks, share_of
from ordain.errors import InputError, StateError, StepError
from ordain.orders.state import STATE_VERSION, State, check_count, check_fields, check_identity, converted
from ordain.sampler import OrderSampler, RankSampler

Indices = NDArray[np.int64]


class Order(ABC):
    """An order in which to visit ``n`` examples, epoch after epoch.

    Units of ``group`` examples stay together and are ordered as one. The units are cut from the
    first epoch, which is the same for every order of the same ``seed`` and ``n``.

    Args:
        n: the number of examples, or the (map-style) dataset itself.
        group: how many examples make a unit.
        seed: everything random follows from it.
        distributed: ``"auto"`` deals the order out to the ranks wherever torch.distributed is initialised; False, a
            mode or a :class:`~ordain.distributed.Distributed` says otherwise: see docs/distributed.md.
    """

    def __init__(self, n: Any, *, group: int = 1, seed: int = 0, distributed: Any = "auto") -> None:
        self.n = check_n(n)
        self.group = _check_group(group)
        self.seed = _rng.check_seed(seed)
        self._share = share_of(self.n, distributed)
        self._unasked = distributed == "auto" and self._share is None  # not shared out, and nobody said so
        if self._share is not None:
            options = self._share.options
            told = {"order": type(self).__name__, "n": self.n, "seed": self.seed, "group": self.group}
            check_agreement(self._share, **told, mode=options.mode, tail=options.tail)
        self._members = self._first_epoch()  # unit u is _members[u * group : (u + 1) * group]
        if self._share is not None and self._share.alone:
            self._members = self._share.shard(self._members)
            self.n = self._share.n = len(self._members)
        self._units = -(-self.n // self.group)
        self.sampler: Sampler[int] = OrderSampler(self) if self._share is None else RankSampler(self, self._share)
        self._epoch = 0
        self._drawn = 0  # the cursor: how many of this epoch's indices have been drawn
        self._taken = 0  # how many of those, from the front, have been observed
        self._touched = False  # has anything of this epoch been observed?
        self._uncounted = False  # was any of it in a step() that does not know how large its batch was?
        self._ticket = 0  # names the live pass
        self._resuming = False
        self._overtaking = False  # may batches of the live pass come in another order than they were drawn in?

    # --- what a user sees -------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch being visited, from 0; it changes at the first draw of the next."""
        return self._epoch

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent to the others for the order so far; 0 where there are none."""
        return 0 if self._share is None else self._share.ranks.sent

    @abstractmethod
    def step(self) -> None:
        """Call once after each ``loss.backward()``."""

    @abstractmethod
    def observe(self, grads: Any, indices: Any = None) -> None:
        """Take per-example gradients from the user instead of from the model: see docs/orders.md."""

    @abstractmethod
    def history(self, epoch: int) -> Indices:
        """``[n]``: the examples in the order in which ``epoch`` visits (or visited) them."""

    def skip(self, count: int) -> None:
        """The next ``count`` drawn examples will not be observed (a batch that is passed over with ``continue``).

        They keep a place in the middle of the next epoch. Without this the next ``step()`` would take its
        gradients for theirs.
        """
        self._check_drawn(count)
        self._taken += count
        self._touched = True

    def resume(self, done: int | None = None) -> int:
        """After :meth:`load_state_dict`: the next pass goes on where the saved epoch stopped.

        Without it the next pass begins the next epoch. ``done`` says how many examples of the epoch
        the saved run had trained on; orders that see gradients know, the others must be told.

        Returns:
            The epoch that the next pass visits: this one, or the next if all of it is done.
        """
        if done is None:
            done = self._known_progress()
        if done is None:
            raise StateError(
                "resume() of an order that cannot tell how much of its epoch is done (it sees no gradients, or saw "
                "them out of turn)",
                expected="the number of examples that are done",
                remedy="Pass resume(steps_done * batch_size), or load a StatefulDataLoader's state, which knows.",
            )
        if not isinstance(done, int) or not 0 <= done <= self.n:
            raise InputError(
                f"done={done!r}",
                expected=f"how many of the epoch's {self.n} examples are done",
                remedy="Pass steps_done * batch_size.",
            )
        self._drawn = self._taken = done
        self._uncounted = False
        if self._share is not None and self._share.own(done) == len(self._share.positions):
            done = self.n  # what is left is nobody's: it was dropped
        # A finished epoch has nothing to go on with: its last state leads to the next epoch.
        self._resuming, self._touched = done < self.n, done > 0
        return self._epoch + (not self._resuming)

    def detach(self) -> None:  # noqa: B027
        """Leave the model exactly as it was found (an order that watches none has nothing to do)."""

    def state_dict(self, *, vectors: bool = True, history: bool = True) -> State:
        """All that is needed to go on: tensors, numbers and strings only. Changes nothing, at any time.

        Args:
            vectors: with what is as long as a gradient. Without it the state is small and takes microseconds, and
                an order that loads it begins its balancing again in mid-epoch: see docs/reliability.md.
            history: with what ``history(epoch)`` of past epochs needs.
        """
        return {
            "version": STATE_VERSION,
            **self._identity(),
            "epoch": self._epoch,
            "taken": 0 if self._uncounted else self._taken,
            "touched": self._touched,
            "uncounted": self._uncounted,
        }

    def load_state_dict(self, state: State) -> None:
        """Go back to a saved state; refuses, and changes nothing, if it is not this order's."""
        state = converted(state)
        check_identity(state, self._identity())
        check_fields(state, self.state_dict(vectors=False, history=False))
        self._check_state(state)
        self._load(state)

    def __repr__(self) -> str:
        more = f", group={self.group}" if self.group > 1 else ""
        return f"{type(self).__name__}(n={self.n}{more}, seed={self.seed})"

    # --- what the sampler asks --------------------------------------------------------------------

    def _begin_pass(self) -> tuple[int, Indices, int]:
        """A new iterator draws its first index: (its ticket, the epoch's indices, where to start)."""
        if self._unasked and other_ranks():
            raise StepError(
                "a draw from an order that was made before init_process_group(), which every rank would visit whole",
                expected="an order made when the ranks know of each other",
                remedy="Make the order after init_process_group(); or say distributed=False if each rank shall visit "
                "all examples.",
            )
        if self._resuming:
            self._resuming = False
        elif self._drawn or self._touched:
            if self._is_over():
                self._advance()
            self._drawn = self._taken = 0
            self._uncounted = False
        self._ticket += 1
        indices = self.history(self._epoch)
        if self._share is None:
            return self._ticket, indices, self._drawn
        return self._ticket, self._share.indices(indices), self._share.own(self._drawn)

    def _draw_to(self, drawn: int) -> None:
        """The live pass has drawn so many of this rank's."""
        self._drawn = drawn if self._share is None else self._share.covered(drawn)

    def _go_on(self, epoch: int, drawn: int) -> None:
        """The cursor as a loader has saved it: like :meth:`resume`, but refused if it is not this order's."""
        known = self._known_progress()
        if self._share is not None:
            drawn = self._share.covered(drawn)
        # The last, short batch that a loader drops is drawn and never observed.
        if epoch != self._epoch or (known is not None and drawn not in (known, self.n)):
            stands = "" if known is None else f" with {known} examples observed"
            raise StateError(
                f"a loader's state in epoch {epoch} with {drawn} examples drawn",
                expected=f"epoch {self._epoch}{stands}, as in the order's state",
                remedy="Load the order's state first; save both after the same step(), with snapshot_every_n_steps=1. "
                "Or leave the loader's state out and call order.resume().",
            )
        self.resume(drawn)

    @abstractmethod
    def _is_over(self) -> bool:
        """Does a second pass begin the next epoch, or was the first only a look (nothing observed)?"""

    def _advance(self) -> None:
        """Adopt the next epoch's order."""
        self._epoch += 1
        self._touched = False

    # --- for subclasses ---------------------------------------------------------------------------

    def _first_epoch(self) -> Indices:
        return _rng.permutation(self.n, seed=self.seed)

    def _expand(self, arrangement: Indices) -> Indices:
        """Units to examples."""
        if self.group == 1:
            return np.take(self._members, arrangement)
        places = (arrangement[:, None] * self.group + np.arange(self.group)).ravel()
        return np.take(self._members, places[places < self.n])

    def _check_drawn(self, count: int, waiting: int | None = None) -> None:
        waiting = self._drawn - self._taken if waiting is None else waiting
        if count > waiting:
            raise StepError(
                f"{count} examples to observe, but only {waiting} drawn and not yet observed",
                expected="each drawn example to be observed once",
                remedy="Draw batches from order.sampler and run the model once on each: a model called twice before a "
                "backward counts twice. Or pass indices= to observe().",
            )

    def _known_progress(self) -> int | None:
        """How many of this epoch's examples are done, from the front; None if that cannot be known."""
        return None if self._uncounted else self._taken

    def _device(self) -> torch.device:
        """Where saved tensors belong."""
        return torch.device("cpu")

    def _identity(self) -> dict[str, Any]:
        """What must agree for a saved state to be loaded."""
        alone = self._share if self._share is not None and self._share.alone else None
        return {
            "order": type(self).__name__,
            "n": self.n,
            "group": self.group,
            "seed": self.seed,
            **({} if alone is None else {"rank": alone.ranks.rank, "ranks": alone.ranks.size}),
        }

    def _check_state(self, state: State) -> None:
        """Raise if a state of the right kind has values that no order can have; nothing has changed yet."""
        check_count(state, "epoch")
        check_count(state, "taken", self.n)

    def _load(self, state: State) -> None:
        """Take over a state that has been checked."""
        self._epoch, self._taken = state["epoch"], state["taken"]
        self._touched, self._uncounted = state["touched"], state["uncounted"]
        self._drawn, self._resuming = self._taken, False  # what was drawn ahead is drawn again
        self._ticket += 1


class BlindOrder(Order):
    """An order that looks at no gradient: its epochs are a function of the seed alone.

    ``step()`` and ``observe()`` are accepted so that a training loop need not know which order it has.
    """

    def __init__(self, n: Any, *, group: int = 1, seed: int = 0, distributed: Any = "auto") -> None:
        super().__init__(n, group=group, seed=seed, distributed=distributed)
        self._driven = False  # has step() or observe() ever been called?
        self._peeked = False

    @abstractmethod
    def _arrange(self, epoch: int) -> Indices:
        """The units in the order of ``epoch``; epoch 0 is ``range(units)``."""

    def history(self, epoch: int) -> Indices:
        if epoch < 0:
            raise InputError(f"epoch {epoch}", expected="an epoch >= 0", remedy="Epochs count from 0.")
        return self._expand(self._arrange(epoch))

    def step(self) -> None:
        self._drive()
        self._uncounted = True

    def observe(self, grads: Any, indices: Any = None) -> None:
        from ordain.gradients import as_gradients

        size = as_gradients(grads).size
        if self._share is not None:
            size = min(self._share.covered(size), self._drawn - self._taken)
        if indices is None:
            self._check_drawn(size)
        self._drive()
        self._taken = min(self._taken + size, self._drawn)

    def _drive(self) -> None:
        if not self._drawn:
            raise StepError(
                "step() before anything was drawn",
                expected="a batch from order.sampler first",
                remedy="Pass sampler=order.sampler to the DataLoader.",
            )
        self._touched = self._driven = True

    def state_dict(self, *, vectors: bool = True, history: bool = True) -> State:
        state = super().state_dict(vectors=vectors, history=history)
        undriven = self._drawn > 0 and not self._driven  # nobody calls step(): the cursor is all there is
        if undriven:
            state |= {"taken": 0, "touched": self._touched or not self._is_look(), "uncounted": True}
        return state | {"driven": self._driven, "peeked": self._peeked or undriven}

    def _load(self, state: State) -> None:
        super()._load(state)
        self._driven, self._peeked = state["driven"], state["peeked"]

    def _is_over(self) -> bool:
        if self._touched:
            return True
        if self._driven:
            return False
        look = self._is_look()
        self._peeked = True
        return not look

    def _is_look(self) -> bool:
        # Nobody calls step(). A first incomplete pass is taken for a look at the data; later ones
        # cannot be told from epochs that were cut short, and an order must not repeat for ever.
        return self._epoch == 0 and self._drawn < self.n and not self._peeked


def check_n(n: Any) -> int:
    """``n`` as a positive int; a dataset is asked for its length."""
    if isinstance(n, IterableDataset):
        raise InputError(
            f"an IterableDataset ({type(n).__name__})",
            expected="a map-style dataset with a length, whose examples can be visited in any order",
            remedy="Load it into a list or a map-style Dataset; a stream has no order to choose.",
        )
    if isinstance(n, DataLoader):
        raise InputError(
            "a DataLoader, whose length counts batches",
            expected="the number of examples, or the dataset",
            remedy="Pass loader.dataset, or its length.",
        )
    if hasattr(n, "__len__") and not isinstance(n, (str, bytes, torch.Tensor, np.ndarray)):
        n = len(n)
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise InputError(f"n={n!r}", expected="the number of examples, at least 1", remedy="Pass len(dataset).")
    return int(n)


def _check_group(group: Any) -> int:
    if isinstance(group, bool) or not isinstance(group, (int, np.integer)) or group < 1:
        raise InputError(f"group={group!r}", expected="an integer >= 1", remedy="group=1 orders single examples.")
    return int(group)
