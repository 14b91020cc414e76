"""Whatever is loaded: refused as a whole, by a StateError, or good for permutations. Nothing else."""

from __future__ import annotations

import copy
import os
import warnings
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.make_states import DIM, MORE, N, interrupted, new
from helpers import batches, gradient_field, is_permutation
from runs import listed

from ordain.errors import StateError
from ordain.orders import ORDERS

NAMES = sorted({*ORDERS, *MORE})
ROUNDS = 4000 if os.environ.get("ORDAIN_PROFILE") == "nightly" else 150
NUMBERS = [
    0,
    1,
    -1,
    2,
    5,
    11,
    12,
    13,
    -7,
    2**31,
    2**63,
    2**64,
    10**30,
    10**400,
    10**5000,
    True,
    False,
    0.5,
    -1.0,
    1e308,
]
ODD: list[Any] = [
    float("nan"), float("inf"), -float("inf"), None, "", "x", b"x", [], {}, (), [[1]], {"a": {"b": []}}, object(),
    OrderedDict(), {1, 2}, 1j, np.float64(2.0), np.int64(3), np.arange(3), torch.nn.Parameter(torch.ones(3)), int,
    torch.tensor(1), torch.zeros(0), torch.zeros(3, 3).to_sparse(), torch.ones(3, dtype=torch.complex64),
]  # fmt: skip


def corrupted_tensor(tensor: torch.Tensor, rng: np.random.Generator) -> Any:
    one = tensor.clone()
    flat = one.view(-1)
    kinds = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)
    ways: list[Any] = [
        lambda: one.to("meta"),
        lambda: one.to(kinds[int(rng.integers(len(kinds)))]),
        lambda: one[:-1] if one.ndim else one,
        lambda: torch.cat([one, one]) if one.ndim else one,
        lambda: one[None],
        lambda: one.reshape(-1),
        lambda: one[..., :-1],
        lambda: one[:1].expand(len(one), *one.shape[1:]) if one.ndim and len(one) else one,
        lambda: torch.stack([one, one], dim=-1)[..., 0],
        lambda: one.to_sparse(),
        lambda: one.numpy(),
        lambda: one.tolist(),
        lambda: torch.nn.Parameter(one) if one.is_floating_point() else one,
        lambda: one.clone().requires_grad_() if one.is_floating_point() else one,
        lambda: torch._neg_view(one),
    ]
    for value in (-1, 0, 1, 2, 3, 12, 127, 2**40, float("nan"), float("inf"), 1e300):

        def put(value: Any = value) -> torch.Tensor:
            if len(flat):
                flat[int(rng.integers(len(flat)))] = value
            return one

        ways.append(put)
    return ways[int(rng.integers(len(ways)))]()


def corrupted(value: Any, rng: np.random.Generator) -> Any:
    """Something else in place of a value of a state; containers are mostly damaged inside."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        found = dict(value)
        name = list(found)[int(rng.integers(len(found)))]
        kind = rng.random()
        if kind < 0.15:
            del found[name]
        elif kind < 0.25:
            found["more" if kind < 0.2 else 7] = 1  # type: ignore[index]
        else:
            found[name] = corrupted(found[name], rng)
        return found
    if isinstance(value, list) and value and rng.random() < 0.8:
        entries = list(value)
        place = int(rng.integers(len(entries)))
        entries[place] = corrupted(entries[place], rng)
        return entries[1:] if rng.random() < 0.1 else entries
    if isinstance(value, torch.Tensor) and rng.random() < 0.8:
        try:
            return corrupted_tensor(value, rng)
        except (RuntimeError, IndexError, ValueError, TypeError):  # what cannot be made cannot be loaded
            return torch.zeros(2, 2)
    pool = NUMBERS if rng.random() < 0.6 else ODD
    return copy.deepcopy(pool[int(rng.integers(len(pool)))])


def dtype_of(state: Any) -> torch.dtype:
    """Of the vectors of an order; its gradients must go on as they were."""
    found = [*(state.get("vectors") or {}).values(), *([] if state.get("stored") is None else [state["stored"]])]
    return next((one.dtype for one in found), torch.float64)


def goes_on(name: str, order: Any) -> None:
    field, state = gradient_field(N, DIM), order.state_dict()
    order.history(order.epoch)
    for epoch in range(3):
        seen: list[int] = []
        for batch in batches(order, 3):
            order.observe(torch.stack([torch.from_numpy(field(i, epoch)) for i in batch]).to(dtype_of(state)))
            seen += batch
        assert is_permutation(seen, N) if name != "replacement" else len(seen) == N
        order.state_dict()
    for epoch in range(state.get("origin", 0), min(order.epoch, 50) + 1):
        assert name == "replacement" or is_permutation(order.history(epoch).tolist(), N)


@pytest.mark.parametrize("name", NAMES)
def test_corrupted_states_are_refused_or_good_for_permutations(name: str) -> None:
    rng = np.random.default_rng(NAMES.index(name))
    whole = interrupted(name).state_dict()
    order = interrupted(name)
    before = listed(order.state_dict())
    refused = 0
    for number in range(ROUNDS):
        state = corrupted(copy.deepcopy(whole), rng)
        try:
            order.load_state_dict(state)
        except StateError:
            refused += 1
            assert listed(order.state_dict()) == before, number
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            goes_on(name, order)
        order = new(name)
        order.load_state_dict(whole)
        before = listed(order.state_dict())
    assert refused > ROUNDS // 2
