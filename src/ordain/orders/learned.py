"""Orders that look at gradients: where they get them from, and which example each belongs to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from ordain.distributed.exchange import Local
from ordain.distributed.ranks import heard
from ordain.distributed.share import Share, check_agreement
from ordain.distributed.together import Company, Together
from ordain.errors import GradientError, InputError, StateError, StepError
from ordain.gradients import ExactSource, FuncSource, Gradients, MicrobatchSource, Sketch, Source, as_gradients
from ordain.gradients.context import undisturbed
from ordain.gradients.memory import shrinking
from ordain.gradients.sharded import refuse_sharded, refuse_wrapped
from ordain.orders.base import Indices
from ordain.orders.placed import PlacedOrder
from ordain.orders.state import State, broken

_SOURCES: dict[str, Callable[..., Source]] = {
    "exact": ExactSource,
    "func": FuncSource,
    "microbatch": MicrobatchSource,
}


class LearnedOrder(PlacedOrder):
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
        sketch: order by random sketches of this many numbers instead of the gradients: O(sketch) memory, not O(d).
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
        sketch: int | None = None,
        seed: int = 0,
        distributed: Any = "auto",
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise InputError(
                f"a model of type {type(model).__name__}",
                expected="a torch.nn.Module first, then n",
                remedy=f"Write {type(self).__name__}(model, len(dataset)).",
            )
        whole = gradients == "microbatch" and model is not None
        super().__init__(n, group=group, seed=seed, distributed=distributed, whole_units=whole)
        self._averaged = isinstance(model, DistributedDataParallel)  # does the backward average p.grad over ranks?
        if isinstance(model, DistributedDataParallel):
            model = model.module
        self._sketch = None if sketch is None else Sketch(sketch, seed=seed)
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
        self._dim: int | None = sketch  # the length of what is ordered by
        self._given_dim: int | None = None  # the length of the gradients that come
        # Parameters lie differently in gradients that come another way, and so do their sketches.
        self._sketched_from = "observe" if model is None else gradients
        self._source: Source | None = None
        self._detached = False
        if model is not None:
            with nullcontext() if self._share is None else heard(self._share.ranks):
                if gradients != "exact":
                    refuse_sharded(model, gradients)
                build = _SOURCES[gradients]
                self._source = build(model, params=params, loss_reduction=loss_reduction, batch_dim=batch_dim)
            self._given_dim = self._source.dim
            self._dim = self._source.dim if sketch is None else sketch
            if sketch is not None and isinstance(self._source, ExactSource):
                self._source.forget_sums()
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
        with undisturbed():
            self._step()

    def _step(self) -> None:
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
            self._observe(batch, None)

    def _local_batches(self) -> list[Local]:
        batches, examples = self._collected()
        if examples is not None:
            return [self._local(batches[0], examples)] if examples else []
        return [self._local(batch, batch.size) for batch in batches]

    def _local(self, batch: Gradients, size: int) -> Local:
        """What this rank brings to a step of all."""
        self._check_dim(batch.dim)
        sketched = shrinking(lambda: self._sketched(batch))
        self._given_dim = batch.dim
        return Local(size, sketched)

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
        shrinking(lambda: self._take_units(self._sketched(batch), slots))
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

    def _check_dim(self, dim: int) -> None:
        if self._given_dim is not None and dim != self._given_dim:
            raise GradientError(
                f"gradients of length {dim}",
                expected=f"length {self._given_dim}, as before",
                remedy="Pass the same parameters, in the same order, every time.",
            )

    def _like(self) -> Tensor:
        """Of the dtype and on the device of the model's gradients."""
        return self._source._like if isinstance(self._source, ExactSource) else torch.empty(0)

    def _device(self) -> torch.device:
        return self._like().device

    def _averaged_sum(self, out: Tensor, ranks: int) -> bool:
        """``out`` = the sum over all ranks of the last batch's gradients, from p.grad; False if that is not there."""
        whole = self._sketch is None and isinstance(self._source, ExactSource)
        return whole and self._source.sum_left(out, ranks)  # type: ignore[union-attr]

    def observe(self, grads: Any, indices: Any = None) -> None:
        with undisturbed():
            self._observe(grads, indices)

    def _observe(self, grads: Any, indices: Any) -> None:
        if self._together is not None:
            if indices is not None:
                raise InputError(
                    "indices on an order that is coordinated over ranks",
                    expected="each rank to observe its examples in the order in which it drew them",
                    remedy="Leave indices out.",
                )
            self._together.step(lambda: [self._local(batch, batch.size) for batch in [as_gradients(grads)]])
            return
        batch = as_gradients(grads)
        self._check_dim(batch.dim)
        if batch.size == 0:
            return
        slots = self._slots(batch.size, indices)
        shrinking(lambda: self._take(self._sketched(batch), slots))
        self._given_dim = batch.dim
        self._dim = batch.dim if self._sketch is None else self._sketch.k
        self._taken += batch.size if indices is None else 0
        self._out_of_turn |= indices is not None
        self._touched = True

    def detach(self) -> None:
        if self._source is not None:
            self._source.detach()
            self._source = None
            self._detached = True

    def _sketched(self, batch: Gradients) -> Gradients:
        return batch if self._sketch is None else self._sketch(batch)

    # --- for subclasses ---------------------------------------------------------------------------

    @abstractmethod
    def _take(self, batch: Gradients, slots: Indices) -> None:
        """Learn from gradients of examples in these slots (places in this epoch's arrangement)."""

    @abstractmethod
    def _take_units(self, batch: Gradients, slots: Indices) -> None:
        """The same where each row is a whole unit's gradient."""

    def _begin_pass(self) -> tuple[int, Indices, int]:
        if self._source is not None:
            self._source.drop()  # gradients that no step() took belong to draws that are over
        return super()._begin_pass()

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self, *, vectors: bool = True, history: bool = True) -> State:
        return super().state_dict(vectors=vectors, history=history) | {
            "dim": self._dim,
            **({} if self._sketch is None else {"given_dim": self._given_dim}),
        }

    def load_state_dict(self, state: State) -> None:
        with undisturbed():
            super().load_state_dict(state)

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        if self._sketch is None and state.get("sketch") is not None:
            raise StateError(
                f"a state with sketch={state['sketch']!r}",
                expected="a state of an order without sketches",
                remedy="Build the order with the arguments it was saved under.",
            )
        given = None if self._sketch is None else state["given_dim"]
        if given is not None and (type(given) is not int or given < 1):
            raise broken("given_dim", repr(given), "the length of a gradient")
        if self._given_dim is not None and given not in (None, self._given_dim):
            raise self._other_length(given)
        if state["dim"] is not None and (type(state["dim"]) is not int or state["dim"] < 1):
            raise broken("dim", repr(state["dim"]), "the length of a gradient")
        if self._dim is not None and state["dim"] not in (None, self._dim):
            raise self._other_length(state["dim"])

    def _other_length(self, length: int) -> StateError:
        return StateError(
            f"a state for gradients of length {length}",
            expected=f"length {self._given_dim}",
            remedy="Load it into the model it was saved with.",
        )

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | (
            {} if self._sketch is None else {"sketch": f"{self._sketch.k} of {self._sketched_from}"}
        )

    def _load(self, state: State) -> None:
        super()._load(state)
        if self._source is None:
            self._dim = state["dim"]
            self._given_dim = state["dim"] if self._sketch is None else state["given_dim"]
        if self._together is not None:
            self._together.loaded()

    def _marks(self) -> list[Indices]:
        """By what two states of the same epoch are told apart."""
        return [self._places.astype(np.int64)]
