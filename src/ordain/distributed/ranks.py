"""The ranks of a run and what they say to each other: every collective is here, counted, and fails with a name.

GPU (nccl) is written for but untested: tensors go through the device that the group's backend needs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ordain.errors import InputError, RanksError

Raised = TypeVar("Raised", bound=BaseException)
_ERROR = "error"


class Ranks(Protocol):
    """W processes (or threads, in tests) that call the same methods in the same sequence."""

    rank: int
    size: int
    sent: int  # bytes that this rank has handed over so far
    calls: int  # in how many collectives

    def gather(self, tensor: Tensor) -> Tensor:
        """``[...]`` of the same shape everywhere to ``[W, ...]``, the same everywhere."""

    def add(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by the sum over all ranks, the same everywhere."""


class ProcessRanks:
    """Over a process group.

    Args:
        group: the ranks. None: all of them, in a group of its own, so that nothing of the user's comes in between.
        timeout: seconds after which a rank that does not answer counts as lost; a group that is given has its own.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, timeout: float) -> None:
        self._within = f"within timeout={timeout:g} s" if group is None else "within its group's timeout"
        try:
            self._group = group if group is not None else dist.new_group(timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self._lost(f"{dist.get_rank()} of {dist.get_world_size()}", error) from error
        self.rank = dist.get_rank(self._group)
        if self.rank < 0:
            raise InputError(
                f"a group that rank {dist.get_rank()} is not in",
                expected="a group of which this process is a member",
                remedy="Create the order only on the ranks of the group.",
            )
        self.size = dist.get_world_size(self._group)
        self.sent = self.calls = 0
        backend = dist.get_backend(self._group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else None

    def gather(self, tensor: Tensor) -> Tensor:
        there = tensor.contiguous().to(self._device or tensor.device)
        every = there.new_empty(self.size, *there.shape)
        self._called(lambda: dist.all_gather(list(every.unbind()), there, group=self._group), there)
        return every.to(tensor.device)

    def add(self, tensor: Tensor) -> None:
        there = tensor.to(self._device or tensor.device)
        self._called(lambda: dist.all_reduce(there, group=self._group), there)
        if there is not tensor:
            tensor.copy_(there)

    def _called(self, collective: Callable[[], Any], tensor: Tensor) -> None:
        self.sent += tensor.numel() * tensor.element_size()
        self.calls += 1
        try:
            collective()
        except RuntimeError as error:
            raise self._lost(f"{self.rank} of {self.size}", error) from error

    def _lost(self, mine: str, error: RuntimeError) -> RanksError:
        return RanksError(
            f"no answer from another rank {self._within}, or it has ended (rank {mine}: {_short(error)})",
            expected="every rank to create the order and to call order.step() after each of its backward passes",
            remedy="Look for the first error among the ranks' logs: when one rank ends or raises, the others fail "
            "too. Restart under torchrun from the last saved state.",
        )


def agreed(error: Raised) -> Raised:
    """Mark an error that every rank raises at the same place: they are still in step with each other."""
    error.agreed = True  # type: ignore[attr-defined]
    return error


def disagreed(came: str, *, expected: str, remedy: str) -> RanksError:
    """An error that every rank raises, since all have heard the same."""
    return agreed(RanksError(came, expected=expected, remedy=remedy))


def failed_on(rank: object) -> RanksError:
    """What the ranks raise that were all right themselves."""
    return disagreed(
        f"an error in order.step() on {rank}",
        expected="a step of every rank",
        remedy="Its own message, in that rank's log, says what was wrong.",
    )


def gather_texts(ranks: Ranks, text: str) -> list[str]:
    """Every rank's text."""
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    lengths = ranks.gather(torch.tensor(len(data)))
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    padded[: len(data)] = data
    every = ranks.gather(padded)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(every, lengths.tolist(), strict=True)]


@contextmanager
def heard(ranks: Ranks) -> Iterator[None]:
    """What raises in here on one rank raises on those that wait for it in :func:`agree`, wherever that is."""
    try:
        yield
    except Exception as error:
        with suppress(RanksError):
            agree(ranks, {_ERROR: f"{type(error).__name__}: {error}"})
        raise


def agree(ranks: Ranks, facts: dict[str, Any]) -> None:
    """See :meth:`ordain.orders.view.View.agree`."""
    told = json.dumps(facts, sort_keys=True, default=str)
    digests = ranks.gather(torch.tensor(zlib.crc32(told.encode())))
    if len(set(digests.tolist())) == 1:
        return
    every = [json.loads(text) for text in gather_texts(ranks, told)]
    for name in sorted({name for one in every for name in one}, key=lambda name: (name != _ERROR, name)):
        values = [str(one.get(name)) for one in every]
        if len(set(values)) > 1:
            shown = [f"{value[:160]} on rank {rank}" for rank, value in enumerate(values[:8])]
            more = f", and {len(values) - 8} more" if len(values) > 8 else ""
            raise RanksError(
                f"ranks with different {name}: {', '.join(shown)}{more}",
                expected=f"the same {name} on every rank",
                remedy="Build the order with the same arguments, from the same data and model, on every rank.",
            )


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    # Without the file of torch's sources that some begin with.
    return lines[0].rpartition(".cc:")[2].partition("] ")[2][:160] or lines[0][:160] if lines else type(error).__name__
