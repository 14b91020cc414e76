"""A run that was stopped, saved and taken up again is the run that was not: every index, sign and weight."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import batches, gradient_field, reloaded, run, run_epoch
from runs import BATCH, EPOCHS, STEPS, N, Run, linear
from torch.utils.data import BatchSampler, DataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler

import ordain
from ordain import Every, GraB, Herding, RandomReshuffling, SelfBalancingWalk
from ordain.errors import StateError
from ordain.orders import ORDERS, Order

# Orders that look at no gradients (in some epochs): their step() does not see how many examples it was.
BLIND: dict[str, Callable[[], Order]] = {
    "rr": lambda: RandomReshuffling(N),
    "grab": lambda: GraB(None, N, learn=lambda epoch: False),
}


def check(found: Run, whole: Run, steps: int) -> None:
    """``found`` went on after ``steps`` steps."""
    before = (steps // STEPS) * N + (steps % STEPS) * BATCH
    assert found.seen == whole.seen[before:]
    assert found.end() == whole.end()


@pytest.mark.parametrize("name", ORDERS)
def test_resumed_at_any_step_with_a_plain_loader(name: str) -> None:
    whole, kept = Run(name).go(), []
    assert len(whole.seen) == N * EPOCHS
    check(Run(name).go(kept=kept), whole, 0)  # saving changes nothing
    assert len(kept) == STEPS * EPOCHS
    # For the variants of GraB, around and in the second epoch: later ones are like it.
    stops = range(STEPS - 1, 2 * STEPS + 2) if name.startswith("grab-") else range(1, len(kept))
    for stop in stops:
        check(Run(name).load(kept[stop - 1]).go(), whole, stop)


LEARN = Every(2)
SCHEDULED: dict[str, Callable[[], Order]] = {
    "mean": lambda: GraB(None, N, learn=LEARN),
    "units": lambda: GraB(None, N, learn=LEARN, group=3),
    "walk": lambda: GraB(None, N, learn=LEARN, balancer=SelfBalancingWalk(c=5.0)),
    "pair": lambda: GraB(None, N, learn=LEARN, centering="pair"),
    "herding": lambda: Herding(None, N, learn=LEARN),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_resumed_at_any_step_of_epochs_that_learn_or_do_not(name: str) -> None:
    """Also without vectors, where there are none to lose: between learned epochs, if no mean is kept."""
    field, epochs = gradient_field(N, 3), 5
    whole = run(SCHEDULED[name](), field, epochs, batch_size=BATCH)
    for epoch, steps in itertools.product(range(epochs), range(1, STEPS + 1)):
        order = SCHEDULED[name]()
        for before in range(epoch):
            run_epoch(order, field, before, BATCH)
        for batch in itertools.islice(batches(order, BATCH), steps):
            order.observe(np.stack([field(i, epoch) for i in batch]))
        small = name in ("pair", "herding") and not LEARN(epoch)
        for vectors in (True, False) if small else (True,):
            other = SCHEDULED[name]()
            other.load_state_dict(reloaded(order.state_dict(vectors=vectors)))
            assert other.resume() == epoch + (steps == STEPS)
            rest = [] if steps == STEPS else run_epoch(other, field, epoch, BATCH)
            assert rest == whole[epoch][steps * BATCH :]
            for after in range(epoch + 1, epochs):
                assert run_epoch(other, field, after, BATCH) == whole[after]
            assert list(other.sampler) == whole[epochs]
            assert [other.history(one).tolist() for one in range(epochs + 1)] == whole


@pytest.mark.parametrize("name", ["grab", "grab-pair", "grab-walk"])
def test_resumed_where_a_step_is_one_compiled_loop(name: str) -> None:
    whole, kept = Run(name, build=linear).go(), []
    check(Run(name, build=linear).go(kept=kept), whole, 0)
    for stop in (2, 4, 7):
        check(Run(name, build=linear).load(kept[stop - 1]).go(), whole, stop)


@pytest.mark.parametrize("name", ["grab", "grab-pair", "herding"])
def test_resumed_twice_in_one_epoch(name: str) -> None:
    whole = Run(name).go()
    first = Run(name).go(STEPS + 1)
    second = Run(name).load(first.saved).go(1)
    third = Run(name).load(second.saved).go(1)
    check(Run(name).load(third.saved).go(), whole, STEPS + 3)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("stop", [STEPS, -1])
def test_resumed_at_the_end_of_an_epoch(stop: int, drop_last: bool) -> None:
    """Saved by the last step of the first epoch, or after its loop: the next epoch comes, and none is lost or added."""
    whole = Run("grab", drop_last=drop_last).go()
    steps = STEPS - drop_last
    first = Run("grab", drop_last=drop_last).go(stop if stop < 0 else steps)
    assert first.steps == steps
    found = Run("grab", drop_last=drop_last).load(first.saved).go()
    assert found.seen == whole.seen[steps * BATCH if drop_last else N :]
    assert found.end() == whole.end()


@pytest.mark.parametrize("name", ["grab", "grab-pair", "rr"])
def test_resumed_under_another_number_of_workers(name: str) -> None:
    whole = Run(name).go()
    saved = Run(name, num_workers=2, prefetch_factor=2).go(STEPS + 2).saved
    for workers, stateful in ((0, False), (1, False), (1, True)):
        found = Run(name, num_workers=workers, stateful=stateful)
        check(found.load(saved).go(), whole, STEPS + 2)


def test_without_resume_the_next_epoch_begins() -> None:
    for name, stop in itertools.product(("grab", "rr", "grab-1step"), (STEPS + 1, 2 * STEPS)):
        run = Run(name).go(stop)
        wanted = list(run.order.sampler)
        other = Run(name)
        other.order.load_state_dict(run.saved["order"])
        assert list(other.order.sampler) == wanted
        assert other.order.epoch == 2


def test_an_epoch_that_nobody_steps_through_is_over_when_saved() -> None:
    order, same = RandomReshuffling(N), RandomReshuffling(N)
    seen = [list(order.sampler) for _ in range(2)]
    same.load_state_dict(order.state_dict())
    seen.append(list(same.sampler))
    assert seen == [order.history(epoch).tolist() for epoch in range(3)]


def test_what_the_loader_handed_out_is_what_blind_steps_have_done() -> None:
    """Saved after each step, with skips and steps for parts of a batch between; also in a pass that was resumed."""
    for build in BLIND.values():
        order, done = build(), 0
        for number, batch in enumerate(DataLoader(range(N), batch_size=BATCH, sampler=order.sampler)):
            if number == 1:
                order.skip(len(batch))
            else:
                order.step()
                order.step()
            done += len(batch)
            other = build()
            other.load_state_dict(reloaded(order.state_dict()))
            assert other.resume() == (done == N)
            if done == N:
                break
            rest = iter(DataLoader(range(N), batch_size=2, sampler=other.sampler))
            assert next(rest).tolist() == order.history(0).tolist()[done : done + 2]
            other.step()
            again = build()
            again.load_state_dict(reloaded(other.state_dict()))
            again.resume()
            assert list(again.sampler) == (order.history(0).tolist()[done + 2 :] or again.history(1).tolist())


@pytest.mark.parametrize("how", ["no loader", "several batches a step", "batches that overtake each other"])
@pytest.mark.parametrize("name", BLIND)
def test_an_order_that_cannot_know_must_be_told(name: str, how: str) -> None:
    order, other = BLIND[name](), BLIND[name]()
    overtake: dict[str, Any] = {"num_workers": 2, "in_order": False} if how.startswith("batches") else {}
    batches: Any = iter(DataLoader(range(N), batch_size=BATCH, sampler=order.sampler, **overtake))
    if how == "no loader":
        batches = iter(BatchSampler(order.sampler, BATCH, drop_last=False))
    for _ in range(2):
        next(batches)
        if how.startswith("several"):  # which may as well be read ahead
            next(batches)
        order.step()
        other.load_state_dict(reloaded(order.state_dict()))
        with pytest.raises(StateError, match=r"cannot tell how much.*resume\(steps_done \* batch_size\)"):
            other.resume()
    assert other.resume(BATCH) == 0
    assert list(other.sampler) == order.history(0).tolist()[BATCH:]


def test_a_blind_order_that_observes_knows() -> None:
    """Also where an earlier epoch was stepped through."""
    order, other = RandomReshuffling(N), RandomReshuffling(N)
    list(order.sampler)
    order.step()
    drawn = list(order.sampler)
    order.observe(torch.zeros(4, 1))
    other.load_state_dict(order.state_dict())
    assert other.resume() == 1
    assert list(other.sampler) == drawn[4:]


def test_observed_through_indices_it_knows_if_nothing_was_left_out() -> None:
    values = torch.randn(N, 2, generator=torch.Generator().manual_seed(0))
    whole = GraB(None, N)
    drawn = list(whole.sampler)
    for part in (drawn[2:4], drawn[:2], drawn[4:]):
        whole.observe(values[part], indices=part)
        if part[-1] == drawn[-1]:
            break
        other = GraB(None, N)
        other.load_state_dict(whole.state_dict())
        if part == drawn[2:4]:
            with pytest.raises(StateError, match="out of order"):
                other.resume()
    assert other.resume() == 0
    assert list(other.sampler) == drawn[4:]
    other.observe(values[drawn[4:]])
    assert list(other.sampler) == list(whole.sampler)


# --- torchdata's StatefulDataLoader ---------------------------------------------------------------

LOADERS: dict[str, dict[str, Any]] = {
    "0 workers": {},
    "2 workers, drop_last": {"num_workers": 2, "prefetch_factor": 4, "drop_last": True},
    "2 persistent workers": {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True},
}


@pytest.mark.parametrize("options", LOADERS)
def test_resumed_with_a_stateful_loader(options: str) -> None:
    """By the order alone, by the loader's state, and by both, which do not add up."""
    keywords = LOADERS[options]
    whole = Run("grab", **{name: value for name, value in keywords.items() if name == "drop_last"}).go()
    steps = STEPS - ("drop_last" in keywords)
    stops = (1, 2, steps, steps + 2, -1) if not keywords.get("num_workers") else (2, -1)
    for stop in stops:
        stopped = Run("grab", stateful=True, **keywords).go(stop)
        for how in ("order", "loader", "both"):
            found = Run("grab", stateful=True, **keywords).load(stopped.saved, loader=how != "order")
            if how == "both":
                found.order.resume()
            found.go()
            assert stopped.seen + found.seen == whole.seen
            assert found.end() == whole.end()


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_a_stateful_loader_tells_orders_that_do_not_know(name: str) -> None:
    whole = Run(name).go()
    for stop in (STEPS, STEPS + 1):
        saved = Run(name, stateful=True).go(stop).saved
        check(Run(name, stateful=True).load(saved, loader=True).go(), whole, stop)


def test_a_stateful_loader_resumed_twice_in_one_epoch() -> None:
    whole = Run("grab-pair").go()
    first = Run("grab-pair", stateful=True).go(1)
    second = Run("grab-pair", stateful=True).load(first.saved).go(1)  # by the order alone
    third = Run("grab-pair", stateful=True).load(second.saved, loader=True).go(1)
    check(Run("grab-pair", stateful=True).load(third.saved, loader=True).go(), whole, 3)


def with_batch_sampler(kind: Any, **options: Any) -> Run:
    found = Run("grab", stateful=True)
    sampler = kind(found.order.sampler, batch_size=BATCH, drop_last=False)
    found.loader = type(found.loader)(found.loader.dataset, batch_sampler=sampler, **options)
    return found


def test_a_stateful_loader_with_a_batch_sampler() -> None:
    """torchdata's passes the cursor on; torch's knows of none, and the order's own resume() is the way."""
    whole = Run("grab").go()
    for kind, loader in ((StatefulBatchSampler, True), (StatefulBatchSampler, False), (BatchSampler, False)):
        saved = with_batch_sampler(kind).go(STEPS + 2).saved
        check(with_batch_sampler(kind).load(saved, loader=loader).go(), whole, STEPS + 2)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_that_cannot_pass_the_cursor_on_is_refused_with_a_state(workers: int, resume: bool) -> None:
    """Its loader would draw two batches, of this epoch or the next, and give them to nobody."""
    saved = with_batch_sampler(BatchSampler, num_workers=workers).go(STEPS + 2).saved
    found = with_batch_sampler(BatchSampler, num_workers=workers).load(saved, loader=True)
    if resume:
        found.order.resume()
    before = str(found.order.state_dict())
    with pytest.raises(StateError, match=r"draws 2 batches and discards them.*order\.resume\(\)"):
        next(iter(found.loader))
    assert str(found.order.state_dict()) == before
    if not workers:  # at an epoch's end such a loader begins anew, and draws nothing in vain; workers draw at once
        after = with_batch_sampler(BatchSampler).go(-1).saved
        check(with_batch_sampler(BatchSampler).load(after, loader=True).go(), Run("grab").go(), STEPS)


def test_a_loader_and_an_order_of_different_steps_are_refused() -> None:
    stops = {"early": 1, "late": 2, "next": STEPS + 1}
    saved = {name: Run("grab", stateful=True).go(stop).saved for name, stop in stops.items()}
    for order, loader, message in (
        ("early", "late", "epoch 0 with 6 examples drawn; expected epoch 0 with 3 examples observed"),
        ("late", "early", "epoch 0 with 3 examples drawn; expected epoch 0 with 6 examples observed"),
        ("early", "next", "epoch 1 with 3 examples drawn; expected epoch 0 with 3 examples observed"),
        (None, "late", "epoch 0 with 6 examples drawn; expected epoch 0 with 0 examples observed"),
    ):
        run = Run("grab", stateful=True)
        if order:
            run.order.load_state_dict(saved[order]["order"])
        before = str(run.order.state_dict())
        run.loader.load_state_dict(saved[loader]["loader"])
        with pytest.raises(StateError, match=f"a loader's state in {message}"):
            iter(run.loader)
        assert str(run.order.state_dict()) == before
    with pytest.raises(StateError, match="a cursor's state"):
        iter(Run("grab").order.sampler).load_state_dict({})  # type: ignore[attr-defined]


def test_between_two_snapshots_the_order_knows_better() -> None:
    """A loader that takes a snapshot every second step only is behind after an odd one, and is refused."""
    options: dict[str, Any] = {"stateful": True, "num_workers": 1, "snapshot_every_n_steps": 2}
    whole, saved = Run("grab").go(), Run("grab", **options).go(3).saved
    run = Run("grab", **options).load(saved, loader=True)
    with pytest.raises(StateError, match="with 6 examples drawn; expected epoch 0 with 9 examples observed"):
        iter(run.loader)
    check(Run("grab", **options).load(saved).go(), whole, 3)


def test_the_cursor_is_all_that_a_loader_saves() -> None:
    """Nothing of the order's is in the loader's state: it stays small, and cannot be older than the order."""
    state = Run("grab", stateful=True).go(STEPS + 2).saved["loader"]
    assert state["_sampler_iter_state"]["sampler_iter_state"] == {"epoch": 1, "drawn": 2 * BATCH}


# --- a process that is killed while it writes ----------------------------------------------------

KILLED = """
import io, os, signal, sys
from pathlib import Path
import torch, ordain, ordain._files

path, order = Path(sys.argv[1]), ordain.GraB(None, 1000)
die = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
for place in ("write", "fsync", "rename"):
    if os.fork() == 0:
        if place == "write":  # with half of it in the file
            whole = torch.save
            def half(objects, file):
                buffer = io.BytesIO()
                whole(objects, buffer)
                file.write(buffer.getvalue()[: len(buffer.getvalue()) // 2])
                file.flush()
                die()
            torch.save = half
        elif place == "fsync":
            ordain._files.os.fsync = die
        else:
            Path.replace = die
        ordain.save(path, order=order)
        os._exit(3)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_resumed_after_a_kill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    whole = Run("grab").go()
    path = tmp_path / "run.pt"
    ordain.save(path, Run("grab").go(STEPS + 1).objects(), epoch=1)
    before = path.read_bytes()
    command = [sys.executable, "-c", KILLED, str(path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    assert out.stdout.split() == ["-9"] * 3
    assert path.read_bytes() == before
    assert len([one for one in tmp_path.iterdir() if one.name.endswith(".tmp")]) == 3  # each died in mid-write
    check(Run("grab").load(ordain.load(path)).go(), whole, STEPS + 1)
