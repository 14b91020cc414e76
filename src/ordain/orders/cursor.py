"""What was drawn, what was observed, which pass is live: all that a sampler talks to.

Loaders draw ahead of time, so draws and observations are counted apart. The next epoch's order is adopted at its
first draw: not at exhaustion (prefetching exhausts early) and not when an iterator is made.
"""

from __future__ import annotations

from collections.abc import Callable

from ordain._loaders import Handed
from ordain.errors import InputError, StateError, StepError
from ordain.orders.saved_state import State, check_count
from ordain.orders.units import Indices
from ordain.orders.view import View

_PASSED_OVER = (
    "Call order.skip(len(x)) for a batch that you skip (`continue` on a bad loss), and order.resume() instead of "
    "skipping the first batches of a resumed epoch. If collate_fn or a batch sampler drops or sorts examples, "
    "have the dataset return each one's index and call order.step(indices=...). If the batch size was misread, pass "
    "batch_dim=."
)
_MOST_EPOCHS = 10**7  # of a saved state: its log is counted epoch by epoch


class Cursor:
    """Where an epoch stands.

    Args:
        view: which part of an epoch this process visits.
        indices: called when a pass begins: the examples of the present epoch, in order.
        advance: adopts the order of the next epoch, whose number it is given.
        observed: how many examples of the epoch were observed, from the front, where indices said which; None if that
            cannot be told. None itself for an order that does not learn.
        warn: called with a topic, which is warned of once, and a message.

    Attributes:
        epoch: the epoch being visited.
        taken: how many of the drawn examples, from the front, have been observed; if uncounted, how many the loader had
            handed out at the last step, and 0 if that cannot be told.
        touched: whether anything of this epoch has been observed.
        uncounted: whether some of it was in a step() that does not know how large its batch was.
        ticket: names the live pass.
        out_of_turn: whether observations of this epoch have named their examples.
        resuming: whether the next pass continues an epoch.
    """

    def __init__(
        self,
        view: View,
        *,
        indices: Callable[[], Indices],
        advance: Callable[[int], None],
        observed: Callable[[], int | None] | None,
        warn: Callable[[str, str], None],
    ) -> None:
        self.view, self._indices, self._advance, self._observed, self._warn = view, indices, advance, observed, warn
        self.epoch = self.taken = self.ticket = 0
        self.touched = self.uncounted = self.out_of_turn = False
        self.resuming = False
        self._out_of_order = False  # may batches of the live pass arrive in another order than drawn?
        self._stepped = False  # has step() or observe() ever been called? Orders that do not learn need neither
        self._peeked = False
        self._handed: Handed | None = None  # by the loader of the live pass
        self._ahead: int | None = None  # batches that the loop had, at its first step, beyond those observed
        self._begun = 0  # what was taken when the live pass began
        self._behind: int | None = None  # examples that it had, at its last step, beyond those observed
        self._set_drawn(0)

    @property
    def length(self) -> int:
        return self.view.length

    @property
    def examples(self) -> int:
        return self.view.examples

    @property
    def shared(self) -> bool:
        return self.view.ranks > 1

    @property
    def drawn(self) -> int:
        """How many of the epoch's examples have been drawn."""
        if not self.view.ranks:
            return self.position
        return self._drawn if self.position == self._drawn_at else self.view.covered(self.position)

    def _set_drawn(self, drawn: int) -> None:
        self._drawn = drawn
        self.position = self._drawn_at = self.view.own(drawn)  # position: this process's own draws

    # --- for the sampler --------------------------------------------------------------------------

    def begin(self, *, out_of_order: bool, handed: Handed | None) -> tuple[int, Indices, int]:
        self.view.check_draw()
        if self.resuming:
            self.resuming = False
        elif self.drawn or self.touched:
            if self._is_over():
                self.advance()
            self.rewind()
        self.ticket += 1
        self._out_of_order, self._handed = out_of_order, handed
        self._ahead = self._behind = None
        self._begun = self.taken
        return self.ticket, self.view.indices(self._indices()), self.view.own(self.drawn)

    def advance(self) -> None:
        """Adopt the next epoch's order."""
        self._report()
        self._advance(self.epoch + 1)
        self.epoch += 1
        self.touched = self.out_of_turn = False

    def rewind(self) -> None:
        """Nothing of the epoch is drawn."""
        self._set_drawn(0)
        self.taken = 0
        self.uncounted = False

    def abandon(self) -> None:
        """End the live pass as if it had never been; the epoch stays."""
        self._report()
        self.rewind()
        self.touched = False
        self.ticket += 1

    def _report(self) -> None:
        """Say how many examples of a pass that was drawn to its end were handed out and not observed."""
        if self._observed is None or self._handed is None or self.out_of_turn:
            return
        if self.taken == self._begun or self.position < self.length:  # nothing was observed; or it was left early
            return
        missing = self._behind
        if missing is None:  # the loader was gone at the last step, and may have dropped a short last batch
            missing = self.position - self.view.own(self.taken)
            missing = missing if missing >= self._handed.batch else 0
        if missing > 0:
            self._warn(
                "lost",
                f"{missing} examples of epoch {self.epoch} were drawn by the loader but not observed, so later "
                "gradients were attributed to the wrong examples. (Harmless if you left the pass early on purpose.) "
                f"{_PASSED_OVER}",
            )

    def _is_over(self) -> bool:
        """Does a second pass begin the next epoch, or was the first only a look at the data?"""
        learns = self._observed is not None
        if learns and not self.touched and self.drawn == self.view.n:
            self._warn(
                "no step",
                f"no gradients were observed in epoch {self.epoch}, so its order is repeated. Call order.step() after "
                "each loss.backward(). (Harmless if that pass was an evaluation.)",
            )
        if self.touched or learns or self._stepped:
            return self.touched
        look = self._is_look()
        self._peeked = True
        return not look

    def _is_look(self) -> bool:
        # Nobody calls step(). A first incomplete pass is taken for a look at the data; later ones
        # cannot be told from epochs that were cut short, and an order must not repeat forever.
        return self.epoch == 0 and self.drawn < self.view.n and not self._peeked

    def go_on(self, epoch: int, drawn: int) -> None:
        known, drawn = self.progress(), self.view.covered(drawn)
        # The last, short batch that a loader drops is drawn and never observed.
        if epoch != self.epoch or (known is not None and drawn not in (known, self.view.n)):
            stands = "" if known is None else f" with {known} examples observed"
            raise StateError(
                f"a loader's state in epoch {epoch} with {drawn} examples drawn",
                expected=f"epoch {self.epoch}{stands}, as in the order's state",
                remedy="Load the order's state first; save both after the same step(), with snapshot_every_n_steps=1. "
                "Or leave the loader's state out and call order.resume().",
            )
        self.resume(drawn)

    # --- for the order ----------------------------------------------------------------------------

    def progress(self) -> int | None:
        """How many of this epoch's examples are done, from the front; None if that cannot be known."""
        if self.out_of_turn and self._observed is not None:
            return self._observed()
        return None if self.uncounted else self.taken

    def check_drawn(self, count: int, waiting: int | None = None) -> None:
        """Raise unless so many drawn examples wait to be observed, and arrive in the order drawn."""
        if self._out_of_order:
            raise StepError(
                "examples to be taken in the order drawn, from a loader with in_order=False",
                expected="batches that arrive in the order in which they were drawn",
                remedy="Leave in_order=False out, or have the dataset return each example's index and call "
                "step(indices=...) or observe(grads, indices=...).",
            )
        waiting = self.drawn - self.taken if waiting is None else waiting
        if count > waiting:
            raise StepError(
                f"{count} examples to observe, but only {waiting} drawn and not yet observed",
                expected="each drawn example to be observed once",
                remedy="Draw batches from order.sampler and run the model once on each: a model called twice before a "
                "backward counts twice (run forwards that should not count inside order.ignore()), and so do two views "
                "of a batch that are joined (torch.cat([x, x])) outside the model's forward. Or pass indices=.",
            )

    def compare_with_loader(self, count: int, *, skipped: bool = False) -> None:
        """Raise if the loop has gone past a batch without observing it, before so many more of its own are observed.

        A loop may hold batches back from its first step on, all that a chunk or a framework reads ahead. One that later
        holds more has passed a batch over, and would take its gradients for those of other examples. If the next
        examples are ``skipped``, that is nothing to raise for.
        """
        handed = self._handed
        if handed is None:
            return
        after = handed.after(self.view.own(self.taken) + count)
        if handed.reads_ahead and not (skipped or self.out_of_turn):
            self._warn(
                "reads ahead",
                "the loader's batch sampler draws the examples of several batches at once. If it sorts or drops them, "
                "gradients are taken for those of other examples: have the dataset return each one's index and call "
                "order.step(indices=...).",
            )
        if after is None:
            self._behind = None
            return
        batches, examples, drawn = after
        # A loop that reads ahead may be left while it holds batches: only at the end are they known to be lost.
        self._behind = examples if drawn < handed.batch else 0
        if skipped or self.out_of_turn:
            return
        if self._ahead is None:
            self._ahead = batches
        elif batches > self._ahead:
            raise StepError(
                f"{count} examples to observe, {examples} fewer than the loader has handed out",
                expected="each batch of the loader to be observed before the next",
                remedy=_PASSED_OVER,
            )

    def handed_more_than(self, batches: int) -> bool:
        """Has the loop had more batches since the last step than these, and those that it reads ahead?"""
        after = None if self._handed is None else self._handed.after(self.view.own(self.taken))
        return after is not None and after[0] + (self.taken == self._begun) > batches + (self._ahead or 0)

    def take(self, count: int, *, named: bool = False) -> None:
        """``count`` examples have been observed or passed over: the next ones, or some that were named."""
        self.touched = self.touched or count > 0
        self.out_of_turn = self.out_of_turn or named
        self.taken += 0 if named else count

    def step_uncounted(self) -> None:
        """A step of a batch of unknown size, in an epoch that is not learned from."""
        self._step()
        self.uncounted = True
        own = self.view.own(self.taken)
        after = None if self._handed is None or self._out_of_order else self._handed.after(own)
        # One batch handed out since the last step is the batch of this step. Of several, the loop may have read some
        # ahead, or taken one step for all: nobody knows, and the loader is not asked again in this pass.
        if after is None or after[0] + (self.taken == self._begun) > 1:
            self._handed, self.taken = None, 0
        else:
            self.taken = self.view.covered(own + after[1])
        self._behind = 0

    def step_counted(self, size: int) -> None:
        """The same for a batch of ``size`` examples of each process."""
        self._step()
        if self._handed is not None or not self.uncounted:
            self.taken += min(self.view.covered(size), self.drawn - self.taken)
        self._behind = 0

    def _step(self) -> None:
        if not self.drawn:
            raise StepError(
                "step() before anything was drawn",
                expected="a batch from order.sampler first",
                remedy="Pass sampler=order.sampler to the DataLoader.",
            )
        self.touched = self._stepped = True

    def resume(self, done: int | None) -> int:
        """The next pass continues after ``done`` examples; returns the epoch that it visits."""
        if done is None:
            done = self.taken or None if self.uncounted else self.progress()
        if done is None:
            raise StateError(
                "resume() of an order that cannot tell how much of its epoch is done (it looks at no gradients in this "
                "epoch and the loader does not tell, or gradients were observed out of order)",
                expected="the number of examples already visited",
                remedy="Pass resume(steps_done * batch_size), or load the state of a StatefulDataLoader.",
            )
        n = self.view.n
        if not isinstance(done, int) or not 0 <= done <= n:
            raise InputError(
                f"done={done!r}",
                expected=f"how many of the epoch's {n} examples were visited",
                remedy="Pass steps_done * batch_size.",
            )
        self._set_drawn(done)
        self.taken, self.uncounted = done, False
        over = done == n or self.view.own(done) == self.view.length  # the rest belongs to no process: it was dropped
        # A finished epoch has nothing left to visit: its last state leads to the next epoch.
        self.resuming, self.touched = not over, done > 0 or over
        return self.epoch + over

    # --- saving -----------------------------------------------------------------------------------

    def save(self) -> State:
        """Numbers; what was drawn ahead is drawn again."""
        state: State = {
            "epoch": self.epoch,
            "taken": self.taken,
            "touched": self.touched,
            "uncounted": self.uncounted,
        }
        if self._observed is not None:
            return state | {"out_of_turn": self.out_of_turn}
        if self.drawn > 0 and not self._stepped:  # nobody calls step(): the position is all there is
            state |= {"taken": 0, "touched": self.touched or not self._is_look(), "uncounted": True, "peeked": True}
        return {"peeked": self._peeked, **state, "driven": self._stepped}

    def check(self, state: State) -> None:
        """Raise if no cursor can have saved this."""
        check_count(state, "epoch", _MOST_EPOCHS)
        check_count(state, "taken", self.view.n)

    def load(self, state: State) -> None:
        """Go back to a state that has passed :meth:`check`."""
        self.epoch, self.taken = state["epoch"], state["taken"]
        self.touched, self.uncounted = state["touched"], state["uncounted"]
        self.out_of_turn = state.get("out_of_turn", False)
        self._stepped, self._peeked = state.get("driven", False), state.get("peeked", False)
        self._set_drawn(self.taken)
        self.resuming, self._handed = False, None
        self.ticket += 1
