"""All that balancing keeps from batch to batch: the sums, what is pending, and counters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ordain.balancing.balancers import Balancer, compiled_rule
from ordain.errors import StateError

_SUMS = ("surplus", "mean_inner", "mean_square")  # the counters that are not whole numbers
# In the order in which they are saved.
_COUNTERS = ("past_failures", "signed", "summed", *_SUMS, "first_slot", "part_slot", "part_count")


class BalanceState:
    """The sums of a pass over ``count`` vectors.

    P is the sum of e_t g_t. Algorithm 4's s is P - E m with E the sum of the signs: kept apart, s costs no pass over
    memory for m. A *slot* is the caller's number for a unit.

    Args:
        balancer: decides the signs.
        paired: balance differences of consecutive units, instead of units less the last pass's mean.
        count: how many vectors a pass gives a sign to.
        seed: for balancers that draw random numbers.

    Attributes:
        table: ``[1, d]`` of P if paired, else ``[3, d]`` of P, the stale mean m and the sum that becomes the next m.
            None before the first batch.
        waiting: ``"first"``, the gradient of a unit without its partner; ``"part"``, the sum of an incomplete unit.
        rule: what the balancer keeps, see :meth:`Balancer.start`.
        signed: vectors given a sign in this pass.
        summed: units in this pass's mean.
        surplus: E.
        mean_inner: <P, m>.
        mean_square: |m|^2.
        first_slot: the unit in ``waiting["first"]``, or -1.
        part_slot: the unit in ``waiting["part"]``, or -1.
        part_count: how many of its examples are in it.
        compiled: the balancer's rule in the compiled loops, and its parameter; None: only its ``signs()`` may decide.
        changing: whether a batch is being added to the sums just now.
    """

    def __init__(self, balancer: Balancer, *, paired: bool, count: int, seed: int) -> None:
        self.balancer, self.paired, self.count, self.seed = balancer, paired, count, seed
        self.mean_square = 0.0
        self.past_failures = 0
        self._hold(None)
        self._begin()

    def _begin(self) -> None:
        """Start at zero; m and the failures so far stay."""
        self.rule = self.balancer.start()
        self.waiting: dict[str, Tensor] = {}
        self.signed = self.summed = 0
        self.surplus = self.mean_inner = 0.0
        self.first_slot = self.part_slot = -1
        self.part_count = 0
        self.changing = False

    @property
    def failures(self) -> int:
        """How many vectors the balancer failed on and Algorithm 5 decided instead, over all passes."""
        return int(self.past_failures + self.rule[1]) if len(self.rule) > 1 else self.past_failures

    def allocate(self, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The table; it is allocated at the first batch. A pass begins in the gradients' dtype: see :meth:`widen`."""
        if self.table is None:
            self._hold(torch.zeros(1 if self.paired else 3, dim, dtype=dtype, device=device))
        elif self.table.dtype is not dtype and not (self.signed or self.waiting):
            self._hold(self.table.to(dtype))
        assert self.table is not None  # noqa: S101
        return self.table

    def _hold(self, table: Tensor | None) -> None:
        self.table = table
        self._spare: Tensor | None = None
        d = 1 if table is None else table.shape[1]
        self.compiled = compiled_rule(self.balancer, n=self.count, d=d)

    def widen(self) -> None:
        """Hold the sums in float64 for the rest of the pass: they lose digits that signs depend on."""
        assert self.table is not None  # noqa: S101
        self.waiting = {name: vector.double() for name, vector in self.waiting.items()}
        self._hold(self.table.double())
        if not self.paired:
            self.mean_inner, self.mean_square = (self.table[:2] @ self.table[1]).cpu().tolist()

    def next_pass(self) -> None:
        """The pass is over: its mean becomes m (Alg. 4's m_{k+1}), and s starts at zero."""
        if self.table is not None:
            if self.summed:
                torch.div(self.table[2], self.summed, out=self.table[1])
                self.mean_square = float(self.table[1] @ self.table[1])
            self.table[0::2].zero_()
        self.past_failures = self.failures
        self._begin()

    def reset(self) -> list[int]:
        """A batch was partially accumulated: start from zero in mid-pass; m and random numbers go on.

        Returns the slot of an incomplete unit, which gets no sign now.
        """
        lost = [self.part_slot] if self.part_slot >= 0 else []
        if self.table is not None:
            self.table[0::2].zero_()
        signed, self.past_failures = self.signed, self.failures
        self._begin()
        self.signed = signed
        return lost

    def release(self) -> None:
        """Nothing will be balanced any more: free the vectors."""
        self.table, self._spare, self.waiting = None, None, {}

    def spare(self) -> Tensor:
        """``[d]``, a buffer for a unit that is going to wait: reused, as fresh memory costs a fault for every page."""
        assert self.table is not None  # noqa: S101
        if self._spare is None:
            self._spare = torch.empty_like(self.table[0])
        return self._spare

    def wait(self, first: Tensor, slot: int) -> None:
        """The unit in this slot has no partner yet."""
        self.waiting, self.first_slot = {"first": first}, int(slot)

    def drop_part(self) -> None:
        """The incomplete unit gets no sign: its sum is dropped."""
        self.waiting.pop("part", None)
        self.part_slot, self.part_count = -1, 0

    # --- saving -----------------------------------------------------------------------------------

    def save(self, *, vectors: bool = True) -> dict[str, Any]:
        """Tensors, numbers and strings; copies."""
        held = {} if self.table is None else {"table": self.table, **self.waiting}
        return {
            "vectors": {name: vector.clone() for name, vector in held.items()} if vectors else None,
            "balancer_state": self.rule.tolist(),
            "counters": [getattr(self, name) for name in _COUNTERS],
        }

    def check(self, saved: dict[str, Any], dim: int | None) -> None:
        """Raise StateError if no state of this kind can have been saved like this."""
        for name, length in {"balancer_state": len(self.rule), "counters": len(_COUNTERS)}.items():
            if len(saved[name]) != length or not all(_is_number(one) for one in saved[name]):
                raise broken(name, described(saved[name]), f"{length} numbers")
        counters = dict(zip(_COUNTERS, saved["counters"], strict=True))
        last = 2 * self.count if self.paired else self.count - 1
        limits = {"first_slot": last, "part_slot": last, "summed": 0 if self.paired else self.count}
        for name, value in counters.items():
            least = -1 if name.endswith("slot") else 0
            if name not in _SUMS and not (type(value) is int and least <= value <= limits.get(name, value)):
                raise broken("counters", f"{name}={value!r}", "numbers that balancing can have")
        found = saved["vectors"]
        if found is None:
            return
        shapes: dict[str, tuple[int | None, ...]] = {"table": (1 if self.paired else 3, dim)}
        shapes |= {name: (dim,) for name in ("first", "part") if counters[f"{name}_slot"] >= 0}
        if not isinstance(found, dict) or ((found or len(shapes) > 1) and found.keys() != shapes.keys()):
            raise broken("vectors", described(found), f"a dict of {', '.join(shapes)}")
        for name, shape in shapes.items() if found else ():
            check_vectors(name, found[name], shape, like=found["table"])

    def load(self, saved: dict[str, Any]) -> list[int]:
        """Go back to a state that :meth:`check` has passed. Returns what :meth:`reset` returns."""
        self._begin()
        self.rule = np.array(saved["balancer_state"], dtype=np.float64)
        for name, value in zip(_COUNTERS, saved["counters"], strict=True):
            setattr(self, name, value)
        if saved["vectors"] is None:  # m is lost too
            self.table, self.mean_square = None, 0.0
            return self.reset()
        held = {name: vector.clone() for name, vector in saved["vectors"].items()}
        self._hold(held.pop("table", None))
        self.waiting = held
        return []

    def marks(self) -> NDArray[np.int64]:
        """Numbers by which two states of the same pass can be told apart."""
        return np.array([self.signed, self.summed, self.table is not None, len(self.waiting)])


def check_vectors(name: str, vectors: Any, shape: tuple[int | None, ...], *, like: Tensor) -> None:
    """The field of a saved state must hold numbers of a gradient's dtype, of this shape, beside ``like``."""
    good = is_plain(vectors) and vectors.dtype in (torch.float32, torch.float64) and tuple(vectors.shape) == shape
    if not good or (vectors.dtype, vectors.device) != (like.dtype, like.device):
        raise broken(name, described(vectors), f"a contiguous tensor of float32 or float64 and shape {shape}")


def is_plain(value: Any) -> bool:
    """An ordinary tensor. Of others one number can be made to look like terabytes, or none like some."""
    plain = type(value) is Tensor and value.layout is torch.strided and value.device.type != "meta"
    return plain and value.is_contiguous() and not value.is_neg() and not value.requires_grad


def _is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 2**63)


def broken(name: str, came: str, expected: str) -> StateError:
    """The error for a field of a saved state that cannot have been saved."""
    return StateError(f"a state whose {name!r} is {came}", expected=expected, remedy="Load the state unchanged.")


def described(value: Any) -> str:
    """A value of a saved state, for messages: whatever it is, and in a few words."""
    if isinstance(value, Tensor):
        plain = "" if is_plain(value) else f" ({value.layout} on {value.device}, not an ordinary contiguous one)"
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}{plain}"
    if isinstance(value, str) or _is_number(value) or value is None or isinstance(value, bool):
        return repr(value)[:80]
    return f"a {type(value).__name__}"
