"""Accelerate in one process; several are in test_ranks.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from runs import Indexed
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="Accelerate is not installed")

from accelerate import Accelerator

from ordain import RandomReshuffling
from ordain.errors import ArgumentError, InputError
from ordain.integrations.accelerate import prepare

N = 10


def loader_of(order: Any, **options: Any) -> Any:
    return DataLoader(Indexed(N), batch_size=4, **(options or {"sampler": order.sampler}))


@pytest.mark.parametrize("own", [False, True])
def test_one_process(own: bool) -> None:
    """The accelerator's own way is as good here."""
    accelerator, order = Accelerator(cpu=True), RandomReshuffling(N)
    loader = accelerator.prepare(loader_of(order)) if own else prepare(accelerator, order, loader_of(order))
    for epoch in range(3):
        seen = [index for batch in loader for index in batch[2].tolist()]
        assert seen == order.history(epoch).tolist()
        assert accelerator.gradient_state.end_of_dataloader is False


def test_refused() -> None:
    accelerator, order = Accelerator(cpu=True), RandomReshuffling(N)
    with pytest.raises(ArgumentError, match=r"an order of type DataLoader.*prepare\(accelerator, order, loader\)"):
        prepare(accelerator, loader_of(order), order)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a DataLoader that draws from a RandomSampler.*sampler=order\.sampler"):
        prepare(accelerator, order, loader_of(order, shuffle=True))
    several = SimpleNamespace(num_processes=2, split_batches=False, dispatch_batches=None)
    with pytest.raises(InputError, match=r"an order of 1 process on one of 2.*Make the order after the Accelerator"):
        prepare(several, order, loader_of(order))
    for name in ("split_batches", "dispatch_batches"):
        told = SimpleNamespace(**(vars(several) | {name: True}))
        with pytest.raises(InputError, match=f"an Accelerator with {name}=True"):
            prepare(told, order, loader_of(order))
