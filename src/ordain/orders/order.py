"""The public face of every order: a cursor, an arrangement and, where it learns, a source, a schedule and a learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from ordain import _rng
from ordain._context import undisturbed
from ordain.errors import ArgumentError, InputError, StepError
from ordain.gradients import Collected, Gradients, Sketch, Source, as_gradients, rescaled
from ordain.gradients.sources import HEAD, Claim, claim, source_for
from ordain.orders.arrangement import Arrangement
from ordain.orders.coordination import Collect, Coordinator
from ordain.orders.cursor import Cursor
from ordain.orders.intake import Intake, number_of
from ordain.orders.learner import Learner
from ordain.orders.options import keywords, refuse_unknown
from ordain.orders.preconditioning import Preconditioner
from ordain.orders.saved_state import (
    STATE_VERSION,
    State,
    check_fields,
    check_identity,
    check_model,
    converted,
)
from ordain.orders.schedule import Learning, Schedule
from ordain.orders.units import Indices, Units, check_group, check_n, runs
from ordain.orders.view import view_of
from ordain.sampler import OrderSampler, RankSampler

Arrange = Callable[[int, int], Indices]
_NONE: Indices = np.empty(0, dtype=np.int64)
_INNER = ("arrange", "members", "identity", "learner", "model")  # arguments of subclasses to this class


class Order:
    """An order in which to visit ``n`` examples, epoch after epoch.

    Units of ``group`` examples stay together and are ordered as one. The units are cut from the
    first epoch, which is the same for every order of the same ``seed`` and ``n``.

    To write an order of your own, subclass this and pass either ``arrange`` or ``learner``.

    Args:
        n: the number of examples, or the (map-style) dataset itself.
        group: how many examples make a unit; a unit's gradient is the mean of its examples'.
        seed: everything random follows from it.
        contiguous: whether a unit is ``group`` neighbouring examples, 0 .. group - 1 and so on, as where data is read
            in blocks; else random ones. See docs/orders.md.
        distributed: ``"auto"`` shares the order out to the ranks wherever torch.distributed is initialised; False, a
            mode or a :class:`~ordain.distributed.Distributed` says otherwise: see docs/distributed.md.
        arrange: for an order that looks at no gradient: ``arrange(epoch, units)`` returns ``[units]``, the units in the
            order of that epoch. Epoch 0 is ``range(units)`` by convention.
        members: ``[n]``, the examples in the order of epoch 0; a random permutation by default.
        identity: what must agree, besides the arguments above, for a saved state to be loaded.
        learner: for an order that looks at gradients: see :class:`~ordain.orders.learner.Learner`.
        learn: in which epochs to learn; all by default. See :class:`~ordain.Schedule`.
        model: watched from now on (never wrapped); ``None`` if gradients come through ``observe()``.
        gradients: how ``step()`` gets per-example gradients: ``"exact"`` from the ordinary backward, ``"func"``
            by torch.func, ``"microbatch"`` from one backward for each unit; or a function that builds a
            :class:`~ordain.gradients.Source`.
        params: order by these parameters only: ``"head"``, the last linear layer that the model calls (found at the
            first batch); names of parameters or modules; modules; or a test of a parameter's name. What comes before
            them in the model may then be anything: see docs/gradients.md.
        loss_reduction: how the loss reduces over a batch, ``"mean"`` or ``"sum"``.
        batch_dim: the batch dimension of the model's inputs.
        sketch: order by random sketches of this many numbers instead of longer gradients: O(sketch) memory, not O(d).
        precondition: the optimizer, if it is Adam, AdamW or RMSprop: order by gradients as it scales them, divided by
            the roots of its second moments at the beginning of the epoch. See docs/orders.md.

    Attributes:
        n: as above, in this process's shard if ranks are independent.
        group: as above.
        seed: as above.
        sampler: for ``DataLoader(..., sampler=order.sampler)``.
        device: where the vectors of the order live.
    """

    def __init__(
        self,
        n: Any,
        *,
        group: int = 1,
        contiguous: bool = False,
        seed: int = 0,
        distributed: Any = "auto",
        arrange: Arrange | None = None,
        members: Indices | None = None,
        identity: dict[str, Any] | None = None,
        learner: Learner | None = None,
        learn: Schedule | None = None,
        model: nn.Module | None = None,
        gradients: str | Callable[..., Source] = "exact",
        params: Any = None,
        loss_reduction: str = "mean",
        batch_dim: int = 0,
        sketch: int | None = None,
        precondition: torch.optim.Optimizer | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:  # subclasses hand on what they do not know themselves
            inner = _INNER if type(self) is not Order else ()
            refuse_unknown(type(self).__name__, unknown, keywords(type(self), Order, without=inner))
        if (arrange is None) == (learner is None):
            raise InputError(
                "both arrange= and learner=" if arrange else "neither arrange= nor learner=",
                expected="one of them",
                remedy="Pass arrange=, a function of the epoch, or learner=, which looks at gradients.",
            )
        _check_model(model, batch_dim, type(self).__name__)
        if precondition is not None and (model is None or learner is None):
            raise InputError(
                "precondition= on an order without a model",
                expected="an order that takes gradients from a model",
                remedy="Multiply the gradients that you observe() yourself.",
            )
        self.n, self.group, self.seed = check_n(n), check_group(group), _rng.check_seed(seed)
        self._schedule = Learning(learn)
        self._view = view_of(self.n, distributed)
        self._arrange: Arrange | None = arrange
        self._learns = learner is not None
        self._learning = self._learns and self._schedule.in_epoch(0)  # in the present epoch
        extra = dict(identity or {})
        if learner is not None:
            extra |= learner.identity() | {"learn": self._schedule.name}
        if precondition is not None:
            extra["precondition"] = type(precondition).__name__
        if contiguous:
            extra["contiguous"] = True
        self._view.agree(order=type(self).__name__, n=self.n, seed=self.seed, group=self.group)
        self._view.agree(**extra)
        first = runs(self.n, self.group if contiguous else 1, seed=self.seed) if members is None else members
        own = self._view.shard(first)
        if contiguous and own is not first:
            raise InputError(
                "contiguous=True with distributed='independent', which deals single examples to ranks",
                expected="an order that is shared by the ranks",
                remedy="Leave distributed= out.",
            )
        self._units = Units(own, group=self.group)
        self.n = self._units.n
        # What must agree for a saved state to be loaded.
        self._identity = {"order": type(self).__name__, "n": self.n, "group": self.group, "seed": self.seed}
        self._identity |= self._view.identity | extra
        self._source: Source | None = None
        self._head = params == HEAD
        self._detached = False
        self._claim: Claim | None = None
        self._watched: tuple[list[str], torch.dtype] | None = (
            None  # names and dtype, of a model that was or a state that was loaded
        )
        self.device = torch.device("cpu")
        self._cursor = Cursor(
            self._view,
            indices=self._indices,
            advance=self._advance,
            observed=self._observed if self._learns else None,
            warn=self._warn,
        )
        self.sampler: Sampler[int] = OrderSampler(self._cursor, order=repr(self))
        if self._view.ranks:
            rank, ranks = self._view.rank, self._view.ranks
            self.sampler = RankSampler(self._cursor, order=repr(self), n=self.n, rank=rank, ranks=ranks)
        if learner is not None:
            conditioner: Preconditioner | None = None
            try:
                if model is not None:
                    model = model.module if isinstance(model, DistributedDataParallel) else model
                    with self._view.heard():
                        self._source = source_for(
                            model, gradients, params=params, loss_reduction=loss_reduction, batch_dim=batch_dim
                        )
                    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
                    self._view.agree(**{"length of gradients": self._source.dim, "parameters of the model": shapes})
                    if precondition is not None:
                        conditioner = Preconditioner(precondition, model, self._source)
                sketches = None if sketch is None else Sketch(sketch, seed=self.seed)
                self._begin(learner, self._source, sketches, conditioner)
                if model is not None and self._source is not None:
                    self._claim = claim(model, self._source)
                    self._watch(learning=self._learning)
            except BaseException:
                self.detach()
                raise

    def _begin(
        self, learner: Learner, source: Source | None, sketch: Sketch | None, conditioner: Preconditioner | None
    ) -> None:
        self._learner = learner
        self._intake = Intake(None if source is None else source.dim, sketch, conditioner)
        if sketch is not None:  # parameters are laid out differently in gradients from elsewhere
            self._identity["sketch"] = f"{sketch.k} of {'observe' if source is None else source.name}"
        whole_units = source is not None and source.whole_units
        self._arrangement = Arrangement(
            self._units, log=learner.log, learns=self._schedule.in_epoch, whole_units=whole_units
        )
        learner.begin(self._arrangement, seed=self.seed, dim=self._intake.dim)
        if source is not None:
            self.device = source.like.device
        if whole_units:
            self._view.deal_units(self.group)
        self._ranks: Coordinator | None = self._view.coordinator(
            self._cursor, self._arrangement, device=self.device, marks=learner.marks
        )

    # --- what a user sees -------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch being visited, from 0; it changes at the first draw of the next."""
        return self._cursor.epoch

    @property
    def sent_bytes(self) -> int:
        """How many bytes this rank has sent to the others for the order; 0 where there are none."""
        return self._view.sent

    @property
    def set_aside(self) -> int:
        """How many examples' gradients were not finite and so took no part, over all epochs."""
        return self._arrangement.not_finite if self._learns else 0

    @property
    def joinable(self) -> Joinable:
        """For torch's ``Join([model, order.joinable])``, where ranks have different numbers of batches."""
        if not self._learns or self._ranks is None:
            raise StepError(
                "joinable of an order that is not coordinated over ranks",
                expected="an order made inside torch.distributed",
                remedy="Call init_process_group() before making the order.",
            )
        return self._ranks.joinable(self._accompany)

    def step(self, indices: Any = None, *, loss_scale: float | GradScaler = 1.0) -> None:
        """Call once after each ``loss.backward()``.

        Args:
            indices: the dataset index of each example of the batch (of all batches since the last step), in the order
                of the batch: for loaders whose ``collate_fn`` or batch sampler sorts or drops examples. By default they
                are the next ones drawn.
            loss_scale: what the loss was multiplied by before its backward, if that changes from step to step; or the
                ``torch.amp.GradScaler`` that did it, before its ``update()``. The gradients are divided by it.
        """
        if type(loss_scale) is not float or loss_scale != 1.0:
            loss_scale = number_of(loss_scale)
        if self._learning:
            scale = loss_scale
            self._learn_from(lambda: self._collected(scale), indices)
        else:
            self._cursor.step_uncounted()

    def observe(self, grads: Any, indices: Any = None) -> None:
        """Take per-example gradients from the user instead of from the model: see docs/orders.md."""
        if self._learning:
            self._learn_from(lambda: [self._given(grads)], indices)
        elif indices is None:
            self._count(as_gradients(grads).size)
        else:
            self._cursor.step_uncounted()

    def ignore(self) -> AbstractContextManager[None]:
        """Forwards of the model in here do not count: a second pass over a batch, say. See docs/orders.md."""
        if self._source is None:
            return nullcontext()
        ignore: Callable[[], AbstractContextManager[None]] | None = getattr(self._source, "ignore", None)
        if ignore is None:
            raise StepError(
                f"ignore() with a source of type {type(self._source).__name__}",
                expected="a source with a method ignore(), a context manager",
                remedy="Write one, or call observe(grads) in place of step().",
            )
        return ignore()

    def skip(self, count: int, indices: Any = None) -> None:
        """The next ``count`` drawn examples will not be observed (a batch that is passed over with ``continue``).

        They keep a place in the middle of the next epoch. Without this the next ``step()`` would take its
        gradients for theirs. ``indices``: which examples they are, as in :meth:`step`.
        """
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
            raise InputError(f"count={count!r}", expected="a number of examples >= 0", remedy="Pass len(x).")
        count = int(count)
        if self._learning:
            # Gradients of batches before this one may wait: they come first.
            before = self._source is not None and self._source.drop(count)
            before = before and indices is None
            self._learn_from(lambda: [*(self._collected() if before else ()), count], indices)
        elif count:
            self._count(count)

    def history(self, epoch: int) -> Indices:
        """``[n]``: the examples in the order in which ``epoch`` visits (or visited) them."""
        if self._learns:
            return self._arrangement.history(epoch, self.epoch)
        if epoch < 0:
            raise InputError(f"epoch {epoch}", expected="an epoch >= 0", remedy="Epochs count from 0.")
        return self._units.expand(self._arranged(epoch))

    def resume(self, done: int | None = None) -> int:
        """After :meth:`load_state_dict`: the next pass continues where the saved epoch stopped.

        Without it the next pass begins the next epoch. ``done`` says how many examples of the epoch
        the saved run had trained on; an order that cannot know it raises: see docs/reliability.md.

        Returns:
            The epoch that the next pass visits: this one, or the next if all of it is done.
        """
        return self._cursor.resume(done)

    def detach(self) -> None:
        """Leave the model exactly as it was found (an order that watches none has nothing to do)."""
        if self._source is not None:
            self._watched = self._facts()
            self._source.detach()
            if self._claim is not None:
                self._claim.give_up()
            self._source = None
            self._detached = True

    def state_dict(self, *, vectors: bool = True, history: bool = True) -> State:
        """All that is needed to continue: tensors, numbers and strings only. Changes nothing, at any time.

        Args:
            vectors: with what is as long as a gradient. Without it the state is small and takes microseconds, and
                an order that loads it begins its balancing again in mid-epoch: see docs/reliability.md.
            history: with what ``history(epoch)`` of past epochs needs.
        """
        state = {"version": STATE_VERSION, **self._identity, **self._cursor.save()}
        if not self._learns:
            return state
        if (facts := self._facts()) is not None:
            parameters, dtype = facts
            state |= {"parameters": list(parameters), "dtype": str(dtype)}
        return (
            state
            | self._arrangement.save(epoch=self.epoch, history=history)
            | self._intake.save(vectors=vectors)
            | self._learner.save(vectors=vectors)
        )

    def load_state_dict(self, state: State) -> None:
        """Go back to a saved state; refuses, and changes nothing, if it is not this order's."""
        state = converted(state)
        check_identity(
            state,
            {name: self._identity.get(name) for name in ("contiguous", "sketch", "precondition")} | self._identity,
        )
        mine = self.state_dict(vectors=False, history=False)
        check_fields(state, {name: value for name, value in mine.items() if name not in ("parameters", "dtype")})
        self._cursor.check(state)
        learning = self._learns and self._schedule.in_epoch(state["epoch"])
        for part in (self._arrangement, self._intake, self._learner) if self._learns else ():
            part.check(state)
        facts = self._facts()
        if facts is None and self._source is not None and state.get("parameters"):  # the head is still to be found
            facts = state["parameters"], self._source.like.dtype
        if facts is not None:
            check_model(state, *facts)
        self._cursor.load(state)
        self._watched = facts if self._source is not None and not self._source.parameters else self._watched
        if not self._learns:
            return
        with undisturbed():
            self._arrangement.load(state)
            self._intake.load(state)
            self._arrangement.set_aside(self._learner.load(state))
        self._watch(learning=learning)
        if self._ranks is not None:
            self._ranks.loaded()

    def __iter__(self) -> NoReturn:
        raise ArgumentError(
            f"{type(self).__name__} itself in a loop or a loader",
            expected="its sampler",
            remedy="Write DataLoader(dataset, batch_size=..., sampler=order.sampler).",
        )

    def __repr__(self) -> str:
        more = f", group={self.group}" if self.group > 1 else ""
        if self._head:
            facts = self._facts()
            more += ", params='head'" + (f" ({', '.join(facts[0])})" if facts else "")
        return f"{type(self).__name__}(n={self.n}{more}, seed={self.seed})"

    # --- learning ---------------------------------------------------------------------------------

    def _learn_from(self, collect: Collect | None, indices: Any = None) -> None:
        if indices is not None and self._ranks is not None:
            raise InputError(
                "indices on an order that is coordinated over ranks",
                expected="each rank to observe its examples in the order in which it drew them",
                remedy="Leave indices out.",
            )
        with undisturbed():
            if self._ranks is not None:
                with self._ranks.meeting(collect) as batches:
                    for observed in batches:
                        slots = self._slots(observed.count, None)
                        self._learn(observed.gradients, slots[observed.rows], slots[observed.passed], observed.count)
                return
            mine = [] if collect is None else collect()
            parts = self._parts(mine, indices)  # all of them are known before the first changes anything
            for batch, slots in zip(mine, parts, strict=True):
                if isinstance(batch, int):
                    self._learn(None, _NONE, slots, len(slots), named=indices is not None)
                elif len(slots):
                    self._learn(batch.gradients, slots, _NONE, len(slots), named=indices is not None)

    def _parts(self, batches: Sequence[Collected | int], indices: Any) -> list[Indices]:
        """The slots of each batch, in turn or as they are named."""
        sizes = [batch if isinstance(batch, int) else batch.examples for batch in batches]
        slots = self._slots(sum(sizes), indices)
        parts = [slots[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
        if indices is None and not all(isinstance(batch, int) for batch in batches):
            self._cursor.check_passed_over(len(slots))
        if self._arrangement.whole_units:
            for batch, part in zip(batches, parts, strict=True):
                if len(part) and not isinstance(batch, int):
                    self._arrangement.check_unit(np.unique(part), len(part))
        return parts

    def _learn(
        self, batch: Gradients | None, slots: Indices, passed: Indices, count: int, *, named: bool = False
    ) -> None:
        """Learn from a batch, and note the places of its units; of ``count`` examples, some may be passed over."""
        arrangement, cursor = self._arrangement, self._cursor
        if len(passed):
            arrangement.set_aside(passed)
            self._learner.skip(passed)
        if batch is not None:
            if whole := arrangement.whole_units:
                slots = np.unique(slots)
            if self.group > 1:  # without the rest of units that were set aside
                batch, slots = arrangement.live(batch, slots)
            if len(slots):
                try:
                    batch = batch if self._intake.passive else self._intake.learned(batch)
                    decision = self._learner.learn(batch, slots, whole_units=whole, epoch=cursor.epoch)
                except BaseException:
                    arrangement.set_aside(self._learner.abandoned())
                    raise
                arrangement.places[decision.slots] = decision.places
                if decision.not_finite:
                    arrangement.note_not_finite(decision.not_finite, cursor.epoch)
            if not self._intake.passive:
                self._intake.confirm()
        cursor.take(count, named=named)

    def _slots(self, count: int, indices: Any) -> Indices:
        """The slots of the next ``count`` drawn examples, or of those named."""
        cursor, arrangement = self._cursor, self._arrangement
        if indices is not None:
            return arrangement.slots_of(indices, count=count, drawn=cursor.drawn)
        if cursor.out_of_turn:
            unseen = arrangement.unseen(cursor.drawn)
            cursor.check_drawn(count, len(unseen))
            return unseen[:count]
        cursor.check_drawn(count)
        positions = np.arange(cursor.taken, cursor.taken + count)
        return positions if self.group == 1 else arrangement.slots_at(positions)

    def _collected(self, loss_scale: float = 1.0) -> list[Collected]:
        """What the model's backward passes have brought, for a loss that was multiplied by ``loss_scale``."""
        if self._source is None:
            raise StepError(
                "step() after detach()" if self._detached else "step() on an order without a model",
                expected="a model to take gradients from",
                remedy=f"Write {type(self).__name__}(model, n), or call observe(grads).",
            )
        if self._claim is not None and not self._claim.live:
            raise StepError(
                "step() on an order whose model another order watches now",
                expected="one order to a model",
                remedy="Step the order that was made last, with its own sampler; or take this one up again by "
                f"new = {type(self).__name__}(model, n) and new.load_state_dict(this_order.state_dict()).",
            )
        batches = self._source.collect()
        if self._watched is not None and batches:
            check_model({"parameters": self._watched[0]}, *(self._facts() or self._watched))
            self._watched = None
        if not batches:
            raise StepError(
                "step() with no new gradients",
                expected="a forward in training mode and its backward since the last step()",
                remedy="Call order.step() after loss.backward(), once; call the model itself, in train() mode. A model "
                "that torch.compile has run already must be compiled again after the order is made.",
            )
        if self._intake.passive and loss_scale == 1.0:
            return batches
        return [
            Collected(self._intake.take(rescaled(batch.gradients, 1.0 / loss_scale)), batch.examples)
            for batch in batches
        ]

    def _given(self, grads: Any) -> Collected:
        if "precondition" in self._identity:
            raise StepError(
                "observe() on an order with precondition=",
                expected="step(), which knows of what parameters the gradients are",
                remedy="Make the order without precondition=, and multiply the gradients yourself.",
            )
        batch = as_gradients(grads)
        return Collected(self._intake.take(batch), batch.size)

    def _count(self, size: int) -> None:
        """A batch in an epoch that does not learn."""
        if not self._view.ranks:
            self._cursor.check_drawn(size)
        self._cursor.step_counted(size)

    def _accompany(self) -> None:
        """While other ranks step, and this one has no more batches."""
        if self._learning:
            self._learn_from(None)

    # --- what the cursor asks ---------------------------------------------------------------------

    def _indices(self) -> Indices:
        if self._source is not None:
            self._source.drop()  # gradients that no step() took belong to draws that are over
        if self._learning:
            self._intake.begin_pass(touched=self._cursor.touched)
        return self._units.expand(self._arranged(self.epoch)) if not self._learns else self._arrangement.indices()

    def _arranged(self, epoch: int) -> Indices:
        count = self._units.count
        found = np.asarray(self._arrange(epoch, count) if self._arrange else np.arange(count))
        if found.shape != (count,) or found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= count:
            raise InputError(
                f"an arrangement of shape {found.shape} and dtype {found.dtype}",
                expected=f"[{count}] of integers in range({count})",
                remedy="arrange(epoch, units) returns the units in the order of that epoch.",
            )
        return found

    def _advance(self, following: int) -> None:
        if not self._learns:
            return
        learning = self._schedule.in_epoch(following)  # before anything changes: it may raise
        if self._learning:
            chosen = self._learner.choose()
            self._arrangement.advance(chosen)  # Alg. 4's sigma_{k+1}
            self._learner.next_epoch()
        else:
            self._arrangement.clear()
        self._watch(learning=learning)
        if self._schedule.ended(following):
            self._learner.release()

    def _facts(self) -> tuple[list[str], torch.dtype] | None:
        """What is saved and checked of the model; None if there is none, or nothing is known of it yet."""
        if self._source is None or not self._source.parameters:
            return self._watched
        return self._source.parameters, self._source.like.dtype

    def _watch(self, *, learning: bool) -> None:
        """Watch the model in epochs that learn, and only in those."""
        self._learning = learning
        if self._source is not None and self._claim is not None and self._claim.live:
            (self._source.attach if learning else self._source.detach)()

    def _observed(self) -> int | None:
        return self._arrangement.observed()

    def _warn(self, topic: str, message: str) -> None:
        self._arrangement.warn_once(topic, f"{type(self).__name__}: {message}")


def _check_model(model: Any, batch_dim: Any, order: str) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise InputError(
            f"a model of type {type(model).__name__}",
            expected="a torch.nn.Module first, then n",
            remedy=f"Write {order}(model, len(dataset)).",
        )
    if isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or batch_dim < 0:
        raise InputError(
            f"batch_dim={batch_dim!r}",
            expected="the batch dimension of the model's inputs",
            remedy="0 for [B, ...], 1 for sequence-first [T, B, ...].",
        )
