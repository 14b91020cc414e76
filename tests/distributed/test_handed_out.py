"""A rank whose loader does not hand out exactly the indices that it was dealt is refused, by name, with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import gradient_field
from runs import Indexed
from thread_ranks import run_ranks
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ordain import GraB, RandomReshuffling
from ordain.distributed import Distributed
from ordain.errors import InputError, StateError, StepError
from ordain.orders import Order

N, BATCH = 48, 3
KINDS: dict[str, Callable[[Any], Order]] = {
    "learns": lambda rule: GraB(None, N, distributed=rule),
    "does not": lambda rule: RandomReshuffling(N, distributed=rule),
}
LOADERS: dict[str, dict[str, Any]] = {"plain": {}, "stateful": {"kind": StatefulDataLoader}}


class EveryOther(Sampler[list[int]]):
    """Hands out one batch of two, as Accelerate's BatchSamplerShard does, and does not say so."""

    def __init__(self, batches: BatchSampler) -> None:
        self._batches, self.batch_size = batches, batches.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self._batches):
            if number % 2 == 0:
                kept = batch
            else:
                yield kept


class Halves(EveryOther):
    """Hands out half of each batch, as ``split_batches=True`` does, and does not say so."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            yield batch[: self.batch_size // 2]


class Around(BatchSampler):
    """A batch sampler around another, with what its kind is known by."""

    def __init__(self, batches: BatchSampler, **known: int) -> None:
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        self.batch_sampler = batches
        vars(self).update(known)


def epoch(order: Order, **options: Any) -> list[int]:
    """One pass over a loader, as a user's loop; what the loop saw."""
    kind = options.pop("kind", DataLoader)
    seen: list[int] = []
    for _, _, index in kind(Indexed(N), **options):
        seen += index.tolist()
        order.observe(np.stack([gradient_field(N, 3)(int(i), 0) for i in index]))
    return seen


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_plain_loaders_hand_out_what_was_dealt(ranks: int, kind: str, loader: str) -> None:
    def job(one: Any) -> list[list[int]]:
        order = KINDS[kind](Distributed(ranks=one))
        seen = [epoch(order, batch_size=BATCH, sampler=order.sampler, **LOADERS[loader]) for _ in range(3)]
        assert seen == [order.history(number)[one.rank :: ranks].tolist() for number in range(3)]
        return seen

    for number, parts in enumerate(zip(*run_ranks(ranks, job), strict=True)):
        assert sorted(chain.from_iterable(parts)) == list(range(N)), number


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("known", "error", "message"),
    [
        (
            {"num_processes": 2, "process_index": 0},
            InputError,
            "a Around around.*each of 2 processes.*accelerate.prepare",
        ),
        ({"skip_batches": 2}, StateError, r"draws 2 batches and discards them.*order\.resume\(\)"),
    ],
)
def test_batch_samplers_that_are_known(known: Any, error: Any, message: str, kind: str, loader: str) -> None:
    def job(one: Any) -> None:
        order = KINDS[kind](Distributed(ranks=one))
        batches = Around(BatchSampler(order.sampler, BATCH, drop_last=False), **known)
        with pytest.raises(error, match=message):
            epoch(order, batch_sampler=batches, **LOADERS[loader])
        assert order.epoch == 0

    run_ranks(2, job)


def test_one_process_is_not_several() -> None:
    order = RandomReshuffling(N)
    batches = Around(BatchSampler(order.sampler, BATCH, drop_last=False), num_processes=1, skip_batches=0)
    assert epoch(order, batch_sampler=batches) == order.history(0).tolist()


def test_a_distributed_sampler_around_an_order_of_one_process() -> None:
    """What Lightning does to a sampler that is none itself."""

    class Wrapped(DistributedSampler[Any]):
        def __init__(self, sampler: Any) -> None:
            super().__init__(sampler, num_replicas=2, rank=0, shuffle=False)

        def __iter__(self) -> Iterator[int]:
            drawn, mine = list(self.dataset), super().__iter__()
            return (drawn[i] for i in mine)

    order = RandomReshuffling(N, distributed=False)
    with pytest.raises(InputError, match=r"a Wrapped around order\.sampler.*lightning\.OrderCallback"):
        epoch(order, batch_size=BATCH, sampler=Wrapped(order.sampler))


def test_a_dispatcher() -> None:
    class DataLoaderDispatcher:
        """As Accelerate's: rank 0 draws, and gives to all."""

        state = SimpleNamespace(num_processes=2)

        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            yield from self.loader

    order = RandomReshuffling(N)
    with pytest.raises(InputError, match=r"dispatch_batches=True.*sends what rank 0 draws to 2 processes"):
        list(DataLoaderDispatcher(DataLoader(Indexed(N), batch_size=BATCH, sampler=order.sampler)))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_sampler_that_nobody_knows(kind: str, loader: str) -> None:
    def job(one: Any) -> None:
        order = KINDS[kind](Distributed(ranks=one))
        batches = EveryOther(BatchSampler(order.sampler, BATCH, drop_last=False))
        with pytest.raises(
            InputError, match=r"draws 6 indices for a batch of 3, on one of several ranks.*not shard it"
        ):
            epoch(order, batch_sampler=batches, **LOADERS[loader])

    run_ranks(2, job)


def test_a_batch_sampler_that_gives_a_part_of_each_batch() -> None:
    def job(one: Any) -> None:
        order = KINDS["learns"](Distributed(ranks=one))
        batches = Halves(BatchSampler(order.sampler, 4, drop_last=False))
        with pytest.raises(StepError, match="fewer than the loader has handed out"):
            epoch(order, batch_sampler=batches)

    run_ranks(2, job)


@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"even_batches": False}], ids=str)
def test_accelerate_s_own(options: dict[str, bool]) -> None:
    found = pytest.importorskip("accelerate.data_loader", reason="Accelerate is not installed")

    def job(one: Any) -> None:
        order = KINDS["does not"](Distributed(ranks=one))
        batches = BatchSampler(order.sampler, 4, drop_last=False)
        shard = found.BatchSamplerShard(batches, num_processes=2, process_index=one.rank, **options)
        with pytest.raises(InputError, match="a BatchSamplerShard around"):
            epoch(order, batch_sampler=shard)
        with pytest.raises(StateError, match=r"a SkipBatchSampler around.*draws 2 batches"):
            epoch(order, batch_sampler=found.SkipBatchSampler(batches, 2))
        assert (
            epoch(order, batch_sampler=found.SkipBatchSampler(batches, 0)) == order.history(0)[one.rank :: 2].tolist()
        )

    run_ranks(2, job)
