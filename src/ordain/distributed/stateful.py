"""Orders for torch.distributed.checkpoint, which loads in place: an order's state as one run of bytes.

A fresh order's state has other entries and shapes than one in mid-epoch, so that nothing could be loaded into it
entry by entry.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from ordain.errors import StateError
from ordain.orders import Order


class Stateful:
    """An adapter to save and load an order with torch.distributed.checkpoint: ``ordain.distributed.stateful``.

    Write ``dcp.save({"order": stateful(order)}, ...)`` and ``dcp.load({"order": stateful(order)}, ...)``.
    Then call ``order.resume()`` on every rank, as after any other load.

    >>> import ordain
    >>> order, other = ordain.GraB(None, 4), ordain.GraB(None, 4)
    >>> order.observe(torch.eye(4)[list(order.sampler)][:2])
    >>> stateful(other).load_state_dict(stateful(order).state_dict())
    >>> other.resume(), next(iter(other.sampler)) == int(order.history(0)[2])
    (0, True)
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        # All ranks have the same state, of which one copy is written, unless each has an order of its own.
        rank = order.state_dict(vectors=False, history=False).get("rank")
        self._name = "state" if rank is None else f"state of rank {rank}"

    def state_dict(self) -> dict[str, Any]:
        """One entry, of bytes."""
        file = io.BytesIO()
        torch.save(self._order.state_dict(), file)
        return {self._name: file.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state. A state of another order is refused, and nothing changes. Never runs code from it."""
        data = state_dict.get(self._name)
        try:
            if not isinstance(data, bytes):
                raise ValueError(f"{type(data).__name__} for {self._name!r}")
            state = torch.load(io.BytesIO(data), map_location=self._order.device, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
            raise StateError(
                f"a state of an order that cannot be read ({str(error).partition(chr(10))[0][:120]})",
                expected="what ordain.distributed.stateful(order).state_dict() returned",
                remedy="Save and load with torch.distributed.checkpoint and the same adapter.",
            ) from error
        self._order.load_state_dict(state)


stateful = Stateful  # what it is called where it is used, like a function
