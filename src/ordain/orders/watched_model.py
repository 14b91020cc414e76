"""The model that an order takes gradients from, for as long as no other order watches it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ordain.errors import StepError
from ordain.gradients import Source
from ordain.gradients.sources import Claim, claim
from ordain.orders.saved_state import State, check_model

Facts = tuple[list[str], torch.dtype]  # names and shapes of the parameters, and the dtype of their gradients


class WatchedModel:
    """A source of gradients, or the lack of one.

    Args:
        order: the name of the order, for messages.

    Attributes:
        source: where gradients come from; None where they are observed, or no longer.
        claim: on the model; it is live until another order claims it.
        expected: the model of a state that was loaded before the parameters to order by were found; or of a model that
            is no longer watched.
    """

    def __init__(self, order: str) -> None:
        self._order = order
        self.source: Source | None = None
        self.expected: Facts | None = None
        self.claim: Claim | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._detached = False

    def attach(self, source: Source) -> None:
        """From now on gradients come from here."""
        self.source = source

    def keep(self, model: nn.Module) -> None:
        """No other order watches ``model`` from now on."""
        if self.source is not None:
            self.claim, self._model = claim(model, self.source), weakref.ref(model)

    def detach(self) -> None:
        """Leave the model exactly as it was found."""
        if self.source is not None:
            self.expected = self.facts
            self.source.detach()
            if self.claim is not None:
                self.claim.give_up()
            self.source = None
            self._detached = True

    def watch(self, *, learning: bool) -> None:
        """Watch the model in epochs that learn, and only in those."""
        if self.source is not None and self.claim is not None and self.claim.live:
            (self.source.attach if learning else self.source.detach)()

    def refusal(self) -> StepError:
        """The error for a step that cannot get gradients from here."""
        if self.source is None:
            return StepError(
                "step() after detach()" if self._detached else "step() on an order without a model",
                expected="a model to take gradients from",
                remedy=f"Write {self._order}(model, n), or call observe(grads).",
            )
        return StepError(
            "step() on an order whose model is now watched by another order",
            expected="one order per model",
            remedy="Step the order that was created last, with its own sampler; or continue this one with "
            f"new = {self._order}(model, n) and new.load_state_dict(this_order.state_dict()).",
        )

    def nothing_new(self) -> StepError:
        """The error for a step since the last of which no gradients have come."""
        model = None if self._model is None else self._model()
        if model is not None and not model.training:
            return StepError(
                "step() while the model is in eval() mode",
                expected="train() mode: passes in eval() mode do not count",
                remedy="Call model.train() before the first batch of each epoch.",
            )
        return StepError(
            "step() with no new gradients",
            expected="a forward in training mode and its backward since the last step()",
            remedy="Call order.step() after loss.backward(), once, and call the model itself. A model that "
            "torch.compile has run already must be compiled again after the order is created. A layer inside a "
            "reentrant checkpoint brings no gradients: pass use_reentrant=False. torch.autograd.grad counts if it is "
            "asked for all trained parameters, in a loop without backward(). For gradients of torch.func call "
            "observe().",
        )

    def drop(self, size: int | None = None) -> bool:
        """Forget what waits to be collected: see :meth:`~ordain.gradients.Source.drop`."""
        return self.source is not None and self.source.drop(size)

    def passes_waiting(self) -> int | None:
        """How many forwards wait to be collected; None if the source does not tell."""
        waiting: Callable[[], int] | None = getattr(self.source, "passes_waiting", None)
        return None if waiting is None else waiting()

    def ignore(self) -> AbstractContextManager[None]:
        """Forwards of the model in here do not count."""
        if self.source is None:
            return nullcontext()
        ignore: Callable[[], AbstractContextManager[None]] | None = getattr(self.source, "ignore", None)
        if ignore is None:
            raise StepError(
                f"ignore() with a source of type {type(self.source).__name__}",
                expected="a source with a method ignore(), a context manager",
                remedy="Write one, or call observe(grads) in place of step().",
            )
        return ignore()

    # --- what is saved and checked ----------------------------------------------------------------

    @property
    def facts(self) -> Facts | None:
        """None if there is no model, or nothing is known of it yet."""
        if self.source is None or not self.source.parameters:
            return self.expected
        return self.source.parameters, self.source.like.dtype

    def check_found(self) -> None:
        """Raise if the parameters that were found are not those of the state that was loaded."""
        if self.expected is not None:
            check_model({"parameters": self.expected[0]}, *(self.facts or self.expected))
            self.expected = None

    def save(self) -> State:
        """Names and dtype."""
        return {} if self.facts is None else {"parameters": list(self.facts[0]), "dtype": str(self.facts[1])}

    def check(self, state: State) -> None:
        """Raise if the state is of another model."""
        facts = self._facts_for(state)
        if facts is not None:
            check_model(state, *facts)

    def load(self, state: State) -> None:
        """Remember of what model a state was, if the parameters to order by are still to be found."""
        if self.source is not None and not self.source.parameters:
            self.expected = self._facts_for(state)

    def _facts_for(self, state: State) -> Facts | None:
        if self.facts is None and self.source is not None and state.get("parameters"):
            return state["parameters"], self.source.like.dtype
        return self.facts
