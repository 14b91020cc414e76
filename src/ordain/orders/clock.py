"""How much time an order takes of an epoch."""

from __future__ import annotations


class Clock:
    """Adds up the time of ``step()`` in an epoch, next to that of the whole epoch."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A new epoch begins."""
        self._own = 0.0
        self._first: float | None = None  # the end of the first step, in which code may be compiled
        self._last = 0.0

    def stepped(self, start: float, end: float) -> None:
        """A step took from ``start`` to ``end``, in seconds."""
        if self._first is None:
            self._first = end
        else:
            self._own += end - start
        self._last = end

    def cost(self, rounds: float) -> float | None:
        """The order's time, with ``rounds`` seconds at the end, over that of everything else; None before two steps.

        >>> clock = Clock()
        >>> clock.stepped(0.0, 1.0)
        >>> clock.stepped(9.0, 11.0)
        >>> clock.cost(2.0)
        0.5
        """
        rest = 0.0 if self._first is None else self._last - self._first - self._own
        return (self._own + rounds) / rest if rest > 0 else None
