"""Each gradient goes to its own example, whatever the loader and the loop do; or it is said that it cannot."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from given_source import GivenSource
from helpers import Regression, gradient_field, loop_gradients, reloaded, same_state, small_model
from loader_kinds import BATCH, LOADERS, N, loader_of, told
from runs import Indexed
from thread_ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Sampler, Subset

from ordain import GraB, Herding, RandomReshuffling, reference
from ordain.distributed import Distributed
from ordain.errors import GradientError, InputError, OrdainWarning, StepError
from ordain.herding import reorder
from ordain.orders import Order

EPOCHS = 3
LEARNERS: dict[str, Callable[[nn.Module | None], Order]] = {
    "mean": lambda model: GraB(model, N),
    "pair": lambda model: GraB(model, N, centering="pair"),
    "herding": lambda model: Herding(model, N),
}
FORMS: list[Callable[[Tensor], Any]] = [lambda index: index, lambda index: index.tolist(), lambda index: index.numpy()]


class Twins:
    """A model trained under an order, beside an order that is told the loop's gradients by name."""

    def __init__(self, learner: str = "mean") -> None:
        self.model = small_model()
        self.order, self.told = LEARNERS[learner](self.model), LEARNERS[learner](None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def backward(self, x: Tensor, y: Tensor, index: Tensor) -> None:
        self.told.observe(loop_gradients(copy.deepcopy(self.model), cross_entropy, x, y), indices=index)
        cross_entropy(self.model(x), y).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self) -> None:
        assert list(self.order.sampler) == list(self.told.sampler)


@pytest.mark.parametrize(("learner", "every"), [("mean", 1), ("mean", 3), ("pair", 3), ("herding", 1)])
@pytest.mark.parametrize("kind", LOADERS)
def test_examples_that_are_named(kind: str, learner: str, every: int) -> None:
    twins = Twins(learner)
    loader = DataLoader(Indexed(N), **LOADERS[kind](twins.order.sampler))
    for epoch in range(EPOCHS):
        list(twins.told.sampler)
        waiting: list[Tensor] = []
        for number, (x, y, index) in enumerate(loader):
            twins.backward(x, y, index)
            waiting.append(index)
            if len(waiting) == every or number == len(loader.dataset) // BATCH:  # type: ignore[arg-type]
                twins.order.step(indices=FORMS[epoch](torch.cat(waiting)))
                twins.update()
                waiting = []
    twins.check()


def test_signs_go_to_those_that_are_named() -> None:
    """Word for word: a sign each in the order of the batches, and the examples reordered by their own."""
    order = GraB(small_model(), N)
    model, sigma, mean = small_model(), order.history(0), np.zeros(39)
    data = Regression(N)
    for epoch in range(EPOCHS):
        assert list(order.sampler) == sigma.tolist() == order.history(epoch).tolist()
        seen = [int(i) for lo in range(0, N, BATCH) for i in sorted(sigma[lo : lo + BATCH])]
        rows = loop_gradients(model, cross_entropy, data.x[seen], data.y[seen]).numpy()
        signs = dict(zip(seen, reference.balance(rows - mean, reference.deterministic) or [], strict=True))
        for lo in range(0, N, BATCH):
            order.observe(rows[lo : lo + BATCH], indices=seen[lo : lo + BATCH])
        sigma, mean = reorder(np.array([signs[int(i)] for i in sigma]), sigma), rows.mean(axis=0)
    assert list(order.sampler) == sigma.tolist()


def test_a_named_batch_that_is_passed_over() -> None:
    twins = Twins()
    loader = DataLoader(Indexed(N), **LOADERS["buckets"](twins.order.sampler))
    for _ in range(EPOCHS):
        list(twins.told.sampler)
        before = torch.empty(0, dtype=torch.int64)
        for number, (x, y, index) in enumerate(loader):
            if number in (0, 3):  # after its backward, while that of the batch before waits
                cross_entropy(twins.model(x), y).backward()
                twins.order.skip(len(x), indices=index)
                continue
            twins.backward(x, y, index)
            if number != 2:
                twins.order.step(indices=index if number != 4 else torch.cat([before, index]))
            before = index
    twins.check()


def test_a_run_with_names_resumes() -> None:
    def run(order: Order, epochs: int, stop: int | None = None) -> list[int]:
        field, seen = gradient_field(N, 3), []
        loader = DataLoader(Indexed(N), **LOADERS["sorts"](order.sampler))
        for epoch in range(order.epoch, epochs):
            for _, _, index in loader:
                order.observe(np.stack([field(int(i), epoch) for i in index]), indices=index)
                seen += index.tolist()
                if len(seen) == stop:
                    return seen
        return seen

    whole, first, second = (LEARNERS["mean"](None) for _ in range(3))
    stopped = run(first, EPOCHS, N + 2 * BATCH)
    second.load_state_dict(reloaded(first.state_dict()))
    assert second.resume() == 1
    assert stopped + run(second, EPOCHS) == run(whole, EPOCHS)


NAMES: dict[str, tuple[Any, type[Exception], str]] = {
    "too few": ([0, 1, 2], InputError, r"indices of shape \(3,\).*one integer for each of the 4"),
    "too many": ([0, 1, 2, 3, 4], InputError, r"indices of shape \(5,\)"),
    "twice": ([0, 1, 2, 2], InputError, "repeated"),
    "out of range": ([0, 1, 2, N], InputError, "out of range"),
    "negative": ([0, 1, 2, -1], InputError, "out of range"),
    "floats": (np.ones(4), InputError, "dtype float64"),
    "objects": (np.array([None] * 4), InputError, "dtype object"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_none(name: str) -> None:
    given, error, message = NAMES[name]
    model = small_model()
    order = GraB(model, N)
    data, drawn = Regression(N), list(itertools.islice(order.sampler, BATCH))
    before = order.state_dict()
    for _ in range(2):  # accumulated: nothing of the first is learned either
        cross_entropy(model(data.x[drawn[:2]]), data.y[drawn[:2]]).backward()
    with pytest.raises(error, match=message):
        order.step(indices=given)
    assert same_state(order.state_dict(), before)


def test_names_of_examples_that_were_not_drawn_or_were_seen() -> None:
    order = GraB(None, N)
    iterator, sigma = iter(order.sampler), order.history(0).tolist()
    drawn = [next(iterator) for _ in range(BATCH)]
    for given, there in (([*drawn[1:], sigma[BATCH]], sigma[BATCH]), (drawn, None)):
        before = order.state_dict()
        if there is None:
            order.observe(np.ones((1, 3)), indices=drawn[-1:])
            before, there = order.state_dict(), drawn[-1]
        with pytest.raises(StepError, match=rf"example {there};.*not yet observed"):
            order.observe(np.ones((BATCH, 3)), indices=given)
        assert same_state(order.state_dict(), before)


@pytest.mark.parametrize("mode", ["step", "observe"])
def test_names_on_ranks_are_refused(mode: str) -> None:
    def job(ranks: Any) -> None:
        model = small_model()
        order = GraB(model, N, distributed=Distributed(ranks=ranks))
        drawn = list(order.sampler)[:2]
        cross_entropy(model(Regression(N).x[drawn]), Regression(N).y[drawn]).backward()
        with pytest.raises(InputError, match="indices= with an order that is coordinated over ranks"):
            order.step(indices=drawn) if mode == "step" else order.observe(np.ones((2, 39)), indices=drawn)

    run_ranks(2, job)


# --- the loader's dataset ---------------------------------------------------------------------------


@pytest.mark.parametrize("build", [lambda n: GraB(None, n), RandomReshuffling])
@pytest.mark.parametrize("n", [N - 1, N + 1])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"stateful": True}])
def test_an_order_of_another_length_than_the_dataset(build: Any, n: int, options: dict[str, Any]) -> None:
    order = build(n)
    before = order.state_dict()
    with pytest.raises(InputError, match=rf"n={n} examples in a loader whose dataset has {N};.*n={N}"):
        next(iter(loader_of(order, **options)))
    assert same_state(order.state_dict(), before)
    for right in (Subset(Indexed(N + 1), range(n)), Indexed(n)):
        assert next(iter(DataLoader(right, batch_size=2, sampler=order.sampler)))


def test_a_sampler_in_between_may_make_others_of_the_indices() -> None:
    order = GraB(None, 5)
    batches = [[2 * i, 2 * i + 1] for i in order.sampler]
    assert sorted(i for batch in DataLoader(range(10), batch_sampler=batches) for i in batch.tolist()) == [*range(10)]  # type: ignore[arg-type]

    class Twice(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return (2 * i for i in order.sampler)

    with pytest.warns(OrdainWarning, match="no gradients were observed"):
        assert len(list(DataLoader(Indexed(10), sampler=Twice()))) == 5


# --- other ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_micro_batches_with_one_step_after_several_backwards(centering: Any, every: int) -> None:
    """Each backward is a unit: the order is that of a loop over units."""
    group = BATCH
    model = small_model()
    order = GraB(model, N, centering=centering, group=group, gradients="microbatch")
    first = order.history(0)
    units = [first[lo : lo + group] for lo in range(0, N, group)]
    kind: Any = reference.PairGraB if centering == "pair" else reference.GraB
    book = kind(list(range(len(units))), 39)
    orders = [list(range(len(units)))]
    for _ in range(EPOCHS):
        visited: list[int] = []
        for number, (x, y, index) in enumerate(DataLoader(Indexed(N), batch_size=group, sampler=order.sampler)):
            visited += index.tolist()
            rows = loop_gradients(copy.deepcopy(model), cross_entropy, x, y)
            book.see(rows.mean(dim=0).numpy(), 0.0)
            cross_entropy(model(x), y).backward()
            if (number + 1) % every == 0 or number + 1 == len(units):
                order.step()
        assert visited == np.concatenate([units[u] for u in orders[-1]]).tolist()
        last = len(units) - 1  # the short unit stays last, where a loader has its short batch
        orders.append([*(u for u in book.next_order() if u != last), last])
        book.sigma = list(orders[-1])


def test_micro_batches_of_ranks_with_one_step_after_several_backwards() -> None:
    def epoch(together: int, **options: Any) -> list[int]:
        made: list[GivenSource] = []

        def build(model: nn.Module, **settings: Any) -> GivenSource:
            made.append(GivenSource(model, d=3, whole_units=True, **settings))
            return made[0]

        order = GraB(nn.Linear(1, 1), 4 * BATCH, group=BATCH, gradients=build, **options)
        drawn, field = list(order.sampler), gradient_field(4 * BATCH, 3)
        for number, lo in enumerate(range(0, len(drawn), BATCH)):
            rows = torch.from_numpy(np.stack([field(i, 0) for i in drawn[lo : lo + BATCH]]))
            made[0].give(rows.mean(dim=0, keepdim=True), examples=BATCH)
            if (number + 1) % together == 0:
                order.step()
        next(iter(order.sampler))
        return order.history(1).tolist()

    wanted = epoch(1)
    assert epoch(4) == wanted
    assert run_ranks(2, lambda ranks: epoch(2, distributed=Distributed(ranks=ranks))) == [wanted] * 2


def test_a_micro_batch_that_is_no_unit_changes_nothing() -> None:
    model, data = small_model(), Regression(N)
    order = GraB(model, N, group=BATCH, gradients="microbatch")
    drawn = list(order.sampler)
    before = order.state_dict()
    for part in (drawn[:4], drawn[4:6]):
        cross_entropy(model(data.x[part]), data.y[part]).backward()
    with pytest.raises(StepError, match="a micro-batch of 2 examples"):
        order.step()
    assert same_state(order.state_dict(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_of_a_loader_outlives_a_break(workers: int) -> None:
    """No cycle: what the loop no longer holds is gone at once, worker processes too."""
    order = GraB(None, N)
    gc.disable()
    try:
        iterator: Any = iter(loader_of(order, num_workers=workers))
        told(order, next(iterator))
        processes = list(getattr(iterator, "_workers", []))
        gone = weakref.ref(iterator)
        del iterator
        assert gone() is None
        assert not any(process.is_alive() for process in processes)
        drawing = iter(order.sampler)
        next(drawing)
        gone = weakref.ref(drawing)
        del drawing
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda order: pickle.loads(pickle.dumps(order))])  # noqa: S301
def test_an_order_is_copied_in_the_middle_of_a_pass(copied: Any) -> None:
    order = GraB(None, N)
    for batch in loader_of(order):
        told(order, batch)
        other = copied(order)
        assert same_state(other.state_dict(), order.state_dict())
    assert list(other.sampler) == list(order.sampler)


@pytest.mark.parametrize(
    "grads", [np.array([[1.0, 2.0], [3.0, 4.0]], dtype=object), torch.eye(2).to_sparse()], ids=["objects", "sparse"]
)
def test_gradients_in_a_form_that_is_not_taken(grads: Any) -> None:
    order = GraB(None, N)
    list(order.sampler)
    before = order.state_dict()
    for given in (grads, [grads], {"weight": grads}):
        with pytest.raises(GradientError, match=r"object|sparse"):
            order.observe(given)
    assert same_state(order.state_dict(), before)
