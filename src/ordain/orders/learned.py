"""Orders that look at gradients: where they get them from, and which example each belongs to."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from ordain.distributed.exchange import Local
from ordain.distributed.share import Share, check_agreement
from ordain.distributed.together import Company, Together
from ordain.errors import GradientError, InputError, OrdainWarning, StateError, StepError
from ordain.gradients import ExactSource, FuncSource, Gradients, MicrobatchSource, Source, as_gradients
from ordain.gradients.memory import shrinking
from ordain.gradients.sharded import refuse_sharded, refuse_wrapped
from ordain.orders.base import Indices, Order
from ordain.orders.state import State, array, broken, check_count, check_permutation

# Places of a unit besides +1 (front) and -1 (back); all three keep it in the middle.
UNSEEN, ASIDE, WAITING = 0, 2, 3
_PLACES = (1, -1, UNSEEN, ASIDE, WAITING)
_SOURCES: dict[str, Callable[..., Source]] = {
    "exact": ExactSource,
    "func": FuncSource,
    "microbatch": MicrobatchSource,
}


class LearnedOrder(Order):
    """An order that observes per-example gradients.

    Args:
        model: watched from now on (never wrapped); ``None`` if gradients come through ``observe()``.
        n: the number of examples, or the dataset.
        gradients: how ``step()`` gets per-example gradients: ``"exact"`` out of the ordinary backward, ``"func"``
            by torch.func, ``"microbatch"`` from one backward for each unit of ``group`` examples.
        params: order by these parameters only, as a test of their names.
        loss_reduction: how the loss reduces over a batch, ``"mean"`` or ``"sum"``.
        batch_dim: the dimension of the model's inputs that counts the examples.
        group: how many examples make a unit; a unit's gradient is the mean of its examples'.
        seed: everything random follows from it.
        distributed: what to do with the other ranks of a data-parallel run.
    """

    _sums = False  # is what it learns a sum over examples, that ranks can add up?

    def __init__(
        self,
        model: nn.Module | None,
        n: Any,
        *,
        gradients: Literal["exact", "func", "microbatch"] = "exact",
        params: Callable[[str], bool] | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        batch_dim: int = 0,
        group: int = 1,
        seed: int = 0,
        distributed: Any = "auto",
    ) -> None:
        super().__init__(n, group=group, seed=seed, distributed=distributed)
        self._averaged = isinstance(model, DistributedDataParallel)  # does the backward average p.grad over ranks?
        if isinstance(model, DistributedDataParallel):
            model = model.module
        if model is not None and not isinstance(model, nn.Module):
            raise InputError(
                f"a model of type {type(model).__name__}",
                expected="a torch.nn.Module first, then n",
                remedy=f"Write {type(self).__name__}(model, len(dataset)).",
            )
        if model is not None:
            refuse_wrapped(model)
        if gradients not in _SOURCES:
            raise InputError(
                f"gradients={gradients!r}",
                expected=" or ".join(repr(name) for name in _SOURCES),
                remedy="Leave it out for 'exact', or pass model=None and call observe().",
            )
        if isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or batch_dim < 0:
            raise InputError(
                f"batch_dim={batch_dim!r}",
                expected="the dimension of the model's inputs that counts the examples",
                remedy="0 for [B, ...], 1 for sequence-first [T, B, ...].",
            )
        self._arrangement = np.arange(self._units)
        self._origin, self._origin_arrangement = 0, self._arrangement  # the first epoch that history() knows
        self._short: tuple[Indices | None, int] = None, 0  # an arrangement, and the slot of the short unit in it
        self._whole_units = gradients == "microbatch" and model is not None
        self._places = np.zeros(self._units, dtype=np.int8)  # by slot: the unit's place in this epoch
        self._out_of_turn = False  # has observe() been given indices in this epoch?
        self._set_aside = 0
        self._warned: set[str] = set()
        self._dim: int | None = None
        self._source: Source | None = None
        self._detached = False
        if model is not None:
            if gradients != "exact":
                refuse_sharded(model, gradients)
            build = _SOURCES[gradients]
            self._source = build(model, params=params, loss_reduction=loss_reduction, batch_dim=batch_dim)
            self._dim = self._source.dim
        self._together: Together | None = None
        if self._share is not None and not self._share.alone:
            self._together = self._coordinated(self._share, model)

    def _coordinated(self, share: Share, model: nn.Module | None) -> Together:
        if share.options.mode == "sum" and (self._whole_units or not self._sums):
            raise InputError(
                f"mode='sum' for {'micro-batches' if self._whole_units else type(self).__name__}",
                expected="GraB with gradients='exact' or 'func'",
                remedy="Leave distributed= out: the exact mode serves every order.",
            )
        if self._whole_units or share.options.mode == "sum":
            share.each = self.group  # a rank's batch is of whole units
        if isinstance(self._source, ExactSource):
            self._source.forget_sums()
        if model is not None:
            shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
            check_agreement(share, **{"length of gradients": self._dim, "parameters of the model": shapes})
        return Together(self, share)

    # --- what a user sees -------------------------------------------------------------------------

    @property
    def set_aside(self) -> int:
        """How many examples' gradients were not finite and so took no part, over all epochs."""
        return self._set_aside

    @property
    def joinable(self) -> Joinable:
        """For torch's ``Join([model, order.joinable])``, where ranks have different numbers of batches."""
        if self._together is None or self._share is None:
            raise StepError(
                "joinable of an order that is not coordinated over ranks",
                expected="an order made inside torch.distributed",
                remedy="Call init_process_group() before making the order.",
            )
        return Company(self._keep_company, self._like().device, self._share.options.group)

    def _keep_company(self) -> None:
        """While other ranks step, and this one has no more batches."""
        if self._together is not None:
            self._together.step(None)

    def step(self) -> None:
        if self._together is not None:
            self._together.step(self._local_batches)
            return
        batches, examples = self._collected()
        if examples is not None:
            if examples:
                self._observe_unit(batches[0], examples)
            return
        self._check_drawn(sum(batch.size for batch in batches))
        for batch in batches:
            self.observe(batch)

    def _local_batches(self) -> list[Local]:
        batches, examples = self._collected()
        if examples is not None:
            return [Local(examples, batches[0])] if examples else []
        return [Local(batch.size, batch) for batch in batches]

    def _collected(self) -> tuple[list[Gradients], int | None]:
        """What the model's backward passes have brought; for micro-batches also how many examples that was."""
        if self._source is None:
            raise StepError(
                "step() after detach()" if self._detached else "step() on an order without a model",
                expected="a model to take gradients from",
                remedy=f"Write {type(self).__name__}(model, n), or call observe(grads).",
            )
        examples = self._source.examples if isinstance(self._source, MicrobatchSource) else None
        batches = self._source.collect()
        if not batches:
            raise StepError(
                "step() with no new gradients",
                expected="a forward in training mode and its backward since the last step()",
                remedy="Call order.step() after loss.backward(), once; call the model itself, in train() mode. A model "
                "that torch.compile has run already must be compiled again after the order is made.",
            )
        return batches, examples

    def _observe_unit(self, batch: Gradients, examples: int) -> None:
        """One row that is a whole unit's gradient already."""
        slots = np.unique(self._next_slots(examples))
        self._check_unit(slots, examples)
        shrinking(partial(self._take_units, batch, slots))
        self._taken += examples
        self._touched = True

    def _check_unit(self, slots: Indices, examples: int) -> None:
        """A micro-batch must be one unit, whole."""
        if len(slots) != 1 or examples != self._sizes(slots)[0]:
            raise StepError(
                f"a micro-batch of {examples} examples",
                expected=f"units of group={self.group} examples, one to a backward and a step()",
                remedy="Set batch_size and group to the same number, and call step() after every backward.",
            )

    def skip(self, count: int) -> None:
        waits = self._source is not None and self._source.drop(count)
        if self._together is not None:
            before = self._local_batches if waits else list[Local]
            self._together.step(lambda: [*before(), Local(count, None)])
            return
        if waits:
            self.step()  # batches before this one, whose gradients wait: they come first
        slots = self._next_slots(count)
        super().skip(count)
        self._pass_over(slots)

    def _pass_over(self, slots: Indices) -> None:
        self._places[slots] = ASIDE

    def _check_dim(self, dim: int) -> None:
        if self._dim is not None and dim != self._dim:
            raise GradientError(
                f"gradients of length {dim}",
                expected=f"length {self._dim}, as before",
                remedy="Pass the same parameters, in the same order, every time.",
            )

    def _like(self) -> Tensor:
        """Of the dtype and on the device of the model's gradients."""
        return self._source._like if isinstance(self._source, ExactSource) else torch.empty(0)

    def _device(self) -> torch.device:
        return self._like().device

    def _averaged_sum(self, out: Tensor, ranks: int) -> bool:
        """``out`` = the sum over all ranks of the last batch's gradients, from p.grad; False if that is not there."""
        return isinstance(self._source, ExactSource) and self._source.sum_left(out, ranks)

    def observe(self, grads: Any, indices: Any = None) -> None:
        if self._together is not None:
            if indices is not None:
                raise InputError(
                    "indices on an order that is coordinated over ranks",
                    expected="each rank to observe its examples in the order in which it drew them",
                    remedy="Leave indices out.",
                )
            self._together.step(lambda: [Local(batch.size, batch) for batch in [as_gradients(grads)]])
            return
        batch = as_gradients(grads)
        self._check_dim(batch.dim)
        if batch.size == 0:
            return
        slots = self._slots(batch.size, indices)
        shrinking(partial(self._take, batch, slots))
        self._dim = batch.dim
        self._taken += batch.size if indices is None else 0
        self._out_of_turn |= indices is not None
        self._touched = True

    def detach(self) -> None:
        if self._source is not None:
            self._source.detach()
            self._source = None
            self._detached = True

    # --- for subclasses ---------------------------------------------------------------------------

    @abstractmethod
    def _take(self, batch: Gradients, slots: Indices) -> None:
        """Learn from gradients of examples in these slots (places in this epoch's arrangement)."""

    @abstractmethod
    def _take_units(self, batch: Gradients, slots: Indices) -> None:
        """The same where each row is a whole unit's gradient."""

    def _slots(self, count: int, indices: Any) -> Indices:
        """The slot of each row: the next drawn ones, or those of the examples named."""
        if indices is None:
            return self._next_slots(count)
        given = np.asarray(indices)
        if given.shape != (count,) or given.dtype.kind not in "iu":
            raise InputError(
                f"indices of shape {given.shape} and dtype {given.dtype}",
                expected=f"one integer for each of the {count} gradients",
                remedy="Pass the dataset index of each row.",
            )
        if self.group > 1:
            raise InputError(
                f"indices with group={self.group}",
                expected="units to come in the order drawn",
                remedy="Leave indices out and observe batches in the order in which they are drawn.",
            )
        if len(given) and (given.min() < 0 or given.max() >= self.n or len(np.unique(given)) < len(given)):
            raise InputError(
                "an index out of range or named twice",
                expected=f"different indices in range({self.n})",
                remedy="Pass the dataset index of each row.",
            )
        slots = np.take(self._slot_of(), given)
        late = slots >= self._drawn
        if late.any() or (self._places[slots] != UNSEEN).any():
            raise StepError(
                f"example {int(given[late | (self._places[slots] != UNSEEN)][0])}",
                expected="examples that were drawn in this epoch and not yet observed",
                remedy="Draw from order.sampler and observe each example once an epoch.",
            )
        return slots

    def _next_slots(self, count: int) -> Indices:
        if self._out_of_turn:
            waiting = np.flatnonzero(self._places[: self._drawn] == UNSEEN)
            if count > len(waiting):
                self._check_drawn(self._drawn + count)
            return waiting[:count]
        self._check_drawn(count)
        positions = np.arange(self._taken, self._taken + count)
        return positions if self.group == 1 else self._slots_at(positions)

    def _settled(self, arrangement: Indices) -> Indices:
        """A micro-batch is a unit, and a loader makes its short batch last: so the short unit stays last."""
        if not self._whole_units or self.n % self.group == 0:
            return arrangement
        last = self._units - 1
        return np.append(arrangement[arrangement != last], last)

    def _sizes(self, slots: Indices) -> Indices:
        """How many examples the unit in each slot has; the last unit may be smaller."""
        return np.where(
            self._arrangement[slots] == self._units - 1, self.n - (self._units - 1) * self.group, self.group
        )

    def _slots_at(self, positions: Indices) -> Indices:
        """The slot of each position of this epoch: all are ``group`` long but the last unit's, wherever that is."""
        missing = self._units * self.group - self.n
        if not missing:
            return positions // self.group
        if self._short[0] is not self._arrangement:  # looked for once an epoch, not once a batch
            self._short = self._arrangement, int(np.flatnonzero(self._arrangement == self._units - 1)[0])
        behind = positions >= (self._short[1] + 1) * self.group - missing
        slots: Indices = (positions + missing * behind) // self.group
        return slots

    def _slot_of(self) -> Indices:
        slot_of = np.empty(self.n, dtype=np.int64)
        slot_of[self._expand(self._arrangement)] = np.arange(self.n)
        return slot_of

    def _put_aside(self, slots: NDArray[np.int64], count: int) -> None:
        """These units' gradients are not finite: they keep a place in the middle of the next epoch."""
        self._places[slots] = ASIDE
        self._set_aside += count
        self._warn_once(
            "set aside",
            f"{count} example(s) with a gradient that is not finite were set aside for epoch {self._epoch}: they "
            "are visited as before but have no say in the next order. order.set_aside counts them; check the "
            "loss and the learning rate if it grows.",
        )

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, OrdainWarning, stacklevel=4)

    def _is_over(self) -> bool:
        if not self._touched and self._drawn == self.n:
            self._warn_once(
                "no step",
                f"{type(self).__name__}: a whole pass was drawn and nothing observed, so the order stays as it is. "
                "Call order.step() after each loss.backward(). (Harmless if that pass was an evaluation.)",
            )
        return self._touched

    def _begin_pass(self) -> tuple[int, Indices, int]:
        if self._source is not None:
            self._source.drop()  # gradients that no step() took belong to draws that are over
        return super()._begin_pass()

    def _advance(self) -> None:
        super()._advance()
        self._places[:] = UNSEEN
        self._out_of_turn = False

    def _known_progress(self) -> int | None:
        if not self._out_of_turn:
            return super()._known_progress()
        seen = self._places != UNSEEN
        return int(seen.sum()) if seen[: seen.sum()].all() else None

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self, *, vectors: bool = True, history: bool = True) -> State:
        # An arrangement is replaced and never changed, so that states may share it.
        origin, first = (self._origin, self._origin_arrangement) if history else (self._epoch, self._arrangement)
        return super().state_dict(vectors=vectors, history=history) | {
            "arrangement": torch.from_numpy(self._arrangement),
            "places": torch.from_numpy(self._places.copy()),
            "out_of_turn": self._out_of_turn,
            "set_aside": self._set_aside,
            "dim": self._dim,
            "origin": origin,
            "origin_arrangement": torch.from_numpy(first),
        }

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        check_permutation(state, "arrangement", self._units)
        check_permutation(state, "origin_arrangement", self._units)
        check_count(state, "origin", state["epoch"])
        check_count(state, "set_aside")
        if len(state["places"]) != self._units or not np.isin(state["places"].cpu().numpy(), _PLACES).all():
            raise broken("places", f"{len(state['places'])} numbers", f"{self._units} places of units")
        if state["dim"] is not None and (type(state["dim"]) is not int or state["dim"] < 1):
            raise broken("dim", repr(state["dim"]), "the length of a gradient")
        if self._dim is not None and state["dim"] not in (None, self._dim):
            raise StateError(
                f"a state for gradients of length {state['dim']}",
                expected=f"length {self._dim}",
                remedy="Load it into the model it was saved with.",
            )

    def _load(self, state: State) -> None:
        super()._load(state)
        self._arrangement = array(state["arrangement"])
        self._places = array(state["places"])
        self._out_of_turn, self._set_aside = state["out_of_turn"], state["set_aside"]
        self._dim = state["dim"] if self._source is None else self._source.dim
        self._origin, self._origin_arrangement = state["origin"], array(state["origin_arrangement"])
        if self._together is not None:
            self._together.loaded()

    def _marks(self) -> list[Indices]:
        """By what two states of the same epoch are told apart."""
        return [self._places.astype(np.int64)]

    def _check_epoch(self, epoch: int) -> None:
        """A learned order is known up to the epoch being visited."""
        if not self._origin <= epoch <= self._epoch:
            raise InputError(
                f"epoch {epoch}",
                expected=f"an epoch from {self._origin} to {self._epoch}, the one being visited",
                remedy="Later orders are not known yet; earlier ones were left out by state_dict(history=False).",
            )
