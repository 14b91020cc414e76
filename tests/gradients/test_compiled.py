"""Models under torch.compile: orders of the loop, and no model is compiled again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy

from ordain import GraB, reference
from ordain.errors import UnsupportedModuleError

pytestmark = pytest.mark.filterwarnings("ignore", "error::ordain.errors.OrdainWarning")  # dynamo's own
N, SIZE, EPOCHS, LAYERS = 18, 6, 2, 9


class Net(nn.Module):
    """More layers, and more shapes of them, than dynamo compiles one function for (8)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5 + i, 6 + i) for i in range(LAYERS))
        self.out = nn.Linear(5 + LAYERS, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.out(x)


class Scaled(nn.Module):
    """Numbers that no layer explains, in compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.first, self.out = nn.Parameter(torch.rand(5, 6)), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.first(x).exp() * self.scales.mean(0)).sin() * self.scales[0])


class Front(nn.Module):
    """Only what comes before the head is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.out, self.body.out = self.body.out, nn.Identity()  # type: ignore[assignment]
        self.body.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(N, 5, generator=generator, dtype=torch.float64), torch.randint(0, 3, (N,), generator=generator)


def make(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def check(build: Callable[[], nn.Module], centering: Any, params: Any, *, first: bool) -> None:
    """Orders against the loop on an eager twin. After the first epoch, dynamo raises where it would compile again."""
    model, twin = make(build), make(build)
    x, y = data()
    called = torch.compile(model, backend="aot_eager") if first else model
    order = GraB(called, N, params=params, centering=centering)
    if build is not Front and not first:
        called = torch.compile(model, backend="aot_eager")
    chosen = [p for name, p in twin.named_parameters() if params is None or name.startswith("out.")]
    permutation = list(iter(order.sampler))
    kind = reference.GraB if centering == "mean" else reference.PairGraB
    book: Any = kind(permutation, sum(p.numel() for p in chosen))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.2) for one in (model, twin)]
    for epoch in range(EPOCHS):
        with torch._dynamo.config.patch(error_on_recompile=epoch > 0):
            for start in range(0, N, SIZE):
                indices = permutation[start : start + SIZE]
                with torch.compiler.set_stance("force_eager"):
                    losses = cross_entropy(twin(x[indices]), y[indices], reduction="none")
                for loss in losses:
                    grads = torch.autograd.grad(loss, chosen, retain_graph=True)
                    book.see(torch.cat([grad.flatten() for grad in grads]).numpy(), 0.0)
                cross_entropy(called(x[indices]), y[indices]).backward()
                losses.mean().backward()
                order.step()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        permutation = list(iter(order.sampler))
        assert permutation == book.next_order(), f"after epoch {epoch}"


@pytest.mark.parametrize("first", [True, False], ids=["compiled, then ordered", "ordered, then compiled"])
@pytest.mark.parametrize(("params", "centering"), [("out", "mean"), ("out", "pair"), ("head", "mean")])
def test_a_head_leaves_two_graphs(params: str, centering: str, first: bool) -> None:
    check(Net, centering, params, first=first)
    assert counters["stats"]["unique_graphs"] == 2  # what comes before the head, and the head
    assert counters["stats"]["calls_captured"] == 2 * LAYERS + 1  # all of it


@pytest.mark.parametrize(("params", "centering"), [("out", "mean"), ("out", "pair"), ("head", "mean")])
def test_a_compiled_front_is_one_graph(params: str, centering: str) -> None:
    check(Front, centering, params, first=False)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("first", [True, False], ids=["compiled, then ordered", "ordered, then compiled"])
def test_every_layer_may_be_watched(first: bool) -> None:
    """A graph for each shape of a layer at most, and none of our own code in any of them."""
    with torch._dynamo.config.patch(recompile_limit=LAYERS + 3):
        check(Net, "pair", None, first=first)
    assert counters["stats"]["unique_graphs"] <= LAYERS + 3
    assert counters["stats"]["calls_captured"] <= LAYERS + 3


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_parameters_that_are_taken_from_the_graph(centering: str) -> None:
    """Compiled code gives the gradient of each example, and still has what it saved for the loop's own backward."""
    check(Scaled, centering, None, first=False)


def test_the_search_for_a_head_leaves_no_trace() -> None:
    """The first batch runs twice: statistics and random numbers are those of a model without an order."""
    x, y = data()
    ended = []
    for ordered in (False, True):
        torch._dynamo.reset()
        model = make(lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)))
        order = GraB(model, N, params="head" if ordered else "3")
        if not ordered:
            order.detach()
        called = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        indices = list(iter(order.sampler))
        for start in range(0, N, SIZE):
            some = indices[start : start + SIZE]
            cross_entropy(called(x[some]), y[some]).backward()
            if ordered:
                order.step()
            optimizer.step()
            optimizer.zero_grad()
        ended.append(model.state_dict())
    assert ended[0]["1.num_batches_tracked"] == N // SIZE
    torch.testing.assert_close(ended[0], ended[1], rtol=0, atol=0)


def test_code_from_before_the_order_is_refused_with_a_way_out() -> None:
    """Dynamo gives a second model of a class the code of the first, without looking at hooks."""
    x, y = data()
    other, model = make(Net), make(Net)
    torch.compile(other, backend="aot_eager")(x[:SIZE]).sum().backward()
    order, called = GraB(model, N, params="out"), torch.compile(model, backend="aot_eager")

    def step() -> None:
        indices = [index for index, _ in zip(order.sampler, range(SIZE), strict=False)]
        cross_entropy(called(x[indices]), y[indices]).backward()
        order.step()

    with pytest.raises(UnsupportedModuleError, match=r"torch\._dynamo\.reset\(\) after creating the order"):
        step()
    torch._dynamo.reset()
    step()
