"""How much is materialised at a time; where memory runs out all the same, half as much is tried."""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ordain.errors import MemoryLimitError, OrdainError

CHUNK_NUMBERS = 2**22  # 16 MB of float32: the most that is materialised at a time
HALVINGS = 8  # 64 kB at a time: where that does not fit, less does not help
_buffers = threading.local()
_halved = contextvars.ContextVar("halved", default=0)  # how often, in the work that is going on

Answer = TypeVar("Answer")


def chunk_numbers() -> int:
    """How many numbers to materialise at a time."""
    return max(1, CHUNK_NUMBERS >> _halved.get())


def scratch(*shape: int, like: Tensor, name: str = "rows") -> Tensor:
    """A buffer whose contents are no longer needed when the next one of this name is asked for, in this thread.

    It is reused: fresh memory costs a fault for every page.
    """
    numbers = math.prod(shape)
    if like.device.type != "cpu" or numbers > CHUNK_NUMBERS:
        return like.new_empty(shape)
    buffer: Tensor | None = getattr(_buffers, name, None)
    if buffer is None or buffer.dtype is not like.dtype or buffer.numel() < numbers or buffer.is_inference():
        setattr(_buffers, name, None)  # before more is asked for
        buffer = like.new_empty(numbers)
        setattr(_buffers, name, buffer)
    return buffer[:numbers].view(shape)


def few_examples(size: int) -> int | None:
    """How many of ``size`` examples to take at a time, for what is as large as its examples; None is all of them."""
    return max(1, size >> _halved.get()) if _halved.get() else None


def out_of_memory(error: BaseException) -> bool:
    """Is this memory that has run out? torch's CPU allocator says so in a plain RuntimeError."""
    if isinstance(error, OrdainError):
        return False  # a limit that was set, or memory that was given up on already
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "not enough memory" in str(error)
    )


def shrinking(job: Callable[[], Answer]) -> Answer:
    """Do ``job``; where memory runs out do it again, from the start, with half as much materialised at a time.

    So it must leave nothing behind that a second start would count twice.
    """
    before = _halved.get()
    for halved in range(before, max(before, HALVINGS) + 1):
        token = _halved.set(halved)
        try:
            return job()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            said = str(error)
        finally:
            _halved.reset(token)
        # The error is released here, and with it all that its frames hold.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
    raise _given_up(said)


def in_pieces(size: int, add: Callable[[int, int], None]) -> None:
    """``add(lo, hi)`` over all of ``range(size)``: at once or, where memory runs out, in halves.

    For sums that are added to what is there, so that nothing can be done twice: each call must have added all or
    nothing when memory runs out, which it has if it allocates all it needs before it adds.
    """
    lo, step = 0, max(1, size)
    while lo < size:
        try:
            add(lo, min(lo + step, size))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            said = str(error)
        else:
            lo += step
            continue
        if step == 1:
            raise _given_up(said)
        step = -(-step // 2)


def _given_up(said: str) -> MemoryLimitError:
    first = (said or "it ran out").splitlines()[0][:200]
    return MemoryLimitError(
        f"not enough memory for per-example gradients, even a few at a time ({first})",
        expected="memory for the inputs and output gradients of the layers, in addition to the model",
        remedy="Take smaller batches, order by fewer parameters with params=, or free memory. What was learned so far "
        "is kept; to continue with the next batch, call order.skip(len(x)) for the one that failed.",
    )
