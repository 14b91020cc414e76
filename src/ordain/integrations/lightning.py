"""Lightning: a callback that steps an order, and saves it in every checkpoint."""

from __future__ import annotations

from typing import Any

from ordain.errors import ArgumentError, InputError, StateError, StepError
from ordain.integrations.packages import require
from ordain.integrations.samplers import check_sampler
from ordain.orders import Order

require("lightning", extra="lightning")

from lightning.pytorch.callbacks import Callback  # noqa: E402
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402
from lightning.pytorch.utilities.data import extract_batch_size  # noqa: E402

__all__ = ["OrderCallback"]

_KEY = "ordain"
_MAKE = (
    "Create the order in setup() of the LightningModule, as self.order, and return DataLoader(..., "
    "sampler=self.order.sampler) from train_dataloader()."
)


class OrderCallback(Callback):
    """Calls ``order.step()`` after the backward of each batch, and saves and loads the order with the model.

    Args:
        order: the order whose sampler the training loader draws from. By default, the attribute ``order`` of the
            LightningModule or, if it has none, of the LightningDataModule. An order created in ``setup()`` is shared
            by all processes.
    """

    def __init__(self, order: Order | None = None) -> None:
        if order is not None and not isinstance(order, Order):
            raise ArgumentError(
                f"an order of type {type(order).__name__}",
                expected="an order, or nothing",
                remedy="Write OrderCallback(order), or OrderCallback() with self.order in the LightningModule.",
            )
        self._order = order
        self._live: Order | None = None  # the order of this fit
        self._observed = False  # was there a backward in this batch?
        self._seen = False  # was there one in this fit?
        self._scale = (
            1.0  # of the gradient scaler in that backward: manual optimisation changes it before the batch ends
        )

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Move and convert the model before its own ``setup()`` makes an order of it; Lightning would do so after."""
        if stage == "fit" and isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
            pl_module.to(trainer.strategy.root_device)
            if isinstance(trainer.precision_plugin, (HalfPrecision, DoublePrecision)):  # precision="bf16-true"
                trainer.precision_plugin.convert_module(pl_module)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Continue where the checkpoint stood; before the loader draws."""
        if trainer.state.fn != "fit":
            return
        if _KEY not in checkpoint:
            raise StateError(
                "a checkpoint without an order",
                expected="a checkpoint of a Trainer with an OrderCallback",
                remedy="Load only the model with load_from_checkpoint(), and start a new fit().",
            )
        order = self._found(trainer, pl_module)
        order.load_state_dict(checkpoint[_KEY])
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        # With limit_train_batches or drop_last an epoch is over before all of its examples are done.
        order.resume(order.n if progress["is_last_batch"] else None)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the order into the checkpoint."""
        order = self._found(trainer, pl_module)
        state = order.state_dict()
        if "rank" in state and trainer.world_size > 1:
            raise StateError(
                "a checkpoint of an order with distributed='independent'",
                expected="an order that is the same on all ranks, since one rank writes for all",
                remedy="Leave distributed='independent' out, or save each rank's order yourself.",
            )
        checkpoint[_KEY] = state

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the order and its loader."""
        self._live, self._seen = self._checked(trainer, pl_module), False

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise if the loader was replaced (reload_dataloaders_every_n_epochs) by one of another order."""
        if self._checked(trainer, pl_module) is not self._live:
            raise InputError(
                "a different order from the last epoch's",
                expected="one order for the whole fit",
                remedy="Leave reload_dataloaders_every_n_epochs out, or create the order in setup().",
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A new batch: no backward yet."""
        self._observed = False

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Learn from the batch, before the optimizer changes the weights."""
        self._observed = self._seen = True
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # precision="16-mixed"
        self._scale = 1.0 if scaler is None else scaler.get_scale()
        if pl_module.automatic_optimization and self._live is not None:
            self._live.step(loss_scale=self._scale / trainer.accumulate_grad_batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Learn from a batch of manual optimisation, all of its backward passes together; pass over one without any."""
        if self._live is None:
            return
        if not self._observed:
            self._live.skip(extract_batch_size(batch))
        elif not pl_module.automatic_optimization:
            self._live.step(loss_scale=self._scale)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Raise if the optimizer steps after a backward that was not reported to callbacks."""
        self._check_backward(pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """The same for an optimizer that Lightning does not know."""
        self._check_backward(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the model as it was found."""
        if self._live is not None:
            self._live.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same if training breaks off."""
        self.on_train_end(trainer, pl_module)

    def _check_backward(self, pl_module: Any) -> None:
        if self._live is not None and not self._seen and not pl_module.automatic_optimization:
            raise StepError(
                "manual optimisation without self.manual_backward(loss)",
                expected="a backward that Lightning reports to its callbacks",
                remedy="Write self.manual_backward(loss) in place of loss.backward().",
            )

    def _found(self, trainer: Any, pl_module: Any) -> Order:
        order = self._order or getattr(pl_module, "order", None) or getattr(trainer.datamodule, "order", None)
        if isinstance(order, Order):
            return order
        raise InputError(
            "no order in OrderCallback(), in the LightningModule or in the LightningDataModule",
            expected="an attribute `order` of one of them",
            remedy=_MAKE,
        )

    def _checked(self, trainer: Any, pl_module: Any) -> Order:
        order, loader = self._found(trainer, pl_module), trainer.train_dataloader
        if isinstance(loader, (dict, list, tuple)):
            raise InputError(
                f"several training loaders (a {type(loader).__name__})",
                expected="one DataLoader that draws from order.sampler",
                remedy="Return that one from train_dataloader(), and draw from the others in training_step().",
            )
        check_sampler(order, loader, ranks=trainer.world_size, remedy=_MAKE)
        return order
