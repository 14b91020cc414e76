"""Whatever the loader, the orders and the weights are those of the plain one in a single process."""

from __future__ import annotations

import itertools
import multiprocessing
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import pytest
import torch
from helpers import gradient_field, is_permutation
from runs import BATCH, EPOCHS, Indexed, N, Run
from torch import Tensor, nn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, Subset

from ordain import GraB, reference
from ordain.errors import StepError
from ordain.herding import reorder

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes:UserWarning")

WORKERS: dict[str, dict[str, Any]] = {
    "1 worker, prefetch 1": {"num_workers": 1, "prefetch_factor": 1},
    "1 persistent worker, prefetch 2": {"num_workers": 1, "prefetch_factor": 2, "persistent_workers": True},
    "2 workers, prefetch 2": {"num_workers": 2, "prefetch_factor": 2},
    "2 persistent workers, prefetch 3": {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True},
    "4 workers, prefetch 1": {"num_workers": 4, "prefetch_factor": 1},
    "4 persistent workers, prefetch 4": {"num_workers": 4, "prefetch_factor": 4, "persistent_workers": True},
}


def same(found: Run, wanted: Run) -> None:
    assert found.seen == wanted.seen
    assert found.end() == wanted.end()


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("workers", WORKERS)
def test_workers_and_prefetching_change_nothing(workers: str, stateful: bool) -> None:
    options = {"drop_last": stateful}  # a plain loader that drops the last batch: test_a_batch_sampler
    same(Run("grab", stateful=stateful, **WORKERS[workers], **options).go(), Run("grab", **options).go())


@pytest.mark.parametrize("name", ["grab-pair", "herding", "rr", "flipflop", "grab-1step"])
def test_every_kind_of_order_under_workers(name: str) -> None:
    same(Run(name, num_workers=2, prefetch_factor=4, persistent_workers=True).go(), Run(name).go())


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler(workers: int, drop_last: bool) -> None:
    run = Run("grab", num_workers=workers)
    sampler = BatchSampler(run.order.sampler, BATCH, drop_last=drop_last)
    run.loader = DataLoader(Indexed(N), batch_sampler=sampler, num_workers=workers)
    same(run.go(), Run("grab", drop_last=drop_last).go())


def test_examples_one_by_one() -> None:
    """batch_size=None: the sampler's indices without batches."""
    run = Run("grab")
    run.loader = DataLoader(Indexed(N), batch_size=None, sampler=run.order.sampler)
    wanted = Run("grab", batch_size=1).go()
    for _ in range(EPOCHS):
        for x, y, index in run.loader:
            run.step(x[None], y[None], torch.tensor([index]))
    same(run, wanted)


@pytest.mark.parametrize("kind", ["subset", "concat"])
@pytest.mark.parametrize("workers", [0, 2])
def test_subsets_and_concatenations(kind: str, workers: int) -> None:
    """Indices are those of the dataset that the loader has, whatever it is made of."""
    examples = Indexed(N)
    shuffled = [7, 3, 12, 0, 9, 14, 1, 5, 10, 2, 8]
    pieces: Dataset[Any] = Subset(Indexed(15), shuffled) if kind == "subset" else ConcatDataset([examples, Indexed(4)])
    plain = [pieces[i] for i in range(len(pieces))]  # type: ignore[arg-type]

    def run(data: Any, **options: Any) -> Run:
        found = Run("grab")
        found.order.detach()
        found.order = GraB(found.model, data, seed=1)
        found.loader = DataLoader(data, batch_size=BATCH, sampler=found.order.sampler, **options)
        return found.go()

    same(run(pieces, num_workers=workers), run(plain))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["break", "islice"])
def test_epochs_of_differing_length(how: str, workers: int) -> None:
    """Each epoch stops somewhere else; what was not reached keeps the middle of the next, in its order."""
    lengths = (2, 4, 1, 3, 4)

    def run(**options: Any) -> tuple[list[list[int]], GraB]:
        order = GraB(None, N)
        field = gradient_field(N, 3)
        loader: DataLoader[Any] = DataLoader(range(N), batch_size=BATCH, sampler=order.sampler, **options)  # type: ignore[arg-type]
        seen = []
        for epoch, length in enumerate(lengths):
            epoch_seen: list[int] = []
            for number, batch in enumerate(itertools.islice(loader, length) if how == "islice" else loader):
                order.observe(np.stack([field(i, epoch) for i in batch.tolist()]))
                epoch_seen += batch.tolist()
                if number + 1 == length:
                    break
            seen.append(epoch_seen)
        return seen, order

    seen, order = run(num_workers=workers)
    field, sigma, mean = gradient_field(N, 3), GraB(None, N).history(0), np.zeros(3)
    for epoch, found in enumerate(seen):
        assert found == sigma[: len(found)].tolist() == order.history(epoch)[: len(found)].tolist()
        gradients = [field(i, epoch) for i in found]
        signs = reference.balance([g - mean for g in gradients], reference.deterministic) or []
        sigma, mean = reorder(np.array(signs + [0] * (N - len(found))), sigma), np.mean(gradients, axis=0)
    assert list(order.sampler) == sigma.tolist()


@pytest.mark.filterwarnings("ignore:GraB. no gradients were observed:ordain.errors.OrdainWarning")
@pytest.mark.parametrize("options", [{}, WORKERS["2 workers, prefetch 2"], WORKERS["2 persistent workers, prefetch 3"]])
def test_an_evaluation_through_the_same_loader_between_epochs(options: dict[str, Any]) -> None:
    run, wanted = Run("grab", **options), Run("grab").go()
    for _ in range(EPOCHS):
        for batch in run.loader:
            run.step(*batch)
        run.model.eval()
        with torch.no_grad():
            evaluated = [index for x, _, indices in run.loader for index in indices.tolist() if len(run.model(x))]
        run.model.train()
        assert is_permutation(evaluated, N)
    assert run.seen == wanted.seen
    assert torch.equal(*(nn.utils.parameters_to_vector(one.model.parameters()) for one in (run, wanted)))


def test_two_loaders_with_orders_of_their_own_take_turns() -> None:
    runs = [Run("grab"), Run("grab-pair")]
    for _ in range(EPOCHS):
        for batches in zip(*(run.loader for run in runs), strict=True):
            for run, batch in zip(runs, batches, strict=True):
                run.step(*batch)
    for run, name in zip(runs, ("grab", "grab-pair"), strict=True):
        same(run, Run(name).go())


def test_two_loaders_of_one_order_in_turn() -> None:
    """One after the other they are one loader; in the middle of an epoch the older one is refused."""
    run, wanted = Run("grab"), Run("grab").go()
    loaders = [run.loader, DataLoader(Indexed(N), batch_size=BATCH, sampler=run.order.sampler, num_workers=1)]
    for epoch in range(EPOCHS):
        for batch in loaders[epoch % 2]:
            run.step(*batch)
    same(run, wanted)
    first, second = (iter(run.loader) for _ in range(2))
    run.step(*next(first))
    run.step(*next(second))  # a new pass: the next epoch
    with pytest.raises(StepError, match="one live iterator"):
        next(first)
    for batch in second:
        run.step(*batch)
    assert is_permutation(run.seen[-N:], N)


@pytest.mark.filterwarnings("ignore:GraB. no gradients were observed:ordain.errors.OrdainWarning")  # all is prefetched
def test_a_look_at_a_loader_with_workers_costs_nothing() -> None:
    run = Run("grab", **WORKERS["2 workers, prefetch 2"])
    next(iter(run.loader))
    same(run.go(), Run("grab").go())


class Held(Dataset[int]):
    """Examples of which some are not ready until told so."""

    def __init__(self, held: set[int], ready: Event) -> None:
        self.held, self.ready = held, ready

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        if index in self.held:
            self.ready.wait(timeout=60)
        return index


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_batches_out_of_order_are_exact_through_indices(centering: Any) -> None:
    """in_order=False, and the first batch of each epoch comes late: signs go to the examples that are named."""

    def learn(order: GraB, batch: Tensor, epoch: int) -> None:
        indices = batch.tolist()
        order.observe(np.stack([field(i, epoch) for i in indices]), indices=indices)

    field = gradient_field(N, 3)
    order, twin = GraB(None, N, centering=centering), GraB(None, N, centering=centering)
    for epoch in range(EPOCHS):
        following = order.history(0).tolist() if not epoch else None
        if following is None:  # what the next pass will visit, from a copy
            copied = GraB(None, N, centering=centering)
            copied.load_state_dict(order.state_dict())
            following = list(copied.sampler)
        ready = multiprocessing.Event()
        data = Held(set(following[:BATCH]), ready)
        arrived = []
        for batch in DataLoader(data, BATCH, sampler=order.sampler, num_workers=2, in_order=False):
            ready.set()  # something has overtaken the first batch
            learn(order, batch, epoch)
            arrived.append(batch)
        assert arrived[0].tolist() != following[:BATCH]
        assert is_permutation(torch.cat(arrived).tolist(), N)
        list(twin.sampler)
        for batch in arrived:
            learn(twin, batch, epoch)
        assert list(order.history(epoch)) == list(twin.history(epoch))
    assert list(order.sampler) == list(twin.sampler)


@pytest.mark.filterwarnings("ignore:GraB. no gradients were observed:ordain.errors.OrdainWarning")  # all is prefetched
def test_batches_out_of_order_are_refused_by_step() -> None:
    """With one worker, or none, there is nobody to overtake."""
    run = Run("grab", num_workers=2, in_order=False)
    with pytest.raises(StepError, match=r"in_order=False.*observe\(grads, indices=\.\.\.\)"):
        run.go()
    before = run.order.state_dict()
    assert (before["taken"], before["touched"]) == (0, False)
    run.loader = DataLoader(Indexed(N), BATCH, sampler=run.order.sampler, num_workers=1, in_order=False)
    run.seen, run.steps = [], 0
    run.model.zero_grad()
    same(run.go(), Run("grab").go())


def test_out_of_order_signs_are_those_of_the_reference() -> None:
    field = gradient_field(N, 3)
    order = GraB(None, N)
    drawn = list(order.sampler)
    arrived = drawn[3:6] + drawn[:3] + drawn[9:] + drawn[6:9]
    for part in (arrived[:3], arrived[3:6], arrived[6:8], arrived[8:]):
        order.observe(np.stack([field(i, 0) for i in part]), indices=part)
    signs = dict(
        zip(arrived, reference.balance([field(i, 0) for i in arrived], reference.deterministic) or [], strict=True)
    )
    assert list(order.sampler) == reorder(np.array([signs[i] for i in drawn]), np.array(drawn)).tolist()
