"""The life of an order that watches a model: what it captures, what it leaves alone, and what it leaves behind."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine import relative
from faulty_run import plain_hooks
from helpers import Regression, batches, loop_gradients, small_model
from settings_models import Encoder, LanguageModel, VisionTransformer, lenet, resnet
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from ordain import Every, GraB, reference
from ordain.errors import GradientError, OrdainWarning, StepError, UnsupportedModuleError
from ordain.gradients import ExactSource, FuncSource, Gradients

N, BATCH, EPOCHS = 13, 5, 3


def rows_of(batch: Gradients) -> Tensor:
    return batch.weighted_sum(torch.eye(batch.size, dtype=batch.dtype))


def backward(model: nn.Module, data: Regression, indices: Any) -> None:
    cross_entropy(model(data.x[indices]), data.y[indices]).backward()


# --- the model comes back -------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["exact", "func", "microbatch"])
@pytest.mark.parametrize("build", [small_model, lenet, resnet, LanguageModel, Encoder, VisionTransformer])
def test_detached_the_model_is_as_it_was(build: Callable[[], nn.Module], gradients: str) -> None:
    model = build()
    before = plain_hooks(model), pickle.dumps(model), list(model.state_dict()), [type(m) for m in model.modules()]
    kept = [dict(vars(module)) for module in model.modules()]
    order = GraB(model, N, gradients=gradients)
    assert plain_hooks(model) != before[0]
    assert [type(m) for m in model.modules()] == before[3]
    assert list(model.state_dict()) == before[2]
    order.detach()
    assert (plain_hooks(model), pickle.dumps(model)) == before[:2]
    assert [vars(module).keys() for module in model.modules()] == [one.keys() for one in kept]
    order.detach()  # a second time is nothing


def test_detached_after_training_nothing_is_left() -> None:
    model, data = small_model(), Regression(N)
    before = pickle.dumps(model)
    order = GraB(model, N)
    train(order, model, data, lr=0.0)
    backward(model, data, [0])  # a pass that waits
    order.detach()
    model.zero_grad()
    assert pickle.dumps(model) == before
    assert not any(plain_hooks(model))
    with pytest.raises(StepError, match=r"after detach\(\)"):
        order.step()


# --- what is captured -----------------------------------------------------------------------------


def test_evaluation_is_not_captured() -> None:
    model, data = small_model(), Regression(N)
    order = GraB(model, N)
    list(order.sampler)
    with torch.no_grad():
        model(data.x)
    with torch.inference_mode():
        model(data.x)
    model.eval()
    backward(model, data, [0, 1])
    model.train()
    with pytest.raises(StepError, match="no new gradients"):
        order.step()
    backward(model, data, [0, 1])
    model(data.x)  # a forward whose backward never comes
    order.step()
    assert order.state_dict()["taken"] == 2
    with pytest.raises(StepError, match="no new gradients"):
        order.step()


def inputs_of(module: nn.Module) -> tuple[list[StorageWeakRef], Any]:
    """The memory of the inputs that come from now on, without holding it, and the handle of the hook."""
    seen: list[StorageWeakRef] = []
    handle = module.register_forward_pre_hook(
        lambda module, args: seen.append(StorageWeakRef(args[0].untyped_storage()))
    )
    return seen, handle


def test_a_forward_without_a_backward_keeps_nothing_alive() -> None:
    model, data = small_model(), Regression(N)
    source = ExactSource(model)
    backward(model, data, [0, 1, 2])
    source.collect()
    seen, handle = inputs_of(model[2])
    gc.disable()
    try:
        output = model(data.x)
        assert not seen[-1].expired()
        del output
        assert seen[-1].expired()  # at once: not even a cycle holds it
    finally:
        gc.enable()
    handle.remove()
    assert source.collect() == []


def test_a_copy_of_the_model_is_not_watched() -> None:
    model, data = small_model(), Regression(N)
    order = GraB(model, N)
    list(order.sampler)
    twin = copy.deepcopy(model)
    seen, _ = inputs_of(twin[2])
    backward(twin, data, range(N))
    assert seen[-1].expired()
    with pytest.raises(StepError, match="no new gradients"):
        order.step()
    backward(model, data, range(4))
    backward(twin, data, range(N))
    order.step()
    assert order.state_dict()["taken"] == 4


def test_two_forwards_before_one_backward() -> None:
    model, data = small_model(), Regression(5)
    source = ExactSource(model)
    first, second = model(data.x[:2]), model(data.x[2:])
    (cross_entropy(second, data.y[2:]) + cross_entropy(first, data.y[:2])).backward()
    found = [batch for batch, _ in source.collect()]
    source.detach()
    assert [batch.size for batch in found] == [2, 3]  # in the order of the forwards
    wanted = loop_gradients(model, cross_entropy, data.x, data.y)
    assert relative(torch.cat([rows_of(batch) for batch in found]), wanted) < 1e-9


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_accumulated_micro_batches_are_observed_in_one_step(centering: str) -> None:
    data = Regression(N)

    def orders(sizes: tuple[int, ...]) -> list[list[int]]:
        model = small_model()
        order = GraB(model, N, centering=centering)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(EPOCHS):
            for batch in batches(order, 6):
                rest = list(batch)
                for size in sizes:
                    micro, rest = rest[:size], rest[size:]
                    if micro:
                        (cross_entropy(model(data.x[micro]), data.y[micro]) * (len(micro) / len(batch))).backward()
                order.step()
                optimizer.step()
                optimizer.zero_grad()
        return [order.history(epoch).tolist() for epoch in range(EPOCHS)]

    # The share of each micro-batch makes its gradients smaller by a known factor; undone, they are the batch's.
    model, order_free = small_model(), GraB(None, N, centering=centering)
    wanted = []
    for _ in range(EPOCHS):
        seen: list[int] = []
        for batch in batches(order_free, 6):
            shares = torch.ones(len(batch), dtype=torch.float64)
            for lo, hi in ((0, 1), (1, 4), (4, 6)):
                shares[lo:hi] = len(shares[lo:hi]) / len(batch)
            rows = loop_gradients(model, cross_entropy, data.x[batch], data.y[batch])
            order_free.observe(rows * shares[:, None])
            with torch.no_grad():
                at = 0
                for p in model.parameters():
                    p -= 0.1 * rows.mean(0)[at : at + p.numel()].view_as(p)
                    at += p.numel()
            seen += batch
        wanted.append(seen)
    assert orders((1, 3, 2)) == wanted


def test_a_model_that_is_run_again_for_its_gradients_is_observed_once() -> None:
    model, data = VisionTransformer().double(), torch.randn(4, 3, 4, 4, dtype=torch.float64)
    source = ExactSource(model)
    for _ in range(2):
        model(data).square().sum().backward()
        assert [batch.examples for batch in source.collect()] == [4]
    assert source.collect() == []


@pytest.mark.parametrize("kind", [ExactSource, FuncSource])
def test_two_backwards_through_one_graph_add_up(kind: Any) -> None:
    model, data = small_model(), Regression(4)
    wanted = loop_gradients(model, cross_entropy, data.x, data.y)
    source = kind(model)
    loss = cross_entropy(model(data.x), data.y)
    loss.backward(retain_graph=True)
    loss.backward()
    ((batch, _),) = source.collect()
    assert relative(rows_of(batch), 2 * wanted) < 1e-9


@pytest.mark.parametrize("build", [small_model, lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), Attends()).double()])
def test_a_graph_kept_for_a_second_step_begins_anew(build: Callable[[], nn.Module]) -> None:
    model, data = build(), Regression(4)
    source = ExactSource(model)
    loss = cross_entropy(model(data.x), data.y)
    loss.backward(retain_graph=True)
    ((first, _),) = source.collect()
    rows = rows_of(first)
    loss.backward()
    ((second, _),) = source.collect()
    assert relative(rows_of(second), rows) < 1e-9
    assert torch.equal(rows_of(first), rows)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0].flatten(1)  # type: ignore[no-any-return]


class Shifts(nn.Module):
    """At one example its parameter's gradient is its output's, the very same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_what_becomes_of_p_grad_does_not_reach_what_was_captured() -> None:
    model, data = nn.Sequential(Shifts(), nn.Tanh(), nn.Linear(5, 3)).double(), Regression(2)
    wanted = loop_gradients(model, cross_entropy, data.x, data.y)
    source = ExactSource(model)
    backward(model, data, [0])
    backward(model, data, [1])  # accumulates in place
    for p in model.parameters():
        assert p.grad is not None
        p.grad.zero_()
    assert relative(torch.cat([rows_of(batch) for batch, _ in source.collect()]), wanted) < 1e-9


# --- what the user does with gradients ------------------------------------------------------------


def train(
    order: GraB,
    model: nn.Module,
    data: Regression,
    *,
    lr: float = 0.1,
    batch_size: int = BATCH,
    before: Callable[[nn.Module], object] = lambda model: None,
    set_to_none: bool = True,
) -> list[list[int]]:
    """The orders of a few epochs; ``before`` is what is done to the gradients before order.step()."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(EPOCHS):
        for batch in batches(order, batch_size):
            backward(model, data, batch)
            before(model)
            order.step()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    next(iter(order.sampler))
    return [order.history(epoch).tolist() for epoch in range(EPOCHS + 1)]


def halve_into_new(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad * 0.5


def clamp_data(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data.clamp_(-0.01, 0.01)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "clip-norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    "clip-value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "zero": lambda model: model.zero_grad(set_to_none=False),
    "drop": lambda model: model.zero_grad(),
    "replace": halve_into_new,
    "clamp-data": clamp_data,
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_gradients_do_not_change_the_orders(change: str, set_to_none: bool) -> None:
    """What becomes of p.grad after the backward is the optimizer's business, not the order's."""

    def run(gradients: str) -> list[list[int]]:
        model = small_model()
        order = GraB(model, N, gradients=gradients)
        return train(order, model, Regression(N), before=CHANGES[change], set_to_none=set_to_none)

    assert run("exact") == run("func")


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_nothing_piles_up(centering: str) -> None:
    model, data = small_model(), Regression(N)
    order = GraB(model, N, centering=centering)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for epoch in range(70):
        for batch in batches(order, BATCH):  # three steps
            backward(model, data, batch)
            order.step()
            optimizer.step()
            optimizer.zero_grad()
        if epoch in (3, 69):
            gc.collect()
            counts.append(sum(1 for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)))
    assert counts[1] <= counts[0]


# --- models that do unusual things ----------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.inner, self.last = nn.Linear(5, 4), small_inner(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return self.last(self.inner(x))  # type: ignore[no-any-return]
        return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))  # type: ignore[no-any-return]


def small_inner() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4))


def test_checkpointing_changes_nothing() -> None:
    data = Regression(N)
    found = []
    for reentrant in (None, False):
        torch.manual_seed(0)
        model = Checkpointed(reentrant).double()
        source = ExactSource(model)
        for _ in range(2):
            backward(model, data, range(N))
            ((batch, _),) = source.collect()
        found.append(rows_of(batch))
        assert source.collect() == []
    assert torch.equal(*found)


def test_a_checkpoint_around_the_whole_model_changes_nothing() -> None:
    """Its forward is computed again in the backward, and once more in each backward of an inspection."""
    data, found = Regression(N), []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(None).double()
        source = ExactSource(model)
        for start in (0, BATCH):
            x, y = data.x[start : start + BATCH], data.y[start : start + BATCH]
            output = checkpoint(model, x, use_reentrant=False) if wrapped else model(x)
            nn.functional.cross_entropy(output, y).backward()
            ((batch, _),) = source.collect()
            found.append(rows_of(batch))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_the_old_checkpointing_is_refused() -> None:
    model = Checkpointed(True).double()
    source = ExactSource(model)
    backward(model, Regression(N), range(N))
    with pytest.raises(UnsupportedModuleError, match=r"'inner\.0\.weight'.*reentrant.*use_reentrant=False"):
        source.collect()


def normalized() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(4, 3)).double()


def test_batch_norm_is_refused_with_the_ways_out() -> None:
    model, data = normalized(), Regression(15)
    with pytest.warns(OrdainWarning, match=r"BatchNorm1d at '0\.1' in training mode"):
        order = GraB(model, 15)
    with pytest.raises(UnsupportedModuleError) as error:
        backward(model, data, range(5))
    for words in ("BatchNorm1d at '0.1'", "GroupNorm", "eval()", "group=batch_size", "gradients='microbatch'"):
        assert words in str(error.value)
    model[0][1].eval()
    assert len(train(order, model, data)) == EPOCHS + 1


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_batches_can_be_ordered_under_batch_norm(centering: str) -> None:
    n = 20
    model, twin, data = normalized(), normalized(), Regression(n)
    order = GraB(model, n, centering=centering, gradients="microbatch", group=BATCH)
    found = train(order, model, data, batch_size=BATCH)
    units = [found[0][i : i + BATCH] for i in range(0, n, BATCH)]

    parameters = list(twin.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    kind: Any = reference.PairGraB if centering == "pair" else reference.GraB
    book = kind(range(len(units)), sum(p.numel() for p in parameters))
    orders = [list(range(len(units)))]
    for _ in range(EPOCHS):
        for unit in orders[-1]:
            optimizer.zero_grad()
            backward(twin, data, units[unit])
            book.see(torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None]).numpy())
            optimizer.step()
        orders.append(book.next_order())
    assert found == [[i for unit in one for i in units[unit]] for one in orders]


@pytest.mark.parametrize("gradients", ["exact", "microbatch"])
def test_a_call_without_a_tensor_is_refused(gradients: str) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, length: int) -> Tensor:
            return self.layer(torch.ones(length, 2))  # type: ignore[no-any-return]

    model = Constant()
    order = GraB(model, N, gradients=gradients)
    with pytest.raises(GradientError, match=r"without a tensor that has a batch dimension.*batch_dim="):
        model(3)
    order.detach()
    assert model(3).shape == (3, 1)


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize(("gradients", "batch_size"), [("func", BATCH), ("microbatch", 1), ("func", 1)])
def test_every_source_finds_the_same_orders(gradients: str, batch_size: int, centering: str) -> None:
    found = []
    for kind in ("exact", gradients):
        model = small_model()
        order = GraB(model, N, centering=centering, gradients=kind)
        found.append(train(order, model, Regression(N), batch_size=batch_size))
    assert found[0] == found[1]


def test_what_the_model_returns_may_retain_its_gradient() -> None:
    """A check sends gradients down the graph, through the tensor that retains its own."""
    data = Regression(40)
    grads = []
    for watched in (False, True):
        model = small_model()
        order = GraB(model if watched else None, 40)
        indices = iter(order.sampler)
        for _ in range(8):
            some = [next(indices) for _ in range(5)]
            out = model(data.x[some])
            out.retain_grad()
            cross_entropy(out, data.y[some]).backward()
            grads.append(out.grad)
            if watched:
                order.step()
            model.zero_grad()
    for plain, found in zip(grads[:8], grads[8:], strict=True):
        assert torch.equal(plain, found)


def test_a_layer_that_is_frozen_while_nothing_is_learned() -> None:
    """Watched again, whole batches are ordered by the other layers; and by this one once it is unfrozen."""
    model, data = small_model(), Regression(N)
    order = GraB(model, data, gradients="microbatch", group=4, learn=Every(2))
    for epoch in range(6):
        model[0].requires_grad_(epoch in (0, 4, 5))
        for rows in DataLoader(range(N), batch_size=4, sampler=order.sampler):
            backward(model, data, rows.tolist())
            order.step()
    assert len({tuple(order.history(epoch).tolist()) for epoch in range(0, 6, 2)}) == 3
