"""Hugging Face's Trainer with an order, which learns from each micro-batch and is saved in every checkpoint."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ordain.checkpoint import load, save
from ordain.errors import ArgumentError, InputError, StateError
from ordain.integrations.packages import require
from ordain.orders import Order

require("transformers", "accelerate", extra="transformers")

from accelerate.utils import find_batch_size  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

from ordain.integrations.accelerate import prepare  # noqa: E402

__all__ = ["OrderedMixin", "OrderedTrainer"]

Build = type[Order] | Callable[[Any, int], Order]
# What a loader is made of, besides its data, its sampler and its batch size.
_LOADER = [
    "collate_fn",
    "num_workers",
    "pin_memory",
    "worker_init_fn",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "in_order",
    "timeout",
    "generator",
]


class OrderedMixin:
    """For your own Trainer: ``class MyTrainer(OrderedMixin, SFTTrainer): ...``; see :class:`OrderedTrainer`."""

    order: Order

    def __init__(self, *args: Any, order: Build, **kwargs: Any) -> None:
        if not callable(order) or (isinstance(order, type) and not issubclass(order, Order)):
            raise ArgumentError(
                f"order={order!r}",
                expected="an order class, or a function of the model and n that creates an order",
                remedy="Write order=GraB, or order=lambda model, n: GraB(model, n, params='head').",
            )
        super().__init__(*args, **kwargs)
        self._build = order
        self._keeper = Keeper()
        self._counted: bool | None = None  # is the loss divided by num_items_in_batch? None: not known yet
        self.add_callback(self._keeper)  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of the trainer with another sampler; makes the order."""
        trainer: Any = self
        _check_trainer(trainer)
        theirs = super().get_train_dataloader()  # type: ignore[misc]
        dataset = theirs.dataset
        self._keeper.end()  # Trainer begins a run again with smaller batches if memory runs out
        made = build(self._build, trainer.model, dataset)
        if made is getattr(self, "order", None):
            raise ArgumentError(
                "order= that returned the same order twice",
                expected="a new order for each train(), whose model may be a new one (model_init=)",
                remedy="Create it in the function: order=lambda model, n: GraB(model, n).",
            )
        self.order = made
        batches = Batches(self.order.sampler, theirs.batch_sampler.batch_size, trainer.args.dataloader_drop_last)
        self._keeper.begin(self.order, batches)
        self._counted = None
        options = {name: getattr(theirs, name) for name in _LOADER}
        return prepare(trainer.accelerator, self.order, DataLoader(dataset, batch_sampler=batches, **options))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = self
        folder = resume_from_checkpoint or None
        if folder is True:
            folder = get_last_checkpoint(trainer.args.output_dir)
        self._keeper.resume_from(folder)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._keeper.end()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's, with the order in checkpoints: nothing else says in which folder a trial of a search has them."""
        super().save_model(output_dir, _internal_call=_internal_call)  # type: ignore[misc]
        if _internal_call and output_dir is not None:
            trainer: Any = self
            self._keeper.save(Path(output_dir), first=trainer.args.should_save)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        size, items = find_batch_size(inputs), num_items_in_batch
        if self._counted is None and torch.is_tensor(items):
            # Whether a model's loss divides by it is not said anywhere: then it has a gradient.
            items = items.detach().float().requires_grad_()
        loss = super().training_step(model, inputs, items)  # type: ignore[misc]
        if self._counted is None:
            self._counted = torch.is_tensor(items) and items.grad is not None
        self.order.step(loss_scale=self._loss_scale(size, num_items_in_batch))
        return loss

    def _loss_scale(self, size: int, items: Any) -> float:
        """What the trainer multiplied the mean loss of this micro-batch by, or of its items (tokens) the sum / size."""
        trainer: Any = self
        scaler = trainer.accelerator.scaler  # fp16=True
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        takes = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        if takes and items is not None and trainer.args.average_tokens_across_devices:
            scale *= float(trainer.accelerator.num_processes)
        if self._counted:
            return scale * size / float(items)
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # said outright by newer versions
        if scaled is None:
            by_model = trainer.model_accepts_loss_kwargs and items is not None
            scaled = by_model or trainer.compute_loss_func is not None
        return scale if scaled else scale / trainer.current_gradient_accumulation_steps


class OrderedTrainer(OrderedMixin, Trainer):
    """transformers' Trainer, which visits examples in the order of ``order=``.

    Args:
        *args: arguments of Trainer.
        order: an order class; or a function of the model and n that creates an order, as in
            ``order=lambda model, n: GraB(model, n, params="head")``.
        **kwargs: arguments of Trainer.

    Attributes:
        order: created when training begins.
    """


def build(order: Build, model: Any, dataset: Any) -> Order:
    """The order of a dataset's examples, by a model's gradients if it looks at any."""
    n = len(dataset)
    signature = inspect.signature(order)
    kind = order.func if isinstance(order, partial) else order
    by_model = not isinstance(kind, type) or next(iter(signature.parameters), None) == "model"
    given = (model, n) if by_model else (n,)
    try:
        signature.bind(*given)
    except TypeError as error:
        raise ArgumentError(
            f"order= that takes {signature}",
            expected="an order class, or a function of the model and n that creates an order",
            remedy="Write order=lambda model, n: RandomReshuffling(n).",
        ) from error
    made = order(*given)
    if not isinstance(made, Order) or made.n > n:
        raise ArgumentError(
            f"order= that returns {made!r}",
            expected=f"an order of the dataset's {n} examples",
            remedy="Write order=lambda model, n: GraB(model, n).",
        )
    return made


class Batches(BatchSampler):
    """Batches of an order, behind stand-ins for those that are done.

    Trainer resumes by drawing batches and throwing them away, as many as the checkpoint had seen of its epoch. An order
    begins where it stopped: what is thrown away are empty batches, of which nothing is drawn.

    Attributes:
        stand_ins: how many the present pass began with.
    """

    stand_ins = 0
    _coming = 0

    def after(self, done: int) -> None:
        """The next pass begins with so many stand-ins."""
        self._coming = done

    def __iter__(self) -> Iterator[list[int]]:
        self.stand_ins, self._coming = self._coming, 0
        for _ in range(self.stand_ins):
            yield []
        yield from super().__iter__()


class Keeper(TrainerCallback):
    """Saves the order in every checkpoint, and loads it when training begins from one."""

    def __init__(self) -> None:
        self._order: Order | None = None
        self._batches: Batches | None = None
        self._folder: Path | None = None

    def begin(self, order: Order, batches: Batches) -> None:
        """Keep this order from now on."""
        self._order, self._batches = order, batches

    def resume_from(self, folder: str | os.PathLike[str] | None) -> None:
        """When training begins, go on from the checkpoint in this folder."""
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None and not list(self._folder.glob("order*.pt")):
            raise StateError(
                f"{self._folder} without a saved order",
                expected="a checkpoint of an OrderedTrainer",
                remedy="Resume with the trainer that wrote it, or load its model and start a new run.",
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continue where the checkpoint stood."""
        if self._folder is None or self._order is None or self._batches is None:
            return
        order, batches = self._order, self._batches
        order.load_state_dict(load(self._folder / self._name(order), map_location="cpu")["order"])
        if args.ignore_data_skip:
            return  # the next epoch begins
        steps = -(-len(batches) // args.gradient_accumulation_steps)  # of the optimizer, in an epoch
        done = state.global_step % steps * args.gradient_accumulation_steps
        _check_position(state, state.global_step // steps + done / len(batches))
        if not done:
            order.resume(order.n)  # all of the epoch, even if its last examples were dropped
            return
        try:
            order.resume()
        except StateError:  # an order that looks at no gradients may not know
            ranks = 1 if self._name(order) != "order.pt" else args.world_size
            order.resume(min(order.n, done * batches.batch_size * ranks))
        batches.after(done)

    def save(self, folder: Path, *, first: bool) -> None:
        """Write the order into a checkpoint; an order of all ranks is written by the first."""
        if self._order is None:
            return
        name = self._name(self._order)
        if first or name != "order.pt":
            folder.mkdir(parents=True, exist_ok=True)
            save(folder / name, order=self._order)

    def end(self) -> None:
        """Leave the model as it was found, also if training broke off."""
        if self._order is not None:
            self._order.detach()
            self._order = None

    @staticmethod
    def _name(order: Order) -> str:
        """One file for all ranks, unless each has an order of its own."""
        rank = order.state_dict(vectors=False, history=False).get("rank")
        return "order.pt" if rank is None else f"order-{rank}.pt"


def _check_position(state: Any, counted: float) -> None:
    """Raise if the trainer, which counts steps, is not where the checkpoint is: it would pass over some examples."""
    if abs(state.epoch - counted) > 1e-6:
        raise StateError(
            f"a checkpoint of step {state.global_step} after {state.epoch:.3g} epochs, where the trainer counts "
            f"{counted:.3g}",
            expected="the batch size, gradient_accumulation_steps and number of processes of the run that saved it",
            remedy="Resume with those; or pass ignore_data_skip=True, which begins the next epoch.",
        )


def _check_trainer(trainer: Any) -> None:
    """Raise on what an order cannot work with, before anything is made."""
    for wrong, came, remedy in (
        (isinstance(trainer.train_dataset, IterableDataset), "an iterable train_dataset", "Use a map-style dataset."),
        (trainer.args.n_gpu > 1, "nn.DataParallel over several GPUs", "Start with torchrun, one process per GPU."),
        (trainer.is_fsdp_enabled, "FSDP", "Use DistributedDataParallel, or fully_shard() in your own loop."),
        (trainer.is_deepspeed_enabled, "DeepSpeed", "Use DistributedDataParallel."),
        (
            getattr(trainer.args, "train_sampling_strategy", "random") != "random",
            f"train_sampling_strategy={getattr(trainer.args, 'train_sampling_strategy', None)!r} with order=",
            "Leave it out: the order determines the sequence of examples.",
        ),
    ):
        if wrong:
            raise InputError(
                f"{came} in an OrderedTrainer", expected="one order of all examples, on one device each", remedy=remedy
            )
