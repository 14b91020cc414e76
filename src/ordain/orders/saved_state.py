"""Saved states of orders: what they look like, checked before anything changes, and older ones converted."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ordain.balancing.state import broken, described, is_plain
from ordain.errors import StateError

STATE_VERSION = 3
State = dict[str, Any]
_OPTIONAL = ("diagonal", "dim", "given_dim", "stored", "vectors")  # fields that are None until something was seen


def converted(state: Any) -> Any:
    """A state of an earlier version as one of this; any other as it is. The state that came is not changed."""
    for version, convert in ((1, _from_1), (2, _from_2)):
        if isinstance(state, dict) and type(state.get("version")) is int and state["version"] == version:
            try:
                state = convert(state)
            except Exception as error:  # whatever is wrong with it, which may be anything
                raise broken("version", f"{version}", f"the fields of a state of version {version}") from error
    return state


def _from_1(state: State) -> State:
    state = state | {"version": 2, "touched": state.get("taken", 0) > 0, "uncounted": False}
    if "arrangement" in state:
        state["touched"] |= bool((state["places"] != 0).any())
        state |= {"origin": 0, "origin_arrangement": torch.empty(0, dtype=torch.int64)}
    else:
        state |= {"driven": False, "peeked": False}
    if "permutation" in state:
        state["permutation"] = digest(np.array(state["permutation"], dtype=np.int64))
    return state


def _from_2(state: State) -> State:
    # Version 2 could hold batches that were still to be learned from ("gathered"): their units go in the middle.
    kept = {name: value for name, value in state.items() if name not in ("freeze_after", "gathered")}
    if "arrangement" in state:
        learned = state.get("freeze_after")
        kept["learn"] = "Always()" if learned is None else f"Until(epochs={learned})"
    return kept | {"version": 3}


def digest(permutation: NDArray[np.int64]) -> str:
    """A permutation's name, short enough to be saved with every state and shown in a message."""
    return hashlib.sha256(permutation.astype("<i8").tobytes()).hexdigest()[:16]


def check_identity(state: Any, mine: Mapping[str, Any]) -> None:
    """The state must be of this version and of an order with the same arguments."""
    for name, value in {"version": STATE_VERSION, **mine}.items():
        saved = state.get(name) if isinstance(state, dict) else type(state).__name__
        if not isinstance(state, dict) or type(saved) is not type(value) or saved != value:
            raise StateError(
                f"a state with {name}={described(saved)}",
                expected=f"{name}={value!r}",
                remedy="Create the order with the same arguments as the saved one.",
            )


def check_model(state: State, parameters: list[str], dtype: torch.dtype) -> None:
    """The state must be of a model with these parameters (if it says), and of gradients of this dtype."""
    saved = state.get("parameters", parameters)
    if type(saved) is not list or not all(type(one) is str for one in saved):
        raise broken("parameters", described(saved), "a list of names")
    for one, mine in zip_longest(saved, parameters):
        if one != mine:
            raise StateError(
                f"a state of another model, with parameter {one!r}",
                expected=repr(mine),
                remedy="Load it into an order over the model it was saved with, and with the same params=.",
            )
    stored = state.get("stored")
    vectors = stored if stored is not None else (state.get("vectors") or {}).get("table")
    if vectors is None:
        return
    came = state.get("dtype", str(dtype))
    if stored is not None or vectors.dtype.itemsize < dtype.itemsize:  # sums may be wider than the gradients
        came = str(vectors.dtype)
    if type(came) is not str or came != str(dtype):
        raise StateError(
            f"a state with vectors of gradients of {described(came)}",
            expected=f"{dtype}, as those of the model are",
            remedy="Convert the model first, then create the order; or load state_dict(vectors=False).",
        )


def check_fields(state: State, like: State) -> None:
    """Each field must be there and of the kind that ``like``, a state of the order that loads, has.

    Tensors must agree in dtype and, except for the first dimension, in shape.
    """
    missing = sorted(like.keys() - state.keys())
    if missing:
        raise StateError(
            f"a state without {', '.join(missing)}",
            expected="every entry that state_dict() returns",
            remedy="Save and load the complete state.",
        )
    for name, mine in like.items():
        value = state[name]
        if mine is None or (value is None and name in _OPTIONAL):
            continue
        good = type(value) is type(mine)
        if good and isinstance(mine, torch.Tensor):
            good = value.dtype == mine.dtype and value.ndim == mine.ndim and value.shape[1:] == mine.shape[1:]
            good &= is_plain(value)
        if not good:
            raise broken(name, described(value), described(mine))


def check_count(state: State, name: str, most: int | None = None) -> None:
    """The field must be a number from 0 to ``most``."""
    if state[name] < 0 or (most is not None and state[name] > most):
        raise broken(name, described(state[name]), "a number >= 0" if most is None else f"a number from 0 to {most}")


def check_permutation(state: State, name: str, n: int) -> None:
    """The field, or each row of it, must be a permutation of ``range(n)``."""
    if state[name].shape[-1] != n or not (np.sort(state[name].cpu().numpy(), axis=-1) == np.arange(n)).all():
        raise broken(name, described(state[name]), f"a permutation of range({n})")


def array(tensor: torch.Tensor) -> NDArray[Any]:
    """A copy of a tensor of a state, as an array."""
    copied: NDArray[Any] = tensor.cpu().numpy().copy()
    return copied
