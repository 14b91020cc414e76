"""What users do to a model in mid-training, and models that must be refused rather than misread."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine import relative
from helpers import Regression, batches, is_permutation, loop_gradients, small_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ordain import GraB, RandomReshuffling, reference
from ordain.errors import (
    GradientError,
    InputError,
    OrdainError,
    OrdainWarning,
    StateError,
    StepError,
    UnsupportedModuleError,
)
from ordain.gradients import ExactSource, MicrobatchSource, per_example_loop


def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def gradients(model: nn.Module, data: Regression, every: list[nn.Parameter]) -> np.ndarray:
    """[n, d] by the loop; a frozen parameter's gradient is zero."""
    live = [p for p in every if p.requires_grad]
    rows = per_example_loop(lambda i: F.cross_entropy(model(data.x[i : i + 1]), data.y[i : i + 1]), len(data), live)
    parts = iter(rows.split([p.numel() for p in live], dim=1))
    return torch.cat([next(parts) if p.requires_grad else torch.zeros(len(data), p.numel()) for p in every], 1).numpy()


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("change", ["freeze", "freeze-weight", "thaw"])
def test_a_layer_frozen_or_thawed_in_mid_training(centering: str, change: str) -> None:
    n = 14
    data, model = Regression(n), small_model()
    every = list(model.parameters())
    order = GraB(model, n, centering=centering)
    book: Any = (reference.PairGraB if centering == "pair" else reference.GraB)(
        order.history(0).tolist(), sum(p.numel() for p in every)
    )
    chosen = [model[0].weight] if change == "freeze-weight" else list(model[0].parameters())
    for epoch in range(4):
        if epoch == 1 or (epoch == 2 and change == "thaw"):
            for p in chosen:
                p.requires_grad_(epoch == 2)
        for batch in batches(order, 4):
            twin = copy.deepcopy(model)  # a copy is not watched
            rows = gradients(twin, data, list(twin.parameters()))
            backward(model, data.x[batch], data.y[batch])
            order.step()
            for i in batch:
                book.see(rows[i])
            with torch.no_grad():
                for p in every:
                    if p.grad is not None:
                        p -= 0.1 * p.grad
            model.zero_grad()
        wanted = book.next_order()
        next(iter(order.sampler))
        assert order.history(epoch + 1).tolist() == wanted


class Functional(nn.Module):
    """A layer that is used without being called, behind a head that starts at zero."""

    def __init__(self, zero: bool) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
        if zero:
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.hidden.weight, self.hidden.bias).tanh())


@pytest.mark.parametrize("spoil", ["nothing", "zero head", "nan"])
def test_a_gradient_that_says_nothing_proves_nothing(spoil: str) -> None:
    """Weights that are used by a function are noticed as soon as they have a gradient, and taken from the graph."""
    data = Regression(8)
    model = Functional(zero=spoil == "zero head").double()
    source = ExactSource(model)
    for step in range(5):
        x = data.x * (float("nan") if spoil == "nan" and step == 0 else 1.0)
        backward(model, x, data.y)
        ((batch, _),) = source.collect()
        twin = copy.deepcopy(model)
        rows = loop_gradients(twin, F.cross_entropy, x, data.y)
        if step or spoil != "nan":
            torch.testing.assert_close(batch.rows(), rows, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None and torch.isfinite(p.grad).all():
                    p -= 0.1 * p.grad
        model.zero_grad()


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(5, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    "mix",
    [lambda z: F.batch_norm(z, None, None, training=True), lambda z: z - z.mean(0), lambda z: z.flip(0)],
    ids=["batch-norm", "centred", "flipped"],
)
def test_examples_mixed_by_plain_functions_are_noticed(mix: Callable[[Tensor], Tensor]) -> None:
    data = Regression(6)
    model = Applied(mix).double()
    source = ExactSource(model)
    backward(model, data.x, data.y)
    with pytest.raises(UnsupportedModuleError, match="depends on the other examples"):
        source.collect()


class Stateful(nn.Module):
    """Keeps a hidden state, counts its calls and tosses Python's coin: a probe must leave no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.state: Tensor | None = None
        self.calls, self.tosses = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.tosses = random.random()  # noqa: S311
        self.state = torch.tanh(self.cell(x) + (0 if self.state is None else self.state.detach()))
        return self.head(self.state)


def test_finding_the_layout_leaves_no_trace() -> None:
    def trained(ordered: bool) -> tuple[int, float, list[float]]:
        random.seed(0)
        data = Regression(8)
        torch.manual_seed(0)
        model = Stateful().double()
        order = GraB(model, 8) if ordered else RandomReshuffling(8)
        for x, y in DataLoader(data, batch_size=4, sampler=order.sampler):
            backward(model, x, y)
            order.step()
        return model.calls, model.tosses, nn.utils.parameters_to_vector([p.grad for p in model.parameters()]).tolist()

    assert trained(True) == trained(False)


def test_of_two_orders_on_one_model_the_last_one_watches() -> None:
    data, model = Regression(8), small_model()
    pair = GraB(model, 8, centering="pair")
    with pytest.warns(OrdainWarning, match="another order"):
        mean = GraB(model, 8)
    twin = small_model()
    alone = GraB(twin, 8)
    list(pair.sampler)  # drawn ahead; its first epoch is the same
    for batch in batches(mean, 3):
        backward(model, data.x[batch], data.y[batch])
        mean.step()
        with pytest.raises(StepError, match="watched by another order"):
            pair.step()
    for batch in batches(alone, 3):
        backward(twin, data.x[batch], data.y[batch])
        alone.step()
    assert list(alone.sampler) == list(mean.sampler)


def test_backwards_that_were_not_watched_do_not_count() -> None:
    data, model = Regression(6), small_model()
    exact, micro = ExactSource(model), MicrobatchSource(model)
    for _ in range(2):
        model.eval()
        backward(model, data.x, data.y)  # an attack, say
        model.zero_grad()
        model.train()
        backward(model, data.x, data.y)
        wanted = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        ((row, _),), ((batch, _),) = micro.collect(), exact.collect()
        torch.testing.assert_close(row.weighted_sum(torch.ones(1, 1).double())[0], wanted)
        torch.testing.assert_close(batch.weighted_sum(torch.full((1, 6), 1 / 6).double())[0], wanted)
        model.zero_grad()


@pytest.mark.parametrize("model", ["mlp", "conv", "lstm", "transformer"])
@pytest.mark.parametrize("size", [1, 4])
def test_autocast(model: str, size: int) -> None:
    torch.manual_seed(0)
    built: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        "conv": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4, 3)),
        "lstm": lambda: nn.Sequential(nn.LSTM(6, 5, batch_first=True), Take(), nn.Linear(5, 3)),
        "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
    }
    shape = {"mlp": (6,), "conv": (1, 4, 4), "lstm": (7, 6), "transformer": (5, 8)}[model]
    net, x = built[model](), torch.randn(size, *shape)
    if model == "lstm":
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                net(x)
        except RuntimeError as error:
            pytest.skip(f"torch cannot run it on this CPU: {error}")
    source = ExactSource(net, loss_reduction="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x).float()
    out.square().sum().backward()
    ((batch, _),) = source.collect()
    total = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
    assert relative(batch.weighted_sum(torch.ones(1, size))[0], total) < 0.05


class Take(nn.Module):
    def forward(self, outputs: tuple[Tensor, Any]) -> Tensor:
        return outputs[0]


@pytest.mark.parametrize("n", [10, 12])
def test_whole_batches_with_a_short_last_one(n: int) -> None:
    """The way out for batch normalisation: the short unit stays last, where a loader makes it."""
    data = Regression(n)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    order = GraB(model, n, group=5, gradients="microbatch")
    for _ in range(4):
        for x, y in DataLoader(data, batch_size=5, sampler=order.sampler):
            backward(model, x, y)
            order.step()
            model.zero_grad()
        assert is_permutation(order.history(order.epoch), n)
    assert [order.history(e).tolist() for e in range(4)][1:] != [order.history(0).tolist()] * 3


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_a_batch_passed_over_can_be_skipped(group: int, centering: str) -> None:
    n = 15
    order = GraB(None, n, group=group, centering=centering)
    for number, batch in enumerate(batches(order, 3)):
        if number == 1:
            order.skip(len(batch))
        else:
            order.observe(np.stack([np.sin([i + 1.0, 2.0 * i]) for i in batch]))
    drawn = order.history(0).tolist()
    following = list(order.sampler)
    assert is_permutation(following, n)
    if group == 1:
        middle = following.index(drawn[3])
        assert following[middle : middle + 3] == drawn[3:6]  # untouched, in the middle
    with pytest.raises(StepError, match="1 examples to observe, but only 0"):
        GraB(None, 3).skip(1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GraB(None, DataLoader(range(10))), InputError, r"a DataLoader.*loader\.dataset"),
        (lambda: GraB(small_model(), 5, balancer="walk"), InputError, "balancer='walk'"),
        (lambda: GraB(small_model(), 5, params="weight"), InputError, "params='weight'"),
        (lambda: GraB(nn.LazyLinear(3), 5), InputError, "not initialised yet"),
        (lambda: GraB(nn.Linear(2, 2, dtype=torch.complex64), 5), InputError, "complex"),
    ],
)
def test_refused_at_construction(make: Callable[[], Any], error: type[OrdainError], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_model_converted_after_construction() -> None:
    model = small_model().float()
    order = GraB(model, 6)
    model.double()
    with pytest.raises(StateError, match=r"now of torch\.float64.*create the order"):
        model(Regression(6).x)
    order.detach()
    model(Regression(6).x)


def test_a_model_moved_after_construction() -> None:
    model, x = small_model(), Regression(6).x.to("meta")
    order = GraB(model, 6)
    with torch.no_grad():
        for p in model.parameters():
            torch.utils.swap_tensors(p, nn.Parameter(p.to("meta")))  # the same parameters, elsewhere
    with pytest.raises(StateError, match=r"now of torch\.float64 on meta; expected torch\.float64 on cpu"):
        model(x)
    order.detach()
    assert model(x).device.type == "meta"


def test_a_state_with_a_piece_missing_changes_nothing() -> None:
    order = GraB(None, 6)
    list(order.sampler)
    order.observe(np.ones((6, 2)))
    state = order.state_dict()
    for key in ("vectors", "places", "log", "taken"):
        with pytest.raises(StateError, match=f"without {key}"):
            order.load_state_dict({k: v for k, v in state.items() if k != key})
    assert str(order.state_dict()) == str(state)


def test_a_batch_that_is_overwritten_before_the_step_is_refused() -> None:
    """The engine keeps what layers saw by reference: a buffer that is filled again would give other gradients."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    order = GraB(model, 16)
    draws = iter(order.sampler)
    buffer = torch.empty(8, 4)
    for overwritten in (False, True):
        for _ in range(8):
            next(draws)
        buffer.copy_(torch.randn(8, 4))
        model(buffer).sum().backward()
        if overwritten:
            buffer.normal_()
            with pytest.raises(GradientError, match="changed in place after the backward"):
                order.step()
        else:
            order.step()
