"""Hugging Face Accelerate: a loader that is prepared, but not sharded again."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from ordain.errors import ArgumentError, InputError
from ordain.integrations.packages import require
from ordain.integrations.samplers import check_sampler
from ordain.orders import Order

require("accelerate", extra="accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.data_loader import prepare_data_loader  # noqa: E402

__all__ = ["prepare"]


def prepare(accelerator: Accelerator, order: Order, loader: DataLoader[Any]) -> DataLoader[Any]:
    """Prepare an order's loader; use it instead of ``accelerator.prepare(loader)``.

    It moves batches to the device and tracks the end of the epoch, but does not shard: ``order.sampler`` already gives
    each process its own shard, so ``batch_size`` is that of one process. ``even_batches`` (see ``tail=``) and
    ``use_stateful_dataloader`` (see ``order.resume()``) have no effect.

    Args:
        accelerator: the accelerator, created before the order.
        order: the order whose sampler the loader draws from.
        loader: the DataLoader, not prepared yet.
    """
    if not isinstance(order, Order):
        raise ArgumentError(
            f"an order of type {type(order).__name__}",
            expected="an accelerator, an order and a loader",
            remedy="Write prepare(accelerator, order, loader).",
        )
    ranks = accelerator.num_processes
    for name in ("split_batches", "dispatch_batches"):
        if ranks > 1 and getattr(accelerator, name):
            raise InputError(
                f"an Accelerator with {name}=True",
                expected="a loader for each process, with the batch size of one process",
                remedy=f"Leave {name}=True out of DataLoaderConfiguration (in transformers, accelerator_config=).",
            )
    check_sampler(
        order,
        loader,
        ranks=ranks,
        remedy="Create the order after the Accelerator, which initialises torch.distributed, and write "
        "DataLoader(dataset, batch_size=..., sampler=order.sampler).",
    )
    return prepare_data_loader(  # type: ignore[no-any-return]
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=False,
        non_blocking=accelerator.non_blocking,
    )
