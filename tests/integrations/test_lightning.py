"""Lightning in one process: every way to train and to resume, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason="Lightning is not installed")

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

from ordain import GraB, RandomReshuffling
from ordain.errors import ArgumentError, InputError, StateError
from ordain.integrations.lightning import OrderCallback

# Of the frameworks; ours are errors.
pytestmark = pytest.mark.filterwarnings("ignore", "error::ordain.errors.OrdainWarning")
N, BATCH, EPOCHS = 22, 4, 3
DATA = TensorDataset(
    torch.randn(N, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(N) % 3, torch.arange(N)
)


class Module(lightning.LightningModule):
    """Counts its training steps; may optimise by hand, or pass batches over."""

    def __init__(self, *, manual: bool = False, passed: int = -1, kind: Any = GraB) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(3, 3).double()
        self.calls, self.passed, self.kind = 0, passed, kind
        self.automatic_optimization = not manual

    def setup(self, stage: str) -> None:
        self.order = GraB(self.net, N) if self.kind is GraB else self.kind(N)

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=BATCH, sampler=self.order.sampler)

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        self.calls += 1
        if index == self.passed:
            return None
        loss = cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Any, folder: Path, *, resume: Path | None = None, callbacks: Any = None, **options: Any) -> Any:
    callbacks = [OrderCallback()] if callbacks is None else callbacks
    if not resume:
        keep = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [*callbacks, keep]
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=not resume,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, ckpt_path=resume)
    return module


def by_hand(*, accumulate: int = 1, batches: int = 6, passed: int = -1) -> tuple[list[list[int]], Tensor]:
    """The same in a plain loop."""
    module = Module()
    order, optimizer = GraB(module.net, N), module.configure_optimizers()
    for _ in range(EPOCHS):
        for number, (x, y, _) in enumerate(DataLoader(DATA, batch_size=BATCH, sampler=order.sampler)):
            if number == batches:
                break
            if number == passed:
                order.skip(len(x))
                continue
            (cross_entropy(module.net(x), y) / accumulate).backward()
            order.step()
            if number % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
    return [order.history(epoch).tolist() for epoch in range(EPOCHS)], module.net.weight.detach()


def orders(module: Any) -> list[list[int]]:
    return [module.order.history(epoch).tolist() for epoch in range(EPOCHS)]


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "automatic": ({}, {}, {}),
    "manual": ({"manual": True}, {}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}, {"accumulate": 2}),
    "limited": ({}, {"limit_train_batches": 4}, {"batches": 4}),
    "a batch passed over": ({"passed": 2}, {}, {"passed": 2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_as_by_hand(way: str, tmp_path: Path) -> None:
    given, options, hand = WAYS[way]
    module = fit(Module(**given), tmp_path, **options)
    wanted, weight = by_hand(**hand)
    assert orders(module) == wanted
    torch.testing.assert_close(module.net.weight.detach(), weight)
    assert module.calls == EPOCHS * hand.get("batches", 6)  # none is run twice
    assert len({tuple(order) for order in wanted}) == EPOCHS


@pytest.mark.parametrize("kind", [GraB, RandomReshuffling])
@pytest.mark.parametrize("way", ["automatic", "manual", "accumulated", "limited"])
def test_resumed(way: str, kind: Any, tmp_path: Path) -> None:
    given, options, hand = WAYS[way]
    whole = fit(Module(kind=kind, **given), tmp_path, **options)
    epoch = hand.get("batches", 6) // hand.get("accumulate", 1)
    for step in (1, epoch, epoch + 1):  # in mid-epoch, between epochs, in mid-epoch
        rest = fit(Module(kind=kind, **given), tmp_path, resume=tmp_path / f"step={step}.ckpt", **options)
        assert orders(rest) == orders(whole)
        assert torch.equal(rest.net.weight, whole.net.weight)
        assert rest.calls == whole.calls - step * hand.get("accumulate", 1)


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_a_gradient_scaler(manual: bool, tmp_path: Path) -> None:
    """Its scale is a power of two, and changes in mid-epoch."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    module = fit(Module(manual=manual), tmp_path, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    wanted, weight = by_hand()
    assert orders(module) == wanted
    torch.testing.assert_close(module.net.weight.detach(), weight)
    assert scaler.get_scale() > 2.0**13


def test_an_order_that_is_passed_in(tmp_path: Path) -> None:
    module = Module()
    order = GraB(module.net, N)
    loader = DataLoader(DATA, batch_size=BATCH, sampler=order.sampler, num_workers=1)
    module.setup = lambda stage: None  # type: ignore[method-assign]
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, callbacks=[OrderCallback(order)], logger=False, default_root_dir=tmp_path
    )
    trainer.fit(module, loader)
    assert [order.history(epoch).tolist() for epoch in range(EPOCHS)] == by_hand()[0]


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"an order of type RankSampler|an order of type OrderSampler"):
        OrderCallback(GraB(None, N).sampler)  # type: ignore[arg-type]

    class Shuffled(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(DATA, batch_size=BATCH, shuffle=True)

    with pytest.raises(InputError, match=r"draws from a RandomSampler.*order\.sampler.*setup\(\)"):
        fit(Shuffled(), tmp_path)
    with pytest.raises(InputError, match="draws from a SequentialSampler"):
        fit(Module(), tmp_path, overfit_batches=2)

    class Renewed(Module):
        def train_dataloader(self) -> Any:
            self.order = RandomReshuffling(N)
            return super().train_dataloader()

    with pytest.raises(InputError, match=r"another order than in the last epoch.*reload_dataloaders_every_n_epochs"):
        fit(Renewed(), tmp_path, reload_dataloaders_every_n_epochs=1)

    without = tmp_path / "without"
    module = Module(kind=RandomReshuffling)
    fit(module, without, callbacks=[])
    with pytest.raises(StateError, match=r"a checkpoint without an order.*load_from_checkpoint"):
        fit(Module(kind=RandomReshuffling), without, resume=without / "step=2.ckpt")


def test_only_training_asks_for_an_order(tmp_path: Path) -> None:
    class Tested(Module):
        def setup(self, stage: str) -> None:
            if stage == "fit":
                super().setup(stage)

        def test_step(self, batch: Any, index: int) -> None:
            self.net(batch[0])

    fit(Tested(), tmp_path)
    trainer = lightning.Trainer(accelerator="cpu", callbacks=[OrderCallback()], logger=False, enable_progress_bar=False)
    trainer.test(Tested(), DataLoader(DATA, batch_size=BATCH), ckpt_path=tmp_path / "step=2.ckpt", verbose=False)
