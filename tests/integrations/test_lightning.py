"""Lightning in one process: every way to train and to resume, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason="Lightning is not installed")

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from ordain import GraB, RandomReshuffling
from ordain.errors import ArgumentError, InputError, OrdainWarning, StateError, StepError
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
        self.net: Any = nn.Linear(3, 3).double()
        self.calls, self.passed, self.kind = 0, passed, kind
        self.automatic_optimization = not manual

    def setup(self, stage: str) -> None:
        self.order = GraB(self.net, N) if self.kind is GraB else self.kind(N)

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=BATCH, sampler=self.order.sampler)

    def called(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        self.calls += 1
        if index == self.passed:
            return None
        loss = cross_entropy(self.called(batch[0].to(next(self.net.parameters()).dtype)), batch[1])
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


def by_hand(
    *,
    module: Any = None,
    accumulate: int = 1,
    batches: int = 6,
    passed: int = -1,
    autocast: bool = False,
    scaler: Any = None,
) -> tuple[list[list[int]], Tensor]:
    """The same in a plain loop."""
    module = module or Module()
    order, optimizer = GraB(module.net, N), module.configure_optimizers()
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(EPOCHS):
        for number, (x, y, _) in enumerate(DataLoader(DATA, batch_size=BATCH, sampler=order.sampler)):
            if number == batches:
                break
            if number == passed:
                order.skip(len(x))
                continue
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = cross_entropy(module.net(x.to(next(module.net.parameters()).dtype)), y) / accumulate
            scaler.scale(loss).backward()
            order.step(loss_scale=scaler)
            if number % accumulate == accumulate - 1:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return [order.history(epoch).tolist() for epoch in range(EPOCHS)], flat(module)


def flat(module: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.net.parameters()])


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
    torch.testing.assert_close(flat(module), weight)
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
    torch.testing.assert_close(flat(module), weight)
    assert scaler.get_scale() > 2.0**13


def test_steps_that_a_gradient_scaler_skips(tmp_path: Path) -> None:
    """The first: at this scale its gradients are not finite. Its examples take no part in the order."""

    class Times(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 64 * x

    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100) for _ in range(2)]
    modules = [Module() for _ in range(2)]
    for module in modules:
        module.net = nn.Sequential(module.net.float(), Times())
    with pytest.warns(OrdainWarning, match="not finite were set aside"):
        wanted, weights = by_hand(module=modules[0], scaler=scalers[0])
    precision = MixedPrecision("bf16-mixed", "cpu")
    precision.scaler = scalers[1]
    precision.autocast_context_manager = nullcontext  # type: ignore[method-assign,assignment]
    with pytest.warns(OrdainWarning, match="not finite were set aside"):
        fit(modules[1], tmp_path, plugins=[precision])
    assert orders(modules[1]) == wanted
    assert torch.equal(flat(modules[1]), weights)
    assert BATCH <= modules[1].order.set_aside < N
    assert scalers[1].get_scale() == scalers[0].get_scale() < 2.0**127


def test_autocast(tmp_path: Path) -> None:
    module, twin = Module(), Module()
    module.net.float()
    twin.net.float()
    fit(module, tmp_path, precision="bf16-mixed")
    wanted, weights = by_hand(module=twin, autocast=True)
    assert orders(module) == wanted
    assert torch.equal(flat(module), weights)


class Compiled(Module):
    """Calls a compiled network; or is compiled itself."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.fast = torch.compile(self.net, backend="aot_eager")

    def called(self, x: Tensor) -> Tensor:
        found: Tensor = self.fast(x)
        return found


@pytest.mark.parametrize("whole", [False, True], ids=["its network", "the LightningModule"])
def test_compiled(whole: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    counters.clear()
    module: Any = Module() if whole else Compiled()
    fit(torch.compile(module, backend="aot_eager") if whole else module, tmp_path)
    assert counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    wanted, weights = by_hand()
    assert orders(module) == wanted
    torch.testing.assert_close(flat(module), weights)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    class Checkpointed(Module):
        def called(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.net, x.requires_grad_(), use_reentrant=reentrant)
            return found

    module = fit(Checkpointed(), tmp_path)
    wanted, weights = by_hand()
    assert orders(module) == wanted
    torch.testing.assert_close(flat(module), weights)


def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapted() -> Any:
        module = Module()
        config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        module.net = peft.get_peft_model(nn.Sequential(nn.Linear(3, 3)), config).double()
        return module

    module = fit(adapted(), tmp_path)
    wanted, weights = by_hand(module=adapted())
    assert orders(module) == wanted
    assert torch.equal(flat(module), weights)
    assert len({tuple(order) for order in wanted}) == EPOCHS


def test_evaluation_between_steps(tmp_path: Path) -> None:
    """After each second batch, and before the first (Lightning's sanity check)."""

    class Evaluated(Module):
        evaluated = 0

        def val_dataloader(self) -> Any:
            return DataLoader(DATA, batch_size=BATCH)

        def validation_step(self, batch: Any, index: int) -> None:
            self.evaluated += 1
            self.net(batch[0])

    module = fit(Evaluated(), tmp_path, val_check_interval=2)
    assert orders(module) == by_hand()[0]
    assert module.evaluated > EPOCHS * 3 * 6


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


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64)])
def test_an_order_of_the_model_as_lightning_converts_it(precision: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Lightning moves and converts the model after setup(), where the order is made."""
    module = Module()
    module.net.float()
    fit(module, tmp_path, precision=precision)
    assert module.net.weight.dtype is dtype
    assert module.order.set_aside == 0
    assert len({tuple(order) for order in orders(module)}) == EPOCHS

    elsewhere = SingleDeviceStrategy("meta")
    trainer = SimpleNamespace(strategy=elsewhere, precision_plugin=None)
    OrderCallback().setup(trainer, module, "validate")
    assert module.net.weight.device.type == "cpu"
    OrderCallback().setup(trainer, module, "fit")
    assert module.net.weight.device.type == "meta"


def test_a_model_whose_training_breaks_off(tmp_path: Path) -> None:
    class Broken(Module):
        def training_step(self, batch: Any, index: int) -> Tensor | None:
            assert vars(self.net)["_forward_hooks"]
            raise RuntimeError("broken")

    module = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        fit(module, tmp_path)
    assert not vars(module.net)["_forward_hooks"]


@pytest.mark.parametrize("known", [True, False], ids=["Lightning's optimizer", "another"])
def test_a_backward_that_lightning_does_not_see(known: bool, tmp_path: Path) -> None:
    """Callbacks are told of manual_backward() only; the order would stay as it is."""

    class Unseen(Module):
        def training_step(self, batch: Any, index: int) -> Tensor | None:
            self.calls += 1
            optimizer: Any = self.optimizers(use_pl_optimizer=known)
            cross_entropy(self.net(batch[0]), batch[1]).backward()
            optimizer.step()
            return None

    module = Unseen(manual=True)
    with pytest.raises(StepError, match=r"without self.manual_backward\(loss\).*in place of loss.backward\(\)"):
        fit(module, tmp_path)
    assert module.calls == (1 if known else 6)  # at once, or before the second epoch


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"an order of type RankSampler|an order of type OrderSampler"):
        OrderCallback(GraB(None, N).sampler)  # type: ignore[arg-type]

    class Shuffled(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(DATA, batch_size=BATCH, shuffle=True)

    with pytest.raises(InputError, match=r"draws from a RandomSampler.*order\.sampler.*setup\(\)"):
        fit(Shuffled(), tmp_path)

    class Several(Module):
        def train_dataloader(self) -> Any:
            return {"ours": super().train_dataloader(), "theirs": DataLoader(DATA)}

    with pytest.raises(InputError, match=r"several training loaders \(a dict\).*from the others in training_step"):
        fit(Several(), tmp_path)
    with pytest.raises(InputError, match="draws from a SequentialSampler"):
        fit(Module(), tmp_path, overfit_batches=2)

    class Renewed(Module):
        def train_dataloader(self) -> Any:
            self.order = RandomReshuffling(N)
            return super().train_dataloader()

    with pytest.raises(InputError, match=r"a different order from the last epoch's.*reload_dataloaders_every_n_epochs"):
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
