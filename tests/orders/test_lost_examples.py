"""What came out of the loader and was not observed is noticed, and what was only read ahead is not spoken of."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import gradient_field, reference_orders, same_state, small_model
from loader_kinds import BATCH, LOADERS, N, all_but_one, loader_of, told
from runs import Indexed
from thread_ranks import run_ranks
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Sampler

from ordain import Deterministic, GraB
from ordain.distributed import Distributed
from ordain.errors import OrdainWarning, StepError

EPOCHS = 3
LOOPS: dict[str, dict[str, Any]] = {"plain": {}, "workers": {"num_workers": 2}, "persistent": {"num_workers": 1}}
LOOPS["persistent"]["persistent_workers"] = True


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_that_is_passed_over_is_noticed_at_the_next_step(loop: str, stateful: bool) -> None:
    order = GraB(None, N)
    loader = loader_of(order, stateful=stateful, **LOOPS[loop])
    for _ in range(2):
        for batch in loader:
            told(order, batch)
    for number, batch in enumerate(loader):
        if number == 2:
            continue
        if number == 3:
            before = order.state_dict()
            with pytest.raises(StepError, match=r"4 fewer than the loader has handed out.*order\.skip\(len\(x\)\)"):
                told(order, batch)
            assert same_state(order.state_dict(), before)
            order.skip(BATCH)  # what it says works
        told(order, batch)
    assert sorted(order.sampler) == list(range(N))


@pytest.mark.parametrize("ran", ["not run", "forward only", "backward too"])
@pytest.mark.parametrize("held", [0, 2])
@pytest.mark.parametrize("gradients", ["exact", "func"])
def test_a_batch_that_is_skipped_while_another_waits(gradients: str, held: int, ran: str) -> None:
    """Batch ``held`` is accumulated; the one after it is skipped; the others are stepped: as if observed one by one."""
    model, twin = small_model(), small_model()
    orders = [GraB(one, N, gradients=gradients) for one in (model, twin)]
    loaders = [loader_of(order) for order in orders]
    for number, ((x, y, _), _) in enumerate(zip(*loaders, strict=True)):
        if number == held + 1:
            if ran != "not run":
                loss = cross_entropy(model(x), y)
                if ran == "backward too":
                    loss.backward()
            for order in orders:
                order.skip(len(x))
            continue
        cross_entropy(model(x), y).backward()
        cross_entropy(twin(x), y).backward()
        orders[1].step()
        if number != held:
            orders[0].step()
    assert same_state(*(order.state_dict() for order in orders))
    assert list(orders[0].sampler) == list(orders[1].sampler)


@pytest.mark.parametrize("forward", [False, True])
def test_a_batch_without_a_backward_is_noticed(forward: bool) -> None:
    model = small_model()
    order = GraB(model, N)

    def one_pass() -> None:
        for number, (x, y, _) in enumerate(loader_of(order)):
            if number == 2:
                if forward:
                    model(x)
                continue
            cross_entropy(model(x), y).backward()
            if number != 1:
                order.step()

    with pytest.raises(StepError, match="4 fewer than the loader has handed out"):
        one_pass()


class Skip(Sampler[list[int]]):
    """As Accelerate's skip_first_batches: draws and discards."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self.batches, 2, None)


def test_skipping_the_first_batches_of_a_resumed_epoch() -> None:
    order = GraB(None, N)
    batches = BatchSampler(order.sampler, BATCH, drop_last=False)
    loader = iter(DataLoader(Indexed(N), batch_sampler=Skip(batches)))
    told(order, next(loader))
    with pytest.raises(StepError, match=r"8 fewer.*order\.resume\(\) instead of"):
        told(order, next(loader))


def ahead(loader: Any) -> Iterator[Any]:
    """One batch ahead, as Accelerate's and Lightning's loops are."""
    iterator = iter(loader)
    current = next(iterator)
    for following in iterator:
        yield current
        current = following
    yield current


def chunks(loader: Any) -> Iterator[Any]:
    iterator = iter(loader)
    while chunk := list(itertools.islice(iterator, 3)):
        yield from chunk


def in_a_thread(loader: Any) -> Iterator[Any]:
    found: list[Any] = []
    iterator = iter(loader)
    for count in (1, 3, 9):
        thread = threading.Thread(target=lambda count=count: found.extend(itertools.islice(iterator, count)))
        thread.start()
        thread.join()
        yield from found
        found.clear()


READERS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "plain": iter,
    "ahead": ahead,
    "chunks": chunks,
    "list": lambda loader: iter(list(loader)),
    "thread": in_a_thread,
    "pairs": lambda loader: (one for two in itertools.zip_longest(*[iter(loader)] * 2) for one in two if one),
}


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"num_workers": 2}, {"stateful": True}])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("reader", READERS)
def test_loops_that_read_ahead_are_right(reader: str, parts: int, options: dict[str, Any]) -> None:
    """No word of what is drawn ahead, accumulated, taken in parts or dropped at the end; and the order is the same."""
    order, field = GraB(None, N), gradient_field(N, 3)
    first = order.history(0).tolist()
    loader = loader_of(order, **options)
    for epoch in range(EPOCHS):
        for batch in READERS[reader](loader):
            for part in np.array_split(batch[2].numpy(), parts):
                order.observe(np.stack([field(int(i), epoch) for i in part]))
    if "drop_last" not in options:
        wanted = reference_orders(field, first, 3, EPOCHS, paired=False, balancer=Deterministic())
        assert list(order.sampler) == wanted[-1]


@pytest.mark.parametrize("options", LOOPS.values(), ids=list(LOOPS))
@pytest.mark.parametrize("reader", ["plain", "ahead"])
def test_a_pass_that_is_left_is_not_spoken_of(reader: str, options: dict[str, Any]) -> None:
    order = GraB(None, N)
    loader = loader_of(order, **options)
    for stop in (1, 2, 3):
        for number, batch in enumerate(READERS[reader](loader)):
            if number == stop:
                break
            told(order, batch)
    assert order.epoch == 2


CAUSES: dict[str, tuple[int, set[int], dict[str, Any]]] = {
    "the first batch is passed over": (BATCH, {0}, {}),
    "and the last": (BATCH, {0, 4}, {"drop_last": True}),
    "collate_fn drops": (1, set(), {"collate_fn": all_but_one}),
    "collate_fn drops, in workers": (1, set(), {"collate_fn": all_but_one, "num_workers": 2}),
    "the first, with workers": (BATCH, {0}, {"num_workers": 2}),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_what_was_not_observed_is_reported_when_the_pass_is_over(cause: str) -> None:
    missing, passed, options = CAUSES[cause]
    order = GraB(None, N)
    loader = loader_of(order, **options)

    def one_pass() -> None:
        for number, batch in enumerate(loader):
            if number not in passed:
                told(order, batch)

    one_pass()
    message = rf"GraB: {missing} examples of epoch 0 were drawn by the loader but not observed"
    message += r".*skip\(len.*collate_fn.*indices.*batch_dim"
    with pytest.warns(OrdainWarning, match=message) as said:
        one_pass()
    assert len(said) == 1
    one_pass()  # said once


def test_a_batch_size_that_was_misread_is_noticed() -> None:
    order = GraB(None, N)
    loader = iter(loader_of(order))
    next(loader)
    order.observe(np.ones((2, 3)))
    next(loader)
    with pytest.raises(StepError, match=r"4 fewer than the loader has handed out.*pass batch_dim="):
        order.observe(np.ones((2, 3)))


def test_a_batch_sampler_that_reads_ahead_is_spoken_of() -> None:
    order = GraB(None, N)
    loader = DataLoader(Indexed(N), **LOADERS["buckets"](order.sampler))
    batches = iter(loader)
    told(order, next(batches))
    with pytest.warns(OrdainWarning, match=r"several batches at once.*step\(indices=\.\.\.\)"):
        told(order, next(batches))
    for batch in itertools.chain(batches, loader):
        told(order, batch)  # said once


def test_a_rank_notices_too() -> None:
    def job(ranks: Any) -> None:
        order = GraB(None, 4 * N, distributed=Distributed(ranks=ranks))
        loader = iter(DataLoader(Indexed(4 * N), batch_size=BATCH, sampler=order.sampler))
        for number in range(2):
            next(loader)
            order.observe(np.ones((BATCH, 3)) * number)
        next(loader)
        next(loader)
        with pytest.raises(StepError, match="4 fewer than the loader has handed out"):
            order.observe(np.ones((BATCH, 3)))

    run_ranks(2, job)
