"""Accelerate in one process; several are in test_ranks.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import small_model
from runs import Indexed
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="Accelerate is not installed")

from accelerate import Accelerator

from ordain import GraB, RandomReshuffling
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


def trained(
    accelerator: Any = None, *, scaler: Any = None, evaluated: bool = False, **loader: Any
) -> tuple[list[list[int]], Tensor]:
    """Orders and weights of a loop with an accelerator, or by hand."""
    net = model = small_model()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.5)
    if accelerator is not None:
        accelerator.scaler = scaler
        model, optimizer = accelerator.prepare(model, optimizer)
    order = GraB(model, N)
    batches = DataLoader(Indexed(N), batch_size=4, sampler=order.sampler, **loader)
    if accelerator is not None:
        batches = prepare(accelerator, order, batches)
    for _ in range(3):
        for x, y, _ in batches:
            loss = cross_entropy(model(x), y)
            if accelerator is None:
                loss.backward()
                order.step()
            else:
                accelerator.backward(loss)
                order.step(loss_scale=accelerator.scaler or 1.0)
            if evaluated:
                model.eval()
                model(x)
                model.train()
            optimizer.step()
            optimizer.zero_grad()
    orders = [order.history(epoch).tolist() for epoch in range(3)]
    return orders, torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.filterwarnings("ignore", "error::ordain.errors.OrdainWarning")
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"num_workers": 1}, {"evaluated": True}], ids=str)
def test_the_same_as_by_hand(options: dict[str, Any]) -> None:
    orders, weights = trained(Accelerator(cpu=True), **options)
    wanted, expected = trained(**{name: value for name, value in options.items() if name == "drop_last"})
    assert orders == wanted
    assert torch.equal(weights, expected)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.filterwarnings("ignore", "error::ordain.errors.OrdainWarning")
def test_a_gradient_scaler() -> None:
    """As mixed_precision="fp16" has it, without a GPU. Its scale is a power of two, and changes in mid-epoch."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    orders, weights = trained(Accelerator(cpu=True), scaler=scaler)
    wanted, expected = trained()
    assert orders == wanted
    torch.testing.assert_close(weights, expected)
    assert scaler.get_scale() > 2.0**13


def test_refused() -> None:
    accelerator, order = Accelerator(cpu=True), RandomReshuffling(N)
    with pytest.raises(ArgumentError, match=r"an order of type DataLoader.*prepare\(accelerator, order, loader\)"):
        prepare(accelerator, loader_of(order), order)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a DataLoader that draws from a RandomSampler.*sampler=order\.sampler"):
        prepare(accelerator, order, loader_of(order, shuffle=True))
    several = SimpleNamespace(num_processes=2, split_batches=False, dispatch_batches=None)
    with pytest.raises(InputError, match=r"an order of 1 process on one of 2.*Create the order after the Accelerator"):
        prepare(several, order, loader_of(order))
    for name in ("split_batches", "dispatch_batches"):
        told = SimpleNamespace(**(vars(several) | {name: True}))
        with pytest.raises(InputError, match=f"an Accelerator with {name}=True"):
            prepare(told, order, loader_of(order))
