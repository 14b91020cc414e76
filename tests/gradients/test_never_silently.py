"""Loops and models that break an assumption late, or behind the order's back: equal to the loop, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Regression, loop_gradients, small_model
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ordain import GraB
from ordain.errors import GradientError, StepError, UnsupportedModuleError
from ordain.gradients import ExactSource, FuncSource, MicrobatchSource

N, B = 24, 4
Source = ExactSource | FuncSource | MicrobatchSource


def rows_of(source: Source) -> Tensor:
    ((batch, _),) = source.collect()
    return batch.rows()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


# --- the optimizer first --------------------------------------------------------------------------


class Reads(nn.Module):
    """A layer whose gradients need its weights, and a module with a parameter of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x.unsqueeze(1) if isinstance(self.layer, nn.RNNBase) else x)
        out = out[0] if isinstance(out, tuple) else out
        return self.head((out * self.scale).reshape(len(x), -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [ExactSource, FuncSource])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.LSTM(5, 3, batch_first=True),
        lambda: nn.GRU(5, 3, batch_first=True),
        lambda: nn.GRUCell(5, 3),
        lambda: nn.Linear(5, 3),
    ],
    ids=["lstm", "gru", "cell", "linear"],
)
def test_the_optimizer_may_step_first(layer: Callable[[], nn.Module], kind: type[Source]) -> None:
    data, model = Regression(N), Reads(layer()).double()
    optimizer, source = sgd(model, lr=0.5), kind(model)
    for start in range(0, N, B):
        x, y = data.x[start : start + B], data.y[start : start + B]
        wanted = loop_gradients(copy.deepcopy(model), F.cross_entropy, x, y)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if kind is FuncSource and isinstance(model.layer, nn.RNNBase | nn.RNNCellBase):
            with pytest.raises(UnsupportedModuleError, match=r"torch\.func cannot vmap"):
                source.collect()
            continue
        torch.testing.assert_close(rows_of(source), wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "layer", "refused"),
    [
        (ExactSource, lambda: nn.LSTM(5, 3, batch_first=True), "weights of 'layer'"),
        (ExactSource, lambda: nn.GRUCell(5, 3), "weights of 'layer'"),
        (ExactSource, lambda: nn.Linear(5, 3), None),
        (FuncSource, lambda: nn.Linear(5, 3), "torch.func runs again"),
    ],
)
def test_an_optimizer_that_steps_in_the_backward(kind: type[Source], layer: Any, refused: str | None) -> None:
    """Its rate is 0 at first, so that checks in the first passes show nothing."""
    data, model = Regression(N), Reads(layer()).double()
    source, optimizers = kind(model), {p: torch.optim.SGD([p], lr=0.0) for p in model.parameters()}
    for p, optimizer in optimizers.items():
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for step in range(2 * N // B):
        x, y = (part[step * B % N : step * B % N + B] for part in (data.x, data.y))
        wanted = loop_gradients(copy.deepcopy(model), F.cross_entropy, x, y)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if refused is not None:
            with pytest.raises(GradientError, match=rf"{refused}.*changed during the backward.*after loss\.backward"):
                source.collect()
        else:
            torch.testing.assert_close(rows_of(source), wanted, rtol=1e-8, atol=1e-12)
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = 0.1 * (step > 6)


# --- assumptions that break late --------------------------------------------------------------------


def train(source: Source, model: nn.Module, steps: int, loss: Callable[[int, Tensor, Tensor], Tensor]) -> None:
    data, optimizer = Regression(N), sgd(model)
    for step in range(steps):
        start = B * step % N
        optimizer.zero_grad()
        loss(step, data.x[start : start + B], data.y[start : start + B]).backward()
        source.collect()
        optimizer.step()


@pytest.mark.parametrize("kind", [ExactSource, FuncSource])
def test_a_penalty_that_is_switched_on_late(kind: type[Source]) -> None:
    model = small_model()

    def loss(step: int, x: Tensor, y: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(x), y) + (0.1 * penalty if step > 20 else 0.0)

    source = kind(model)
    train(source, model, 20, loss)
    source.detach()
    with pytest.raises(
        UnsupportedModuleError, match=r"gradient that (.* do not explain|differs from the sum over single examples)"
    ):
        train(kind(model), model, 200, loss)


def test_a_head_that_is_called_again_outside_the_model() -> None:
    model = small_model()

    def loss(step: int, x: Tensor, y: Tensor) -> Tensor:
        more = model[2](torch.ones(1, 4).double()).square().sum() if step > 20 else 0.0
        return F.cross_entropy(model(x), y) + more

    with pytest.raises(UnsupportedModuleError, match=r"'2\.weight'.*order\.ignore"):
        train(ExactSource(model), model, 200, loss)


class Gated(nn.Module):
    """Attends over the batch, behind a gate that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.gate = nn.Linear(5, 4), nn.Linear(4, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).tanh()
        return self.head(h + self.gate * ((h @ h.T).softmax(1) @ h))  # type: ignore[no-any-return]


def test_a_gate_that_opens() -> None:
    model = Gated().double()
    with pytest.raises(UnsupportedModuleError, match=r"mixes the examples|depends on the other examples"):
        train(ExactSource(model), model, 200, lambda _, x, y: F.cross_entropy(model(x), y))


def of_the_curvature(model: nn.Module, loss: Tensor, x: Tensor) -> None:
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    torch.autograd.grad(grads, list(model.parameters()), grads, retain_graph=True)


def per_example(model: nn.Module, loss: Tensor, x: Tensor) -> None:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    gradient = torch.func.grad(lambda weights, one: functional_call(model, weights, (one[None],)).sum())
    torch.func.vmap(gradient, in_dims=(None, 0))(weights, x.detach())


ASIDE: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "of the inputs": lambda model, loss, x: torch.autograd.grad(loss, x, retain_graph=True),
    "of a layer": lambda model, loss, x: torch.autograd.grad(loss, next(model.parameters()), retain_graph=True),
    "of all": lambda model, loss, x: torch.autograd.grad(loss, list(model.parameters()), retain_graph=True),
    "of the curvature": of_the_curvature,
    "per example": per_example,
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [ExactSource, FuncSource, MicrobatchSource])
@pytest.mark.parametrize("aside", ASIDE)
def test_gradients_that_are_computed_beside_the_backward_do_not_count(
    kind: type[Source], aside: str, late: bool
) -> None:
    data, model = Regression(N), small_model()
    source = kind(model)
    for start in range(0, N, B):
        x, y = data.x[start : start + B].clone().requires_grad_(), data.y[start : start + B]
        wanted = loop_gradients(copy.deepcopy(model), F.cross_entropy, x.detach(), y)
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if late:
            loss.backward(retain_graph=True)
        if start % 2 == 0:
            ASIDE[aside](model, loss, x)
        if not late:
            loss.backward()
        rows = rows_of(source)
        wanted = wanted.mean(dim=0, keepdim=True) if len(rows) == 1 else wanted
        torch.testing.assert_close(rows, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", [ExactSource, FuncSource, MicrobatchSource])
def test_gradients_that_nothing_but_autograd_grad_computes_count(kind: type[Source]) -> None:
    data, model = Regression(B), small_model()
    source, parameters = kind(model), list(model.parameters())
    wanted = loop_gradients(copy.deepcopy(model), F.cross_entropy, data.x, data.y)
    torch.autograd.grad(F.cross_entropy(model(data.x), data.y), parameters)
    torch.testing.assert_close(rows_of(source).mean(dim=0), wanted.mean(dim=0), rtol=1e-8, atol=1e-12)
    torch.autograd.grad(F.cross_entropy(model(data.x), data.y), parameters[:2])
    assert source.collect() == []


class Late(nn.Module):
    """A table of T x k that all examples share, first used in the second batch, when T is B."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shared, self.head = nn.Linear(5, 4), nn.Linear(2, 4), nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.layer(x)
        if self.calls > 6:
            h = h + self.shared(torch.arange(2.0 * B, dtype=torch.float64).reshape(B, 2)).sum(0)
        return self.head(h.tanh())  # type: ignore[no-any-return]


def test_a_layer_that_is_first_called_late() -> None:
    data, model = Regression(N), Late().double()
    source, optimizer = ExactSource(model), sgd(model)
    for step in range(12):
        start = B * step % N
        x, y = data.x[start : start + B], data.y[start : start + B]
        twin = copy.deepcopy(model)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        found = rows_of(source)
        rows = []
        for i in range(B):
            alone = copy.deepcopy(twin)
            loss = F.cross_entropy(alone(x[i : i + 1]), y[i : i + 1])
            grads = torch.autograd.grad(loss, list(alone.parameters()), allow_unused=True, materialize_grads=True)
            rows.append(torch.cat([g.reshape(-1) for g in grads]))
        torch.testing.assert_close(found, torch.stack(rows), rtol=1e-8, atol=1e-12)
        optimizer.step()
    assert model.calls == 12


def test_batch_dim_forgotten() -> None:
    """Steps first, as many as the loader's batches: the model is given [T, B, features] and no batch_dim=."""
    model = nn.Sequential(nn.LSTM(5, 4), Outputs(), nn.Linear(4, 3)).double()
    order = GraB(model, N)
    indices = iter(order.sampler)
    for _ in range(B):
        next(indices)
    model(torch.randn(B, B, 5, dtype=torch.float64)).square().mean().backward()
    with pytest.raises((UnsupportedModuleError, StepError), match="batch_dim="):
        order.step()


class Outputs(nn.Module):
    def forward(self, found: tuple[Tensor, Any]) -> Tensor:
        return found[0]


# --- torch.func -------------------------------------------------------------------------------------


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return self.head(h - h.mean(0))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [ExactSource, FuncSource])
def test_statistics_over_the_batch(kind: type[Source]) -> None:
    model = Centred().double()
    with pytest.raises(UnsupportedModuleError, match="batch"):
        train(kind(model), model, 1, lambda _, x, y: F.cross_entropy(model(x), y))


class Counting(nn.Module):
    """Counts its calls, and keeps a moving average of its weight in another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.slow = nn.Linear(5, 3), nn.Linear(5, 3)
        self.slow.requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.slow.weight.lerp_(self.layer.weight, 0.1)
        return self.layer(x) + self.slow(x)  # type: ignore[no-any-return]


class CountingAgain(nn.Module):
    """Runs again in the backward what counts, draws random numbers and changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.calls = nn.Linear(5, 3), nn.Parameter(torch.rand(5)), 0
        self.register_buffer("mean", torch.zeros(5))

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.lerp_(x.detach()[0], 0.1)
        return self.layer(F.dropout(x * self.scale, 0.3))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Hooked(nn.Module):
    """Hooks of its user's count, and draw random numbers, in the forward and the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.calls, self.kept = nn.Linear(5, 4), nn.Linear(4, 3), 0, []
        self.register_buffer("noise", torch.zeros(1))
        self.layer.weight.register_hook(self.count)
        self.layer.register_forward_hook(self.count)
        self.head.register_full_backward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1
        self.kept.append(self.calls)
        self.noise.add_(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [ExactSource, FuncSource])
@pytest.mark.parametrize(
    "build", [Counting, CountingAgain, Hooked, lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3))]
)
def test_a_watched_model_computes_what_it_computes_unwatched(
    kind: type[Source], build: Callable[[], nn.Module]
) -> None:
    model, twin = build().double(), build().double()
    twin.load_state_dict(model.state_dict())
    data = Regression(N)
    source, random_numbers = kind(model), []
    for start in range(0, N, B):
        x, y = data.x[start : start + B], data.y[start : start + B]
        for one in (twin, model):
            torch.manual_seed(start)
            one.zero_grad()
            F.cross_entropy(one(x), y).backward()
            random_numbers.append(torch.get_rng_state())
        assert torch.equal(*random_numbers[-2:])
        try:
            source.collect()
        except UnsupportedModuleError:
            assert kind is FuncSource  # torch.func cannot run what changes its buffers in place
        for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        assert getattr(model, "calls", 0) == getattr(twin, "calls", 0)
        assert getattr(model, "kept", []) == getattr(twin, "kept", [])
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


class NormalizedHead(nn.Module):
    """A weight that is computed from another, so that its gradient is taken from the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, F.normalize(self.out.weight, dim=0))


@pytest.mark.parametrize(
    ("number", "zero"),
    [
        (3, [(0, slice(1, None, 2)), (1, slice(0, None, 2))]),  # no feature is active in both examples
        (0, [(0, slice(None))]),  # nor any in the first
        (0, [(1, slice(None))]),
        (2, [(0, slice(None)), (1, slice(4, None))]),
    ],
)
def test_features_that_happen_to_be_zero(number: int, zero: list[tuple[int, slice]]) -> None:
    """They let a gradient look as if the examples lay in another dimension, or as if a layer explained it."""
    torch.manual_seed(0)
    model = NormalizedHead().double()
    source = ExactSource(model)
    for batch in range(6):
        h, y = torch.rand(2, 8, dtype=torch.float64), torch.randint(0, 4, (2,))
        for example, features in zero if batch == number else ():
            h[example, features] = 0
        F.cross_entropy(model(h), y).backward()
        found = rows_of(source)
        twin = copy.deepcopy(model)
        losses = [F.cross_entropy(twin(h[i : i + 1]), y[i : i + 1]) for i in range(2)]
        wanted = [torch.autograd.grad(loss, twin.out.weight)[0].flatten() for loss in losses]
        torch.testing.assert_close(found, torch.stack(wanted))
