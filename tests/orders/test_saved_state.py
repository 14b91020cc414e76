"""Saved states: small and pure, the same after any interruption, refused where they do not belong."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.make_states import BATCH, DIM, DONE, MORE, N, interrupted, new
from helpers import BALANCERS, build, gradient_field, is_permutation, reference_rule, reloaded, run, run_epoch
from runs import listed

import ordain
from ordain import FixedOrder, GraB, Herding, _rng, reference
from ordain.errors import InputError, StateError
from ordain.herding import reorder
from ordain.orders import ORDERS
from ordain.orders.saved_state import STATE_VERSION

NAMES = sorted({*ORDERS, *MORE})
FIXTURES = Path(__file__).parents[1] / "fixtures"


def finish(order: Any) -> list[list[int]]:
    """What is left of epoch 1, and the two epochs after it."""
    field = gradient_field(N, DIM)
    return [run_epoch(order, field, epoch, BATCH) for epoch in (1, 2, 3)]


# --- versions -------------------------------------------------------------------------------------


def earlier(version: int) -> Any:
    """States by order: of all the orders that there were."""
    return ordain.load(FIXTURES / f"states-{version}.pt")


@pytest.mark.parametrize(
    ("version", "name"), [(version, name) for version in range(1, STATE_VERSION) for name in sorted(earlier(version))]
)
def test_states_of_earlier_versions_load(version: int, name: str) -> None:
    saved = earlier(version)[name]
    before = listed(saved)
    build = partial(Herding, None, N, tolerance=0.0, seed=5) if name == "herding" else partial(new, name)
    wanted = run(build(), gradient_field(N, DIM), 4, batch_size=BATCH)
    order = build()
    order.load_state_dict(saved)
    assert order.resume(DONE) == 1
    tail = finish(order)
    assert listed(saved) == before
    assert tail == [wanted[1][DONE:], *wanted[2:4]]
    assert [order.history(epoch).tolist() for epoch in range(4)] == wanted[:4]


def test_a_state_names_its_version() -> None:
    assert build("grab", N).state_dict()["version"] == STATE_VERSION
    for version in (0, STATE_VERSION + 1):
        with pytest.raises(StateError, match=f"version={version}; expected version={STATE_VERSION}"):
            build("grab", N).load_state_dict(build("grab", N).state_dict() | {"version": version})


# --- pure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_asking_for_a_state_changes_nothing(name: str) -> None:
    """Before the first draw, at every draw, between a draw and its observation, after the end."""
    field = gradient_field(N, DIM)
    order, seen = new(name), []
    for epoch in range(3):
        batch: list[int] = []
        for index in order.sampler:
            assert listed(order.state_dict()) == listed(order.state_dict())
            order.state_dict(vectors=False, history=False)
            batch.append(index)
            if len(batch) == 4 or len(seen) % N + len(batch) == N:
                order.observe(np.stack([field(i, epoch) for i in batch]))
                seen += batch
                batch = []
    wanted = run(new(name), field, 3, batch_size=4)
    assert seen == [*wanted[0], *wanted[1], *wanted[2]]
    assert list(order.sampler) == wanted[3]


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_tensors_numbers_and_strings(name: str) -> None:
    def kinds(value: Any) -> set[type]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return {type(value)} if inner is None else set().union(*map(kinds, inner))

    state = interrupted(name).state_dict()
    assert kinds(state) <= {torch.Tensor, int, float, bool, str, type(None)}
    assert listed(reloaded(state)) == listed(state)


@pytest.mark.parametrize("name", NAMES)
def test_loaded_and_saved_again_it_is_the_same(name: str) -> None:
    for options in ({}, {"history": False}):
        state = interrupted(name).state_dict(**options)
        order = new(name)
        order.load_state_dict(state)
        assert listed(order.state_dict()) == listed(state)


@pytest.mark.filterwarnings("ignore::ordain.errors.OrdainWarning")
@pytest.mark.parametrize("how", ["skip", "nan"])
@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_part_of_a_unit_whose_rest_is_set_aside_waits_for_nothing(centering: Any, how: str) -> None:
    """Saved at that moment, the state loads as it was saved; what comes later is the same."""
    field = gradient_field(N, DIM)
    order = GraB(None, N, group=3, centering=centering)
    drawn = list(order.sampler)
    order.observe(np.stack([field(i, 0) for i in drawn[:4]]))  # a unit, and one example of the next
    assert "part" in order.state_dict()["vectors"]
    if how == "skip":
        order.skip(1)
    else:
        order.observe(np.full((1, DIM), np.nan))
    state = reloaded(order.state_dict())
    assert state["vectors"].keys() == {"table"} | ({"first"} if centering == "pair" else set())
    other = GraB(None, N, group=3, centering=centering)
    other.load_state_dict(state)
    assert listed(other.state_dict()) == listed(state)
    other.resume()
    assert list(other.sampler) == drawn[5:]
    for one in (order, other):
        one.observe(np.stack([field(i, 0) for i in drawn[5:]]))
    assert [run_epoch(order, field, epoch, BATCH) for epoch in (1, 2)] == [
        run_epoch(other, field, epoch, BATCH) for epoch in (1, 2)
    ]
    assert listed(order.state_dict()) == listed(other.state_dict())


def test_what_was_passed_over_is_saved_by_orders_that_see_nothing() -> None:
    for first, drawn in ((2, 0), (2, 3), (N, 1)):
        order, other = build("rr", N), build("rr", N)
        indices = iter(order.sampler)
        for _ in range(min(first + drawn, N)):
            next(indices)
        order.skip(first)
        state = order.state_dict()
        assert (state["touched"], state["uncounted"], state["taken"]) == (True, False, first)
        other.load_state_dict(reloaded(state))
        assert listed(other.state_dict()) == listed(state)
        assert list(other.sampler) == list(order.sampler) == order.history(1).tolist()


def test_a_look_at_the_data_is_one_look_also_if_saved() -> None:
    """Nobody steps: a first short pass is a look, a second one is an epoch, whether or not it was saved between."""
    order = build("rr", N)
    next(iter(order.sampler))
    other = build("rr", N)
    other.load_state_dict(reloaded(order.state_dict()))
    for one in (order, other):
        next(iter(one.sampler))
        next(iter(one.sampler))
    assert order.epoch == other.epoch == 1


def test_the_first_epoch_is_in_order_and_takes_no_room() -> None:
    """A state grows by the history alone; files that hold range(units) for epoch 0 load all the same."""
    state = interrupted("grab").state_dict()
    assert state["origin"] == len(state["origin_arrangement"]) == 0
    order = new("grab")
    order.load_state_dict(state | {"origin_arrangement": torch.arange(N)})
    assert listed(order.state_dict()) == listed(state)
    assert order.history(0).tolist() == interrupted("grab").history(0).tolist()


# --- without vectors, without history ---------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_without_vectors_the_epochs_are_still_permutations(name: str) -> None:
    small = interrupted(name).state_dict(vectors=False)
    assert small.keys() == interrupted(name).state_dict().keys()
    order = new(name)
    order.load_state_dict(reloaded(small))
    order.resume(DONE)
    head = order.history(1).tolist()[:DONE]
    tail = finish(order)
    if name != "replacement":
        assert all(is_permutation(one, N) for one in (head + tail[0], *tail[1:]))


@pytest.mark.parametrize("done", [0, 3, 4, 11])
@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("balancer", ["deterministic", "halving"])
def test_without_vectors_balancing_begins_again(balancer: str, centering: Any, done: int) -> None:
    """s = 0 and m = 0 for the rest of the epoch, and the next m is the mean of the rest: nothing else is lost."""
    base, size = gradient_field(N, DIM), N if centering == "mean" else N // 2

    def field(index: int, epoch: int) -> np.ndarray:
        return base(index, epoch) - 1.2  # a mean that is there, but decides nothing by itself

    def new() -> GraB:
        return GraB(None, N, centering=centering, balancer=BALANCERS[balancer])

    def signs(indices: list[int], epoch: int, mean: Any, start: int = 0) -> list[int]:
        z = [field(i, epoch) - mean for i in indices]
        if centering == "pair":
            z = [a - b for a, b in zip(z[::2], z[1::2], strict=False)]
        u = _rng.uniforms(len(z), seed=0, stream=epoch, start=start).tolist()
        found = reference.balance(z, reference_rule(BALANCERS[balancer], size, DIM), u) or []
        return found if centering == "mean" else [e for sign in found for e in (sign, -sign)] + [0] * (len(indices) % 2)

    order, other = new(), new()
    run_epoch(order, field, 0, BATCH)
    sigma = list(order.sampler)
    if done:
        order.observe(np.stack([field(i, 1) for i in sigma[:done]]))
    head = [int(place) if abs(place) == 1 else 0 for place in order.state_dict()["places"][:done]]
    other.load_state_dict(order.state_dict(vectors=False))
    other.resume()
    if done < N:
        assert run_epoch(other, field, 1, BATCH) == sigma[done:]
    signed = done if centering == "mean" else done // 2  # random numbers go on where they were
    following = reorder(np.array(head + signs(sigma[done:], 1, 0.0, signed)), np.array(sigma)).tolist()
    assert run_epoch(other, field, 2, BATCH) == following
    rest = [field(i, 1) for i in sigma[done:]]
    mean = np.mean(rest, axis=0) if rest and centering == "mean" else 0.0
    assert list(other.sampler) == reorder(np.array(signs(following, 2, mean)), np.array(following)).tolist()


def test_without_vectors_a_cut_unit_is_no_unit() -> None:
    """The half of a unit that was seen is lost; the other half must not pass for the whole."""
    order = GraB(None, 6, group=2, centering="mean")
    drawn = list(order.sampler)
    values = {index: np.eye(6)[place] for place, index in enumerate(drawn)}
    order.observe(np.stack([values[i] for i in drawn[:3]]))
    other = GraB(None, 6, group=2, centering="mean")
    other.load_state_dict(order.state_dict(vectors=False))
    other.resume()
    other.observe(np.stack([values[i] for i in other.sampler]))
    state = other.state_dict()
    assert state["places"].tolist() == [-1, 2, -1]
    assert state["vectors"]["table"][0].tolist() == [0, 0, 0, 0, -0.5, -0.5]


def test_without_vectors_stored_gradients_are_those_of_the_rest() -> None:
    field, routine = gradient_field(N, DIM), ordain.herding.herd
    order = Herding(None, N, tolerance=0.0)
    sigma = list(order.sampler)
    order.observe(np.stack([field(i, 0) for i in sigma[:DONE]]))
    other = Herding(None, N, tolerance=0.0)
    other.load_state_dict(order.state_dict(vectors=False))
    other.resume()
    run_epoch(other, field, 0, BATCH)
    rest = sigma[DONE:]
    herded = [rest[t] for t in routine(np.stack([field(i, 0) for i in rest]))]
    half = len(rest) // 2
    assert list(other.sampler) == [*herded[:half], *sigma[:DONE], *herded[half:]]


def test_a_rehearsal_that_was_interrupted_begins_again() -> None:
    field = gradient_field(N, DIM)

    def rehearse(order: Herding, epoch: int) -> None:
        with order.rehearsal():
            run_epoch(order, field, epoch, BATCH)

    whole, order, other = (Herding(None, N, fresh=True) for _ in range(3))
    for epoch in range(3):
        rehearse(whole, epoch)
        run_epoch(whole, field, epoch, BATCH)
    rehearse(order, 0)
    run_epoch(order, field, 0, BATCH)
    with order.rehearsal():
        order.observe(np.stack([field(i, 1) for i in list(order.sampler)[:4]]))
        state = reloaded(order.state_dict())
    other.load_state_dict(state)
    for epoch in (1, 2):
        rehearse(other, epoch)
        run_epoch(other, field, epoch, BATCH)
    assert other.epoch == whole.epoch == 2
    assert [other.history(epoch).tolist() for epoch in range(3)] == [
        whole.history(epoch).tolist() for epoch in range(3)
    ]


@pytest.mark.parametrize("name", ["grab", "grab-pair", "grab-1step", "herding"])
def test_without_history_only_the_past_is_forgotten(name: str) -> None:
    field = gradient_field(N, DIM)
    whole = build(name, N)
    wanted = run(whole, field, 5, batch_size=BATCH)
    order = build(name, N)
    for epoch in range(3):
        run_epoch(order, field, epoch, BATCH)
    small = order.state_dict(history=False)
    later = build(name, N)
    later.load_state_dict(reloaded(small))
    for epoch in (3, 4):
        assert run_epoch(later, field, epoch, BATCH) == wanted[epoch]
    assert list(later.sampler) == wanted[5]
    again = build(name, N)
    again.load_state_dict(reloaded(later.state_dict()))  # history from epoch 2 on
    for one in (later, again):
        assert [one.history(epoch).tolist() for epoch in range(2, 6)] == wanted[2:]
        with pytest.raises(InputError, match=r"epoch 1; expected an epoch from 2 to 5.*history=False"):
            one.history(1)


# --- where they do not belong ---------------------------------------------------------------------


def test_a_dataset_that_has_grown_or_shrunk_is_refused_with_the_numbers() -> None:
    for name in NAMES:
        if name in MORE:
            continue
        for n in (N - 1, N + 1):
            order = build(name, n, seed=5)
            before = listed(order.state_dict())
            with pytest.raises(StateError, match=f"n={N}; expected n={n}"):
                order.load_state_dict(interrupted(name).state_dict())
            assert listed(order.state_dict()) == before
    with pytest.raises(StateError, match=r"permutation='[0-9a-f]{16}'; expected permutation='[0-9a-f]{16}'"):
        FixedOrder(range(N)).load_state_dict(interrupted("fixed").state_dict())


@pytest.mark.parametrize("name", ["rr", "grab", "grab-units", "herding"])
def test_a_broken_state_changes_nothing(name: str) -> None:
    """Each field in turn of another kind, or with a value that no order can have."""
    state = interrupted(name).state_dict()
    bad: dict[str, list[Any]] = {"epoch": [-1, 1.0, True], "taken": [-1, N + 1], "touched": [1], "driven": [0]}
    if "arrangement" in state:
        units = len(state["arrangement"])
        bad["arrangement"] = bad["origin_arrangement"] = [
            torch.zeros(units, dtype=torch.int64),
            torch.arange(units + 1),
            torch.arange(units).float(),
            torch.arange(units)[None],
        ]
        bad["places"] = [state["places"][1:], state["places"] + 9, state["places"].long()]
        bad |= {"origin": [2, -1], "set_aside": [-1], "dim": [0, DIM + 1, 3.0]}
    if "log" in state:
        bad["log"] = [state["log"][:0], state["log"][:, 1:], state["log"].long()]
        bad["counters"] = [[], ["x"] * 9, state["counters"][1:]]
        bad["balancer_state"] = [[], [None] * 3]
        bad["vectors"] = [[], {"x": torch.zeros(1)}, {"table": torch.zeros(2, 2)}, {"table": 0}]
    if "past" in state:
        bad |= {"past": [state["past"][:0]], "counts": [state["counts"][1:]], "stored": [torch.zeros(1), "x"]}
    order = new(name)
    order.load_state_dict(state)
    before = listed(order.state_dict())
    for field in state:
        for value in ((), object(), *bad.get(field, ())):
            with pytest.raises(StateError):
                order.load_state_dict(state | {field: value})
            assert listed(order.state_dict()) == before, field
    order.resume(DONE)
    other = new(name)
    other.load_state_dict(state)
    other.resume(DONE)
    assert finish(order) == finish(other)


# --- files ----------------------------------------------------------------------------------------


class Opaque:
    """Neither numbers nor something with a state."""


def test_saved_files_hold_states_by_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    order = interrupted("grab")
    ordain.save(tmp_path / "run.pt", {"a b": 1.5}, order=order, model=model, optimizer=optimizer, schedule=schedule)
    found = ordain.load(str(tmp_path / "run.pt"))
    assert set(found) == {"a b", "order", "model", "optimizer", "schedule"}
    assert listed(found["order"]) == listed(order.state_dict())
    assert listed(found["model"]) == listed(model.state_dict())
    assert list(tmp_path.iterdir()) == [tmp_path / "run.pt"]


@pytest.mark.parametrize("bad", [Opaque(), lambda: 0, {"inside": [Opaque]}])
def test_what_could_not_be_loaded_is_not_saved(bad: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    ordain.save(path, epoch=1)
    with pytest.raises(InputError, match="cannot be loaded without running code"):
        ordain.save(path, epoch=2, bad=bad)
    assert ordain.load(path) == {"epoch": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    """Cut anywhere, or with one bit turned: torch itself reads most of them without a word."""
    path = tmp_path / "run.pt"
    ordain.save(path, order=interrupted("grab"), more=torch.arange(5000))
    whole = path.read_bytes()
    cuts = [whole[:length] for length in (4000, 4100, 9000, len(whole) - 1)]
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(whole) - 2000, 60):  # the directory at the end has fields that mean nothing
        turned = bytearray(whole)
        turned[place] ^= 1 << int(rng.integers(8))
        cuts.append(bytes(turned))
    refused = 0
    for content in cuts:
        path.write_bytes(content)
        found = None
        with contextlib.suppress(StateError):
            found = ordain.load(path)
        if found is not None:  # a bit of padding, or of a header that nothing reads
            assert torch.equal(found["more"], torch.arange(5000))
        refused += found is None
    assert refused >= len(cuts) // 2


def test_nothing_to_save_and_what_cannot_be_loaded_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to save"):
        ordain.save(tmp_path / "run.pt")
    with pytest.raises(InputError, match=r"without running code: second"):
        ordain.save(tmp_path / "run.pt", first=1, second=np.float64(3))
    assert not list(tmp_path.iterdir())


def test_files_that_are_not_whole_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    ordain.save(path, order=interrupted("grab"))
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[: len(whole) // 2], whole[:-1], b"not a checkpoint"):
        path.write_bytes(content)
        with pytest.raises(StateError, match=r"run\.pt, which cannot be read"):
            ordain.load(path)
    torch.save([1], path)
    with pytest.raises(StateError, match="which contains a list"):
        ordain.load(path)
    torch.save(Opaque(), path)
    with pytest.raises(StateError, match="never unpickled"):
        ordain.load(path)
    with pytest.raises(FileNotFoundError):
        ordain.load(tmp_path / "nothing.pt")
    with pytest.raises(FileNotFoundError):
        ordain.save(tmp_path / "nowhere" / "run.pt", epoch=1)
