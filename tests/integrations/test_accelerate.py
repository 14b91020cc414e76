"""Accelerate in one process; several are in test_ranks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import small_model
from runs import Indexed
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="Accelerate is not installed")

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin

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


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What the accelerators of a process share is made again for each test, and so is compiled code."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()


def trained(
    accelerator: Any = None,
    *,
    scaler: Any = None,
    evaluated: bool = False,
    autocast: bool = False,
    build: Callable[[], Any] = small_model,
    folder: Path | None = None,
    stop: int = 0,
    **loader: Any,
) -> tuple[list[list[int]], Tensor]:
    """Orders and weights of a loop with an accelerator, or by hand; stopped after so many batches, or resumed."""
    net = model = build()
    optimizer: Any = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5)
    if accelerator is not None:
        accelerator.scaler = scaler
        model, optimizer = accelerator.prepare(model, optimizer)
    order = GraB(model, N)
    batches = DataLoader(Indexed(N), batch_size=4, sampler=order.sampler, **loader)
    first = done = 0
    if accelerator is not None:
        batches = prepare(accelerator, order, batches)
        accelerator.register_for_checkpointing(order)
        if folder is not None and not stop:
            accelerator.load_state(str(folder))
            first = order.resume()
    for _ in range(first, 3):
        for x, y, _ in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast) if accelerator is None else nullcontext():
                loss = cross_entropy(model(x.to(next(net.parameters()).dtype)), y)
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
            done += 1
            if done == stop:
                accelerator.save_state(str(folder))
                return [], torch.empty(0)
    orders = [order.history(epoch).tolist() for epoch in range(3)]
    return orders, torch.cat([p.detach().flatten() for p in net.parameters()])


def adapted() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(small_model(), config).double()


@pytest.mark.filterwarnings("ignore", "error::ordain.errors.OrdainWarning")
@pytest.mark.parametrize(
    ("own", "both"),
    [
        ({}, {}),
        ({}, {"drop_last": True}),
        ({"num_workers": 1}, {}),
        ({"evaluated": True}, {}),
        ({}, {"build": adapted}),
    ],
    ids=["plain", "drop_last", "workers", "evaluated", "LoRA"],
)
def test_the_same_as_by_hand(own: dict[str, Any], both: dict[str, Any]) -> None:
    orders, weights = trained(Accelerator(cpu=True), **own, **both)
    wanted, expected = trained(**both)
    assert orders == wanted
    assert torch.equal(weights, expected)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.filterwarnings("ignore", "error::ordain.errors.OrdainWarning")
def test_autocast() -> None:
    orders, weights = trained(Accelerator(cpu=True, mixed_precision="bf16"), build=lambda: small_model().float())
    wanted, expected = trained(build=lambda: small_model().float(), autocast=True)
    assert orders == wanted
    assert torch.equal(weights, expected)
    assert not torch.equal(weights, trained(build=lambda: small_model().float())[1])


@pytest.mark.filterwarnings("ignore", "error::ordain.errors.OrdainWarning")
@pytest.mark.parametrize("regional", [False, True])
def test_compiled(regional: bool) -> None:
    """The whole model, or its repeated blocks (``use_regional_compilation``)."""
    counters.clear()
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    orders, weights = trained(Accelerator(cpu=True, dynamo_plugin=plugin))
    assert counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    wanted, expected = trained()
    assert orders == wanted
    torch.testing.assert_close(weights, expected)


OPTIONS: list[dict[str, Any]] = [
    {"split_batches": True},
    {"dispatch_batches": True},
    {"even_batches": False},
    {"use_seedable_sampler": True},
    {"use_stateful_dataloader": True},
]


@pytest.mark.filterwarnings("ignore", "error::ordain.errors.OrdainWarning")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_resumed_with_each_option_of_loaders(options: dict[str, Any], tmp_path: Path) -> None:
    """One process; a stateful loader with workers has drawn before the order's state is loaded, if it is let."""
    if "use_stateful_dataloader" in options:
        pytest.importorskip("torchdata", reason="torchdata is not installed")
    config = DataLoaderConfiguration(**options)
    wanted, expected = trained()
    for stop in (1, 3, 4):  # in mid-epoch, between epochs, in mid-epoch
        run: Any = {"folder": tmp_path / str(stop), "num_workers": 1}
        trained(Accelerator(cpu=True, dataloader_config=config), stop=stop, **run)
        orders, weights = trained(Accelerator(cpu=True, dataloader_config=config), **run)
        assert orders == wanted
        assert torch.equal(weights, expected)


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
