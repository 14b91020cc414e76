"""Faults inside the engine: memory that runs out, numbers that are not finite, models changed under way."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from faulty_run import Fault, N, Run, plain_hooks
from helpers import Regression, batches, is_permutation, loop_gradients, small_model
from settings_models import LanguageModel, VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ordain import Deterministic, GraB, Herding, Order
from ordain.errors import GradientError, InputError, MemoryLimitError, StateError, StepError
from ordain.gradients import ExactSource, FuncSource, memory
from ordain.gradients.dense import Dense
from ordain.gradients.sparse_rows import SparseRows
from ordain.orders.grab import BalancingLearner

# --- memory ---------------------------------------------------------------------------------------


class Scarce(TorchDispatchMode):
    """No tensor of more than ``limit`` numbers can be made; what is there can be changed.

    With ``enough``, anything can once so many halvings are made.
    """

    def __init__(self, limit: int, error: Callable[[], BaseException], *, enough: int = 100) -> None:
        super().__init__()
        self.limit, self.error, self.enough, self.refused = limit, error, enough, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def places(tree: Any) -> dict[int, Tensor]:
            return {t.untyped_storage().data_ptr(): t for t in tree_leaves(tree) if isinstance(t, Tensor)}

        out = func(*args, **(kwargs or {}))
        old = places((args, kwargs))
        made = max((t.numel() for place, t in places(out).items() if place not in old), default=0)
        if made > self.limit and memory.chunk_numbers() > memory.CHUNK_NUMBERS >> self.enough:
            self.refused += 1
            raise self.error()
        return out


ERRORS: dict[str, Callable[[], BaseException]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: not enough memory: you tried"
    ),
    "numpy": lambda: MemoryError("Unable to allocate 2.00 GiB for an array"),
}


def steps() -> nn.Module:
    """Over three steps, one layer whose gradients are made a chunk at a time, and one whose Gram matrix is."""
    torch.manual_seed(0)
    last = nn.Sequential(nn.Linear(20, 8), nn.Flatten(), nn.Linear(24, 3))
    return nn.Sequential(nn.Linear(5, 60), nn.Unflatten(1, (3, 20)), nn.Linear(20, 20), nn.Tanh(), last).double()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 20), nn.Unflatten(1, (2, 10)), nn.Conv1d(2, 8, 3), nn.Tanh())
    return nn.Sequential(first, nn.Conv1d(8, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(96, 3)).double()


class Scaled(nn.Module):
    """A parameter of the module's own, for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.scale))  # type: ignore[no-any-return]


def tables(order: Any) -> dict[str, Tensor]:
    return {name: vector.clone() for name, vector in order.state_dict()["vectors"].items()}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("build", [steps, convolutions])
def test_memory_that_runs_out_is_made_do_with(
    build: Callable[[], nn.Module], centering: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half as much at a time gives the same orders; what cannot be made at all costs its batch and nothing else."""
    monkeypatch.setattr(memory, "CHUNK_NUMBERS", 2**12)
    run = Run("exact", centering, build, n=36, size=12)
    refused = 0
    for epoch in range(2):
        for number, batch in enumerate(run.epoch()):
            if (epoch, number) == (0, 0):  # finds its vectors, and the model's layout
                run.learn(batch)
                continue
            rows = run.rows(batch)
            run.loss(batch).backward()
            if (epoch, number) == (1, 1):
                before, places = tables(run.order), run.order.state_dict()["places"]
                with Scarce(2, ERRORS[error]), pytest.raises(MemoryLimitError, match=r"smaller batches.*order\.skip"):
                    run.order.step()
                assert all(torch.equal(before[name], vector) for name, vector in tables(run.order).items())
                assert torch.equal(places, run.order.state_dict()["places"])
                run.skip(batch)
                continue
            with Scarce(1200, ERRORS[error]) as scarce:  # enough for what a layer saw, or for a vector of length d
                run.order.step()
            refused += scarce.refused
            run.shadow.observe(rows)
            run.update()
    assert refused > 3 or (build is steps and centering == "pair")  # which takes no more than what the layers saw
    run.check()


def test_memory_that_runs_out_in_a_module_without_a_rule_is_called_that() -> None:
    run = Run("exact", "mean", lambda: Scaled().double())
    batch = next(run.epoch())
    run.loss(batch).backward()
    with Scarce(2, ERRORS["cuda"]), pytest.raises(MemoryLimitError):
        run.order.step()
    run.skip(batch)
    run.check()


def test_gradients_made_by_torch_func_are_made_few_at_a_time() -> None:
    refused = []

    class Scant(FuncSource):
        """Runs the examples again where nothing can be made before two halvings."""

        def backward_ended(self, record: Any) -> None:
            with Scarce(0, ERRORS["cuda"], enough=2) as scarce:
                super().backward_ended(record)
            refused.append(scarce.refused)

    model, data = small_model(), Regression(12)
    found = []
    for kind in (FuncSource, Scant):
        source = kind(model)
        cross_entropy(model(data.x), data.y).backward()
        ((batch, _),) = source.collect()
        found.append(batch.rows())
        source.detach()
    assert refused[0] >= 2
    torch.testing.assert_close(*found)


def test_other_errors_are_not_taken_for_memory() -> None:
    calls = []

    def job() -> None:
        calls.append(1)
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        memory.shrinking(job)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        memory.in_pieces(4, lambda lo, hi: job())
    assert len(calls) == 2
    assert not memory.out_of_memory(MemoryLimitError("a", expected="b", remedy="c"))


def test_a_sum_in_pieces_adds_each_piece_once() -> None:
    total, most = np.zeros(1), 3

    def add(lo: int, hi: int) -> None:
        if hi - lo > most:
            raise MemoryError
        total[0] += sum(range(lo, hi))

    memory.in_pieces(23, add)
    assert total[0] == sum(range(23))
    most = 0
    with pytest.raises(MemoryLimitError, match="it ran out"):
        memory.in_pieces(23, add)


def test_stored_gradients_that_find_no_room_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Herding(None, 6, group=2)  # rows that are no units go through a buffer
    list(order.sampler)
    order.observe(torch.ones(3, 4, dtype=torch.float64))
    before = order.state_dict()
    rows = torch.ones(3, 4, dtype=torch.float64)
    monkeypatch.setattr(memory, "_buffers", threading.local())  # as if the batch before had been smaller
    with Scarce(2, ERRORS["cpu"]), pytest.raises(MemoryLimitError):
        order.observe(rows)
    assert str(order.state_dict()) == str(before)
    order.observe(torch.ones(3, 4, dtype=torch.float64))
    assert is_permutation(order.sampler, 6)


@pytest.mark.filterwarnings("ignore::ordain.errors.OrdainWarning")
@pytest.mark.parametrize("build", [GraB, Herding])
def test_memory_that_runs_out_counts_no_example_twice(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start has found an example that is not finite, and finds no room for the others."""
    name = "select" if build is GraB else "rows"
    method, calls = getattr(Dense, name), []

    def scarce(self: Dense, *args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError
        return method(self, *args, **options)

    monkeypatch.setattr(Dense, name, scarce)
    order = build(None, 6)
    list(order.sampler)
    rows = torch.eye(6, dtype=torch.float64)
    rows[2] = torch.nan
    order.observe(rows)
    assert len(calls) == 2
    assert order.set_aside == 1


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize(("centering", "group"), [("mean", 1), ("pair", 1), ("mean", 2), ("pair", 2)])
def test_sums_that_were_cut_off_start_anew(centering: str, group: int, error: type[BaseException]) -> None:
    """Part of a batch is in s and nobody knows how much: s begins at zero, and what follows is learned from there."""
    n, rng = 15, np.random.default_rng(0)

    class Cut(Dense):
        """A batch whose sums are cut off half way."""

        def add_signed(self, signs: Tensor, out: Tensor) -> None:
            self.weighted_sum(signs[None], out=out)

        def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
            if out is None:
                return super().weighted_sum(weights)
            out[:, :1] += 7.0
            raise error("fault")

    learner = BalancingLearner(Deterministic(), paired=centering == "pair")
    order, shadow = GraB(None, n, centering=centering, group=group), Order(n, learner=learner, group=group)
    for epoch in range(3):
        for number, (batch, same) in enumerate(zip(batches(order, 3), batches(shadow, 3), strict=True)):
            assert batch == same
            rows = torch.from_numpy(rng.normal(size=(len(batch), 4)) + 1)
            if (epoch, number) == (1, 2):
                with pytest.raises(error):
                    order.observe(Cut([rows]))
                learner.state.reset()
                assert not order.state_dict()["vectors"]["table"][0].any()
                order.skip(len(batch))
                shadow.skip(len(batch))
            else:
                order.observe(rows)
                shadow.observe(rows)
    assert list(order.sampler) == list(shadow.sampler)
    assert is_permutation(order.history(order.epoch), n)


# --- numbers that are not finite ------------------------------------------------------------------


def single() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()


@pytest.mark.filterwarnings("ignore::ordain.errors.OrdainWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["one", "all"])
@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("build", [small_model, single])
def test_a_loss_that_is_not_finite(build: Callable[[], nn.Module], centering: str, which: str, value: float) -> None:
    run = Run("exact", centering, build)
    bad = 0
    for epoch in range(3):
        for number, batch in enumerate(run.epoch()):
            if epoch != 1 or number not in (0, 2):
                run.learn(batch)
                continue
            spoilt = torch.zeros(len(batch), dtype=torch.float64)
            spoilt[slice(1, 2) if which == "one" else slice(None)] = value
            rows = run.rows(batch)
            rows[spoilt != 0] = torch.nan
            x = run.data.x[batch] + spoilt[:, None]
            cross_entropy(run.model(x), run.data.y[batch]).backward()
            run.order.step()
            run.shadow.observe(rows)
            run.optimizer.zero_grad()  # what a loop does that looks at its loss
            bad += int((spoilt != 0).sum())
    assert run.order.set_aside == run.shadow.set_aside == bad
    run.check()


@pytest.mark.filterwarnings("ignore::ordain.errors.OrdainWarning")
def test_a_grad_scaler_that_skips_a_step() -> None:
    """Scaled gradients are balanced as they come: the batch that overflowed is set aside, the next has a new scale."""
    run, scaler = Run(), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    scales = []
    for epoch in range(2):
        for number, batch in enumerate(run.epoch()):
            scales.append(scaler.get_scale())
            rows = run.rows(batch) * scales[-1]
            loss = run.loss(batch)
            if (epoch, number) == (0, 2):
                loss, rows = loss * torch.inf, rows * torch.nan
            scaler.scale(loss).backward()
            run.order.step()
            run.shadow.observe(rows)
            before = copy.deepcopy(list(run.model.parameters()))
            scaler.step(run.optimizer)
            scaler.update()
            moved = not all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
            assert moved == ((epoch, number) != (0, 2))
            run.optimizer.zero_grad()
    assert len(set(scales)) > 1
    run.check()


# --- batches and models that change ---------------------------------------------------------------


@pytest.mark.parametrize("source", ["exact", "func", "microbatch"])
def test_a_batch_without_examples_is_nothing(source: str) -> None:
    run = Run(source)
    for number, batch in enumerate(run.epoch()):
        if number in (0, 2):
            run.model(run.data.x[:0]).sum().backward()
            run.order.step()
            run.optimizer.zero_grad()
        run.learn(batch)
    run.check()


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_the_batch_size_may_change_at_any_time(centering: str) -> None:
    run = Run("exact", centering)
    sizes = iter([1, 5, 2, 7, 4, 3, 1, 9, 2, 6, 13, 8, 5, 3, 1, 2, 2, 2, 9, 4])
    for _ in range(4):
        drawn, same = iter(run.order.sampler), iter(run.shadow.sampler)
        left = N
        while left:
            size = min(left, next(sizes))
            batch = [next(drawn) for _ in range(size)]
            assert batch == [next(same) for _ in range(size)]
            run.learn(batch)
            left -= size
    run.check()


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def new_head(model: Any) -> None:
    model[2] = nn.Linear(4, 3).double()


@pytest.mark.parametrize("change", [assigned, new_head])
def test_parameters_that_were_replaced_are_noticed(change: Callable[[nn.Module], None]) -> None:
    run = Run()
    epoch = run.epoch()
    run.learn(next(epoch))
    change(run.model)
    run.loss(next(epoch)).backward()
    with pytest.raises(StateError, match=r"did not exist when the order was created.*assign=True"):
        run.order.step()
    run.order.detach()


def test_parameters_that_grew_are_noticed() -> None:
    """A vocabulary extended in place: compiled loops must not write beside the vectors of the old size."""
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    order = GraB(model, 6)
    list(order.sampler)
    model[0].weight.data = torch.randn(100_000, 4)
    model(torch.full((6, 2), 99_999)).sum().backward()
    with pytest.raises(
        StateError, match=r"'0\.weight' with 400000 elements; expected 40, as when the order was created"
    ):
        order.step()


def test_ids_beyond_a_table_are_refused() -> None:
    rows = SparseRows(torch.tensor([0, 1]), torch.tensor([2, 5]), torch.ones(2, 3), size=2, rows=5)
    with pytest.raises(GradientError, match="ids from 2 to 5 in a table of 5 rows"):
        rows.dot(torch.zeros(1, 5, 3))


def test_two_precisions_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(InputError, match=r"torch\.float64 \('1\.weight'\) next to torch\.float32 \('0\.weight'\)"):
        GraB(model, 4)
    GraB(nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2)), 4).detach()
    GraB(model, 4, params=lambda name: name.startswith("1")).detach()
    GraB(model, 4, gradients="func").detach()


def test_an_output_without_numbers_is_nothing() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    order = GraB(model, 8)
    for _ in batches(order, 4):
        model(torch.randn(4, 0, 5)).sum().backward()
        order.step()
    assert is_permutation(order.sampler, 8)


def test_a_layer_frozen_at_first_and_thawed_later_stays_out() -> None:
    """The order goes by the parameters that were trainable when it was made."""
    model, data = small_model(), Regression(N)
    model[0].requires_grad_(False)
    order, shadow = GraB(model, N), GraB(None, N)
    for epoch in range(3):
        if epoch == 1:
            model[0].requires_grad_(True)
        for batch, same in zip(batches(order, 4), batches(shadow, 4), strict=True):
            assert batch == same
            twin = copy.deepcopy(model)
            rows = loop_gradients(twin.requires_grad_(True), cross_entropy, data.x[batch], data.y[batch])
            shadow.observe(rows[:, -sum(p.numel() for p in model[2].parameters()) :])
            cross_entropy(model(data.x[batch]), data.y[batch]).backward()
            order.step()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
            model.zero_grad()
    assert list(order.sampler) == list(shadow.sampler)


# --- interrupts in places of their own -------------------------------------------------------------


@contextmanager
def interrupted(module: nn.Module) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        yield
    handle.remove()


def modes() -> int:
    return torch._C._len_torch_function_stack()


@pytest.mark.parametrize("leave", ["next forward", "detach"])
def test_an_interrupt_in_attention_leaves_no_mode_behind(leave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = VisionTransformer().double()
    source, images, had = ExactSource(model), torch.randn(3, 3, 4, 4, dtype=torch.float64), modes()
    model(images).square().sum().backward()
    source.collect()
    with monkeypatch.context() as patch:

        def fail(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(nn.functional, "scaled_dot_product_attention", fail)
        with pytest.raises(KeyboardInterrupt):
            model(images)
    with torch.overrides.BaseTorchFunctionMode() as mine:  # not to be taken for the one that was left
        if leave == "detach":
            source.detach()
        else:
            model(images).square().sum().backward()
            assert [batch.examples for batch in source.collect()] == [3]
        assert torch.overrides._get_current_function_mode() is mine
    assert modes() == had


def test_an_interrupt_while_the_layout_is_looked_for_starts_the_look_again() -> None:
    """Five positions and five examples look alike but for a look at one example less."""
    torch.manual_seed(0)
    model, words = LanguageModel().double(), torch.randint(0, 5, (5, 5))
    state = torch.get_rng_state()
    source = ExactSource(model)
    last = list(model.modules())[-1]
    with interrupted(last):
        model(words)
    assert torch.equal(state, torch.get_rng_state())
    found = []
    other = copy.deepcopy(model)
    for one, watched in ((source, model), (ExactSource(other), other)):
        watched(words).square().sum().backward()
        ((batch, _),) = one.collect()
        found.append(batch.gram())
        one.detach()
    torch.testing.assert_close(*found)


# --- compiled models ------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_orders(how: str, backend: str) -> list[list[int]]:
    model, data = small_model(), Regression(N)
    called: Any = model
    if how == "compiled first":
        called = torch.compile(model, backend=backend)
        order = GraB(called, N)
    elif how == "order first":
        order = GraB(model, N)
        called = torch.compile(model, backend=backend)
    else:
        order = GraB(model, N)
        if how == "in place":
            model.compile(backend=backend)
    for _ in range(2):
        for batch in batches(order, 4):
            cross_entropy(called(data.x[batch]), data.y[batch]).backward()
            order.step()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()
    next(iter(order.sampler))
    order.detach()
    assert not any(plain_hooks(model))
    return [order.history(epoch).tolist() for epoch in range(3)]


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@pytest.mark.parametrize(
    ("how", "backend"), [("compiled first", "aot_eager"), ("order first", "aot_eager"), ("in place", "eager")]
)
def test_a_compiled_model_is_watched_all_the_same(how: str, backend: str, dynamo: None) -> None:
    assert compiled_orders(how, backend) == compiled_orders("not", backend)


@pytest.mark.filterwarnings("ignore")
def test_a_model_compiled_and_run_before_the_order_was_made_is_refused(dynamo: None) -> None:
    model, data = small_model(), Regression(N)
    called = torch.compile(model, backend="eager")
    cross_entropy(called(data.x), data.y).backward()
    order = GraB(model, N)
    list(order.sampler)
    cross_entropy(called(data.x), data.y).backward()
    with pytest.raises(StepError, match=r"torch\.compile has run already must be compiled again"):
        order.step()
