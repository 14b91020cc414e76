"""The base class of all orders: a cursor, an arrangement and, if it learns, a source, a schedule and a learner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
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
from ordain.gradients import Collected, Sketch, Source, as_gradients, rescaled
from ordain.gradients.sources import is_head, source_for
from ordain.orders.arrangement import Arrangement
from ordain.orders.coordination import Coordinator
from ordain.orders.cursor import Cursor
from ordain.orders.intake import Intake, number_of
from ordain.orders.learner import Learner
from ordain.orders.options import keywords, refuse_unknown
from ordain.orders.preconditioning import Preconditioner
from ordain.orders.saved_state import STATE_VERSION, State, check_fields, check_identity, converted
from ordain.orders.schedule import Learning, Schedule
from ordain.orders.steps import Clock, Steps
from ordain.orders.units import Indices, Units, check_group, check_n, runs
from ordain.orders.view import view_of
from ordain.orders.watched_model import WatchedModel
from ordain.sampler import OrderSampler, RankSampler

Arrange = Callable[[int, int], Indices]
_INNER = ("arrange", "members", "identity", "learner", "model")  # arguments of subclasses to this class


class Order:
    """An order in which to visit ``n`` examples, epoch after epoch.

    Units of ``group`` examples stay together and are ordered as one. The units are formed from the
    first epoch, which is the same for all orders with the same ``seed`` and ``n``.

    To write your own order, subclass this and pass either ``arrange`` or ``learner``.

    Args:
        n: the number of examples, or the (map-style) dataset itself.
        group: the number of examples in a unit; a unit's gradient is the mean of its examples' gradients.
        seed: determines all random numbers.
        contiguous: whether a unit is ``group`` neighbouring examples (0 .. group - 1 and so on), for data that is read
            in blocks, instead of random ones. See docs/orders.md.
        distributed: ``"auto"`` shares the order between ranks if torch.distributed is initialised. False, a mode or a
            :class:`~ordain.distributed.Distributed` overrides this: see docs/distributed.md.
        arrange: for an order that does not use gradients: ``arrange(epoch, units)`` returns ``[units]``, the units in
            the order of that epoch. Epoch 0 is ``range(units)`` by convention.
        members: ``[n]``, the examples in the order of epoch 0; a random permutation by default.
        identity: settings, besides the arguments above, that must match for a saved state to be loaded.
        learner: for an order that uses gradients: see :class:`~ordain.orders.learner.Learner`.
        learn: the epochs in which to learn; all by default. See :class:`~ordain.Schedule`.
        model: the model to watch (it is never wrapped); ``None`` if gradients are passed to ``observe()``.
        gradients: how ``step()`` gets per-example gradients: ``"exact"`` from the ordinary backward, ``"func"``
            by torch.func, ``"microbatch"`` from one backward for each unit; or a function that builds a
            :class:`~ordain.gradients.Source`.
        params: order by these parameters only: ``"head"``, the last linear layer that the model calls (found at the
            first batch); names of parameters or modules; modules; or a function of a parameter's name. Earlier layers
            may then be of any kind: see docs/orders.md.
        loss_reduction: how the loss reduces over a batch, ``"mean"`` or ``"sum"``.
        batch_dim: the batch dimension of the model's inputs.
        sketch: order by random sketches of this many numbers instead of longer gradients, in O(sketch) memory.
        precondition: the optimizer (Adam, AdamW or RMSprop): order by gradients as it scales them, divided by
            the roots of its second moments at the beginning of the epoch. See docs/orders.md.

    Attributes:
        n: as above; the size of this process's shard if ranks are independent.
        group: as above.
        seed: as above.
        sampler: for ``DataLoader(..., sampler=order.sampler)``.
        device: the device of the order's vectors.
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
        self._head = is_head(params)
        self._watched = WatchedModel(type(self).__name__)
        self._clock = Clock()
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
            options = {"params": params, "loss_reduction": loss_reduction, "batch_dim": batch_dim}
            sketches = None if sketch is None else Sketch(sketch, seed=self.seed)
            try:
                self._begin(learner, model, gradients, options, sketches, precondition)
            except BaseException:
                self.detach()
                raise

    def _begin(
        self,
        learner: Learner,
        model: nn.Module | None,
        gradients: str | Callable[..., Source],
        options: dict[str, Any],
        sketch: Sketch | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Build what learns, and watch the model."""
        source, conditioner = None, None
        if model is not None:
            model = model.module if isinstance(model, DistributedDataParallel) else model
            with self._view.heard():
                source = source_for(model, gradients, **options)
            self._watched.attach(source)
            shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
            self._view.agree(**{"length of gradients": source.dim, "parameters of the model": shapes})
            conditioner = None if optimizer is None else Preconditioner(optimizer, model, source)
            self.device = source.like.device
        if sketch is not None:  # parameters are laid out differently in gradients from elsewhere
            self._identity["sketch"] = f"{sketch.k} of {'observe' if source is None else source.name}"
        whole_units = source is not None and source.whole_units
        if whole_units:
            self._view.deal_units(self.group)
        self._learner = learner
        dim = None if source is None else source.dim
        self._intake = Intake(dim, sketch, conditioner, from_model=source is not None)
        self._arrangement = Arrangement(
            self._units, log=learner.log, learns=self._schedule.in_epoch, whole_units=whole_units
        )
        learner.begin(self._arrangement, seed=self.seed, dim=self._intake.dim)
        self._ranks: Coordinator | None = self._view.coordinator(
            self._cursor, self._arrangement, device=self.device, marks=learner.marks
        )
        self._steps = Steps(self._cursor, self._arrangement, learner, self._intake, self._ranks)
        if model is not None:
            self._watched.keep(model)
        self._watched.watch(learning=self._learning)

    # --- what a user sees -------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The current epoch, from 0; it changes at the first draw of the next one."""
        return self._cursor.epoch

    @property
    def sent_bytes(self) -> int:
        """How many bytes this rank has sent to other ranks for the order; 0 if there are none."""
        return self._view.sent

    @property
    def set_aside(self) -> int:
        """How many examples were left out because their gradients were not finite, over all epochs."""
        return self._arrangement.not_finite if self._learns else 0

    @property
    def joinable(self) -> Joinable:
        """For torch's ``Join([model, order.joinable])``, if ranks have different numbers of batches."""
        if not self._learns or self._ranks is None:
            raise StepError(
                "joinable of an order that is not coordinated over ranks",
                expected="an order created after init_process_group()",
                remedy="Call init_process_group() before creating the order.",
            )
        return self._ranks.joinable(lambda: self._steps.accompany() if self._learning else None)

    def step(self, indices: Any = None, *, loss_scale: float | GradScaler = 1.0) -> None:
        """Call once after each ``loss.backward()``.

        Args:
            indices: the dataset index of each example of the batch (of all batches since the last step), in the order
                of the batch: for loaders whose ``collate_fn`` or batch sampler sorts or drops examples. By default they
                are the next ones drawn.
            loss_scale: the factor by which the loss was multiplied, if it changes from step to step; or the
                ``torch.amp.GradScaler`` in use, before its ``update()``. The gradients are divided by it.
        """
        scale = 1.0 if type(loss_scale) is float and loss_scale == 1.0 else number_of(loss_scale)
        if self._learning:
            start = perf_counter()
            self._steps.learn(partial(self._collected, scale), indices)
            self._clock.stepped(start, perf_counter())
        else:
            self._cursor.step_uncounted()

    def observe(self, grads: Any, indices: Any = None) -> None:
        """Observe per-example gradients that you computed yourself, instead of the model's: see docs/orders.md."""
        if self._learning:
            self._steps.learn(lambda: [self._given(grads)], indices)
        elif indices is None:
            self._count(as_gradients(grads).size)
        else:
            self._cursor.step_uncounted()

    def ignore(self) -> AbstractContextManager[None]:
        """Context manager in which forwards of the model do not count, such as a second pass. See docs/orders.md."""
        return self._watched.ignore()

    def skip(self, count: int, indices: Any = None) -> None:
        """Skip the next ``count`` drawn examples, which will not be observed (a batch skipped with ``continue``).

        They go in the middle of the next epoch. Without this call the next ``step()`` would attribute its
        gradients to them. ``indices``: which examples they are, as in :meth:`step`.
        """
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
            raise InputError(f"count={count!r}", expected="a number of examples >= 0", remedy="Pass len(x).")
        count = int(count)
        if self._learning:
            # Gradients of batches before this one may wait: they come first. Its own, if it was run, are dropped.
            waiting = self._watched.passes_waiting()
            never_run = waiting is not None and self._cursor.handed_more_than(waiting)
            before = (bool(waiting) if never_run else self._watched.drop(count)) and indices is None
            self._steps.learn(lambda: [*(self._collected() if before else ()), count], indices)
        elif count:
            self._count(count)

    def history(self, epoch: int) -> Indices:
        """Return ``[n]``, the examples in the order in which ``epoch`` visits (or visited) them."""
        if self._learns:
            return self._arrangement.history(epoch, self.epoch)
        if epoch < 0:
            raise InputError(f"epoch {epoch}", expected="an epoch >= 0", remedy="Epochs count from 0.")
        return self._units.expand(self._arranged(epoch))

    def resume(self, done: int | None = None) -> int:
        """Continue where the saved epoch stopped; call it after :meth:`load_state_dict`.

        Without this call the next pass begins the next epoch. ``done`` is the number of examples of the epoch that
        the saved run had trained on; an order that cannot know it raises: see docs/reliability.md.

        Returns:
            The epoch that the next pass visits: the saved one, or the next if it was complete.
        """
        return self._cursor.resume(done)

    def detach(self) -> None:
        """Remove all hooks from the model (an order without a model does nothing)."""
        self._watched.detach()

    def state_dict(self, *, vectors: bool = True, history: bool = True) -> State:
        """Return the state needed to continue: tensors, numbers and strings only. It has no side effects.

        Args:
            vectors: include vectors as long as a gradient. Without them the state is small and takes microseconds, but
                an order that loads it restarts its balancing mid-epoch: see docs/reliability.md.
            history: include past epochs, for ``history(epoch)``.
        """
        state = {"version": STATE_VERSION, **self._identity, **self._cursor.save()}
        if not self._learns:
            return state
        return (
            state
            | self._watched.save()
            | self._arrangement.save(epoch=self.epoch, history=history)
            | self._intake.save(vectors=vectors)
            | self._learner.save(vectors=vectors)
        )

    def load_state_dict(self, state: State) -> None:
        """Load a saved state. A state of another order is refused, and nothing changes."""
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
        self._watched.check(state)
        self._watched.load(state)
        self._cursor.load(state)
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
            facts = self._watched.facts
            more += ", params='head'" + (f" ({', '.join(facts[0])})" if facts else "")
        return f"{type(self).__name__}(n={self.n}{more}, seed={self.seed})"

    # --- what is observed -------------------------------------------------------------------------

    def _collected(self, loss_scale: float = 1.0) -> list[Collected]:
        """What the model's backward passes have brought, for a loss that was multiplied by ``loss_scale``."""
        watched = self._watched
        if watched.source is None or watched.claim is None or not watched.claim.live:
            raise watched.refusal()
        batches = watched.source.collect()
        if not batches:
            raise watched.nothing_new()
        if watched.expected is not None:
            watched.check_found()
        known = all(batch.gradients.dim == self._intake.given for batch in batches)
        if known and self._intake.passive and loss_scale == 1.0:
            return batches
        return [
            Collected(self._intake.take(rescaled(batch.gradients, 1.0 / loss_scale)), batch.examples)
            for batch in batches
        ]

    def _given(self, grads: Any) -> Collected:
        if "precondition" in self._identity:
            raise StepError(
                "observe() on an order with precondition=",
                expected="step(), which knows which parameters the gradients belong to",
                remedy="Create the order without precondition=, and multiply the gradients yourself.",
            )
        batch = as_gradients(grads)
        return Collected(self._intake.take(batch), batch.size)

    def _count(self, size: int) -> None:
        """A batch in an epoch that does not learn."""
        if not self._view.ranks:
            self._cursor.check_drawn(size)
        self._cursor.step_counted(size)

    # --- what the cursor asks ---------------------------------------------------------------------

    def _indices(self) -> Indices:
        self._watched.drop()  # gradients that no step() took belong to draws that are over
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

    def _watch(self, *, learning: bool) -> None:
        self._clock.restart()
        self._learning = learning
        self._watched.watch(learning=learning)

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
