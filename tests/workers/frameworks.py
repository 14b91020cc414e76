"""Run on several ranks: each framework trains the same model on the same data, and what came of it as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ordain import GraB, RandomReshuffling
from ordain.errors import OrdainError
from ordain.integrations.accelerate import prepare
from ordain.integrations.lightning import OrderCallback
from ordain.integrations.transformers import OrderedTrainer

N, GLOBAL, EPOCHS, RATE = 24, 12, 3, 0.1


class Data(Dataset[dict[str, Tensor]]):
    """Examples that say which they are."""

    def __init__(self, n: int = N) -> None:
        torch.manual_seed(7)
        self.x, self.n = torch.randn(n, 6).double(), n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": torch.tensor(index % 3), "index": torch.tensor(index)}


class Net(nn.Module):
    """Returns its loss, as transformers' models do, and notes what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.seen: list[int] = []

    def forward(self, x: Tensor, labels: Tensor, index: Tensor) -> dict[str, Tensor]:
        self.seen += index.tolist()
        return {"loss": cross_entropy(self.layers(x), labels)}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def came(net: Net, order: Any, **more: Any) -> dict[str, Any]:
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    orders = [order.history(epoch).tolist() for epoch in range(order.epoch + 1)]
    return {"orders": orders, "seen": net.seen, "weights": flat.tolist(), **more}


def by_hand(ranks: int, n: int = N, kind: Any = GraB) -> dict[str, Any]:
    """A plain loop, with DistributedDataParallel where there are ranks."""
    net = Net()
    model: Any = DistributedDataParallel(net) if ranks > 1 else net
    order = kind(net, n) if kind is GraB else kind(n)
    optimizer = sgd(net)
    loader = DataLoader(Data(n), batch_size=GLOBAL // ranks, sampler=order.sampler)
    for _ in range(EPOCHS):
        for batch in loader:
            model(**batch)["loss"].backward()
            order.step()
            optimizer.step()
            optimizer.zero_grad()
    return came(net, order)


def accelerated(ranks: int, folder: Path, *, accumulate: int = 1, stop: int = 0, n: int = N) -> dict[str, Any]:
    """Accelerate; stopped after so many batches, and gone on with by fresh objects."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    losses = 0
    for life in range(2 if stop else 1):
        net = Net()
        model, optimizer = accelerator.prepare(net, sgd(net))
        order = GraB(model, n)
        loader = DataLoader(Data(n), batch_size=GLOBAL // ranks // accumulate, sampler=order.sampler)
        loader = prepare(accelerator, order, loader)
        accelerator.register_for_checkpointing(order)
        first, count = 0, 0
        if life:
            accelerator.load_state(str(folder))
            first = order.resume()
        for _ in range(first, EPOCHS):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    order.step()
                    optimizer.step()
                    optimizer.zero_grad()
                losses, count = losses + 1, count + 1
                if not life and count == stop:
                    accelerator.save_state(str(folder))
                    break
            if not life and count == stop:
                break
        accelerator.free_memory()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    return came(net, order, losses=losses)


def refused(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OrdainError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def sharded_again(kind: Any, **options: Any) -> str:
    """A loader that the accelerator itself has prepared."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    order = kind(N)
    loader = accelerator.prepare(DataLoader(Data(), batch_size=6, sampler=order.sampler))
    if options.get("dispatch_batches") and accelerator.process_index:
        return ""  # rank 0 draws for all
    return refused(lambda: next(iter(loader)))


class WithSampler(Trainer):
    """A Trainer with an order's sampler, as one would try first."""

    def __init__(self, *args: Any, sampler: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sampler = sampler

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self._sampler


def arguments(folder: Path, ranks: int, accumulate: int = 1, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=GLOBAL // ranks // accumulate,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=EPOCHS,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        remove_unused_columns=False,
        **{"save_strategy": "no", **options},
    )


def independent(model: nn.Module, n: int) -> GraB:
    return GraB(model, n, distributed="independent")


def trained(
    folder: Path, ranks: int, resume: str | None = None, n: int = N, order: Any = GraB, **options: Any
) -> dict[str, Any]:
    net = Net()
    optimizer = sgd(net)
    optimizers = optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    args = arguments(folder, ranks, **options)
    trainer = OrderedTrainer(model=net, args=args, train_dataset=Data(n), order=order, optimizers=optimizers)
    trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    return came(net, trainer.order)


class Texts(Data):
    """Sequences with different numbers of labels."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(1, 17, (6,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[3 + index % 4 :] = -100
        return {"input_ids": ids, "labels": labels}


def language(folder: Path, ranks: int, accumulate: int = 1) -> dict[str, Any]:
    """A loss that is divided by the number of labels on all ranks, in all accumulated batches."""
    torch.manual_seed(5)
    config = LlamaConfig(vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    args = arguments(folder, ranks, accumulate, optim="sgd", learning_rate=RATE, lr_scheduler_type="constant")
    model = LlamaForCausalLM(config).double()
    order: Any = lambda model, n: GraB(model, n, params="head")  # noqa: E731
    trainer = OrderedTrainer(model=model, args=args, train_dataset=Texts(), order=order)
    trainer.train()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"orders": [trainer.order.history(epoch).tolist() for epoch in range(EPOCHS)], "weights": flat.tolist()}


def plain_trainer(folder: Path, ranks: int) -> str:
    order = RandomReshuffling(N)
    trainer = WithSampler(model=Net(), args=arguments(folder, ranks), train_dataset=Data(), sampler=order.sampler)
    return refused(trainer.train)


class Module(lightning.LightningModule):
    """Makes its order in setup()."""

    def __init__(self, batch: int, *, made: bool = True, n: int = N) -> None:
        super().__init__()
        self.net, self.batch, self.n, self.made, self.calls = Net(), batch, n, made, 0

    def setup(self, stage: str) -> None:
        if self.made:
            self.order = GraB(self.net, self.n)

    def train_dataloader(self) -> Any:
        return DataLoader(Data(self.n), batch_size=self.batch, sampler=self.order.sampler if self.made else None)

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.calls += 1
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return sgd(self)


def fitted(
    folder: Path, ranks: int, *, module: Any = None, accumulate: int = 1, resume: str | None = None, **options: Any
) -> dict[str, Any]:
    module = module or Module(GLOBAL // ranks // accumulate)
    callbacks = [OrderCallback()]
    if not resume:
        keep = lightning.pytorch.callbacks.ModelCheckpoint(
            dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1
        )
        callbacks.append(keep)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        enable_checkpointing=not resume,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, ckpt_path=resume and folder / resume)
    return came(module.net, module.order, calls=module.calls)


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"by hand": by_hand(ranks)}
    for kind in (RandomReshuffling, lambda n: GraB(None, n)) if ranks > 1 else ():
        for options in ({}, {"even_batches": False}, {"split_batches": True}, {"dispatch_batches": True}):
            found[f"sharded again {options} {kind.__name__}"] = sharded_again(kind, **options)
    found["accelerate"] = accelerated(ranks, out / "a")
    found["accelerate, accumulated"] = accelerated(ranks, out / "b", accumulate=2)
    found["accelerate, resumed"] = accelerated(ranks, out / "c", stop=3)
    found["accelerate, n = 22"] = accelerated(ranks, out / "d", n=22)
    folder = out / "trainer"
    found["trainer"] = trained(folder, ranks, save_strategy="steps", save_steps=1)
    found["trainer, resumed"] = trained(folder, ranks, "checkpoint-3")
    found["trainer, accumulated"] = trained(folder, ranks, accumulate=2)
    found["trainer, n = 22"] = trained(folder, ranks, n=22)
    found["language"] = language(folder, ranks)
    found["language, accumulated"] = language(folder, ranks, accumulate=2)
    folder = out / "independent"
    found["independent"] = trained(folder, ranks, order=independent, save_strategy="steps", save_steps=1)
    found["independent, resumed"] = trained(folder, ranks, "checkpoint-3", order=independent)
    if ranks > 1:
        found["trainer, plain"] = plain_trainer(folder, ranks)
    folder = out / "lightning"
    found["lightning"] = fitted(folder, ranks)
    found["lightning, resumed"] = fitted(folder, ranks, resume="step=3.ckpt")
    found["lightning, accumulated"] = fitted(out / "e", ranks, accumulate=2)
    found["lightning, n = 22"] = fitted(out / "f", ranks, module=Module(GLOBAL // ranks, n=22))
    found["lightning, no order"] = refused(lambda: fitted(out / "g", ranks, module=Module(6, made=False)))
    (out / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the frameworks
    main(Path(sys.argv[1]))
