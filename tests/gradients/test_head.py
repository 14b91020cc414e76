"""Ordering by the last linear layer, or by layers that are named: exact, whatever comes before them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers import reloaded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ordain import GraB, Herding, reference, validate
from ordain.errors import InputError, OrdainWarning, StateError, UnsupportedModuleError

N, SIZE, EPOCHS = 26, 6, 3


class DefinedFirst(nn.Module):
    """The layer that is called last is the first of its attributes; batch normalisation and dropout before it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(7, 3)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


class Attending(nn.Module):
    """Every example attends to all others of the batch; then checkpointed layers; then the head, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ x.T).softmax(1) @ x
        h = checkpoint(lambda t: self.first(t).tanh(), x, use_reentrant=False)
        return self.head(h) + self.head(h.square())


class Tokens(nn.Module):
    """A language model: its output layer has a row for each word, tied to the embedding."""

    def __init__(self, *, tied: bool, folded: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.lm_head = nn.Embedding(30, 4), nn.Linear(4, 4), nn.Linear(4, 30, bias=False)
        self.folded = folded
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 10).long().clamp(max=29)
        h = self.embed(ids)
        h = self.mix(h.reshape(-1, 4) if self.folded else h.cumsum(1)).tanh().view(len(x), -1, 4)
        return self.lm_head(h).sum(1)[:, :3]


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(1, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x.T[..., None])[0]).sum(0)


class Sixteen(torch.autograd.Function):
    """An operation that nobody knows: what a quantised layer looks like from outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Parameter(torch.randn(5, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(Sixteen.apply(x @ self.body))


def weight_norm(*, bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), parametrizations.weight_norm(nn.Linear(4, 3, bias=bias)))


_NORMED = ("2.parametrizations.weight.original0", "2.parametrizations.weight.original1")


@dataclass(frozen=True)
class Setting:
    build: Callable[[], nn.Module]
    params: Any
    names: tuple[str, ...]  # what is ordered by


SETTINGS = {
    "called last, defined first": Setting(DefinedFirst, "head", ("out.weight", "out.bias")),
    "attention over the batch": Setting(Attending, "head", ("head.weight",)),
    "tied vocabulary": Setting(lambda: Tokens(tied=True), "head", ("mix.weight", "mix.bias")),
    "wide vocabulary": Setting(lambda: Tokens(tied=False, folded=True), "head", ("mix.weight", "mix.bias")),
    "sequence first": Setting(SequenceFirst, "head", ("fc.weight", "fc.bias")),
    "unknown operation": Setting(Quantised, "head", ("fc.weight", "fc.bias")),
    "weight norm": Setting(lambda: weight_norm(bias=True), "head", ("2.bias", *_NORMED)),
    "weight norm without a bias": Setting(lambda: weight_norm(bias=False), "head", _NORMED),
    "a name": Setting(DefinedFirst, "out.bias", ("out.bias",)),
    "a prefix and a module's name": Setting(
        DefinedFirst, ["body.4", "out."], ("out.weight", "out.bias", "body.4.weight", "body.4.bias")
    ),
    "before the normalisation": Setting(DefinedFirst, "body.0", ("body.0.weight", "body.0.bias")),
    "behind the normalisation": Setting(
        DefinedFirst, lambda name: name.startswith("body.4"), ("body.4.weight", "body.4.bias")
    ),
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(N, 5, generator=generator, dtype=torch.float64), torch.randint(0, 3, (N,), generator=generator)


def make(setting: Setting) -> nn.Module:
    torch.manual_seed(0)
    return setting.build().double()


def orders(setting: Setting, centering: Any) -> tuple[list[list[int]], list[list[int]]]:
    """The orders of some epochs, and those of the paper's algorithm fed with the parts of a twin's losses."""
    model, twin = make(setting), make(setting)
    x, y = data()
    order = GraB(model, N, params=setting.params, centering=centering)
    chosen = [p for name, p in twin.named_parameters() if name in setting.names]
    permutation = list(iter(order.sampler))
    kind = reference.GraB if centering == "mean" else reference.PairGraB
    book: Any = kind(permutation, sum(p.numel() for p in chosen))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.2) for one in (model, twin)]
    found, wanted = [], []
    for epoch in range(EPOCHS):
        for start in range(0, N, SIZE):
            indices = permutation[start : start + SIZE]
            torch.manual_seed(epoch * N + start)
            loss = cross_entropy(model(x[indices]), y[indices])
            torch.manual_seed(epoch * N + start)
            parts = cross_entropy(twin(x[indices]), y[indices], reduction="none")
            torch.testing.assert_close(loss, parts.mean(), rtol=1e-12, atol=0.0)
            for part in parts:
                grads = torch.autograd.grad(part, chosen, retain_graph=True, materialize_grads=True, allow_unused=True)
                book.see(torch.cat([g.reshape(-1) for g in grads]).numpy(), 0.0)
            loss.backward()
            parts.mean().backward()
            order.step()
            for one in optimizers:
                one.step()
                one.zero_grad()
        permutation = list(iter(order.sampler))
        found.append(permutation)
        wanted.append(book.next_order())
    return found, wanted


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("name", SETTINGS)
def test_signs_are_those_of_the_layers_alone(name: str, centering: str) -> None:
    found, wanted = orders(SETTINGS[name], centering)
    assert found == wanted


@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_layers_before_the_head_may_be_compiled() -> None:
    torch._dynamo.reset()
    found, wanted = orders(
        Setting(
            lambda: nn.Sequential(torch.compile(nn.Linear(5, 6), backend="aot_eager"), nn.Linear(6, 3)),
            "head",
            ("1.weight", "1.bias"),
        ),
        "pair",
    )
    assert found == wanted
    torch._dynamo.reset()


def hooked(model: nn.Module) -> set[str]:
    """The modules with a hook of any kind."""
    return {
        name
        for name, module in model.named_modules()
        if any(found for kind, found in vars(module).items() if "hooks" in kind)
    }


def step(order: Any, model: nn.Module, size: int = SIZE) -> None:
    x, y = data()
    indices = [index for index, _ in zip(order.sampler, range(size), strict=False)]
    cross_entropy(model(x[indices]), y[indices]).backward()
    order.step()


def test_no_other_layer_is_watched_and_the_choice_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = make(SETTINGS["called last, defined first"])
    order = GraB(model, N, params="head")
    assert "params='head'," in repr(order)
    with caplog.at_level(logging.INFO, logger="ordain"):
        step(order, model)
    assert [record.getMessage() for record in caplog.records] == ["ordering by 'out', 24 of 136 parameters"]
    assert "params='head' (out.weight [3, 7], out.bias [3])" in repr(order)
    assert hooked(model) == {"", "out"}
    order.detach()
    assert hooked(model) == set()


def test_forwards_that_do_not_count_do_not_choose() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3)).double()
    order = GraB(model, N, params="head")
    with order.ignore():
        model[0](data()[0])
    model.eval()
    model(data()[0])
    model.train()
    with torch.no_grad():
        model(data()[0])
    assert order.state_dict()["dim"] is None
    step(order, model)
    assert order.state_dict()["parameters"] == ["1.weight [3, 3]", "1.bias [3]"]


@pytest.mark.parametrize("kind", [GraB, Herding])
def test_a_state_goes_on_in_a_process_that_has_not_seen_a_batch(kind: Any) -> None:
    setting = SETTINGS["unknown operation"]
    x, y = data()

    def go(order: Any, model: nn.Module, steps: int) -> list[int]:
        seen = []
        batches = iter(torch.utils.data.BatchSampler(order.sampler, SIZE, drop_last=False))
        for indices, _ in zip(batches, range(steps), strict=False):
            cross_entropy(model(x[indices]), y[indices]).backward()
            order.step()
            seen += indices
        return seen

    model = make(setting)
    order = kind(model, N, params="head")
    go(order, model, 2)
    state = reloaded(order.state_dict())
    other_model = make(setting)
    other = kind(other_model, N, params="head")
    other.load_state_dict(state)
    for one in (order, other):
        one.resume()
    assert go(order, model, 9) == go(other, other_model, 9)
    assert list(order.sampler) == list(other.sampler)


def test_a_state_of_another_head_is_refused() -> None:
    model = make(SETTINGS["unknown operation"])
    order = GraB(model, N, params="head")
    step(order, model)
    other = make(SETTINGS["called last, defined first"])
    late = GraB(other, N, params="head")
    late.load_state_dict(order.state_dict())
    late.resume()
    with pytest.raises(StateError, match=r"another model, with parameter 'fc.weight \[3, 6\]'; expected 'out.weight"):
        step(late, other)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ("outt", "Did you mean 'out'"),
        (["out", 3], "names of parameters"),
        ([], "names of parameters"),
        (3.5, "names of parameters"),
        (nn.Linear(2, 2), "no parameter of the model"),
    ],
)
def test_a_choice_that_is_none(params: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        GraB(DefinedFirst(), N, params=params)


def test_a_module_is_a_choice() -> None:
    model = DefinedFirst()
    assert GraB(model, N, params=model.out).state_dict()["parameters"] == ["out.weight [3, 7]", "out.bias [3]"]


def test_a_model_without_a_linear_layer() -> None:
    with pytest.raises(InputError, match="no trainable linear layer"):
        GraB(nn.Conv2d(1, 2, 3), N, params="head")


@pytest.mark.parametrize("gradients", ["func", "microbatch"])
def test_the_head_is_found_by_hooks_only(gradients: str) -> None:
    with pytest.raises(InputError, match="Name the layer"):
        GraB(DefinedFirst(), N, params="head", gradients=gradients)


def test_all_of_a_normalised_model_is_warned_of_still() -> None:
    with pytest.warns(OrdainWarning, match="BatchNorm1d"):
        GraB(DefinedFirst(), N)


def test_validation_names_the_head() -> None:
    found = validate(DefinedFirst(), params="head", inputs=torch.randn(4, 5))
    assert [row.name for row in found.rows] == ["out.weight", "out.bias"]
    assert not found.problems


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = DefinedFirst()
    order = GraB(model, N, params="head", centering="pair")
    x, y = data()
    for _ in range(2):
        for indices in torch.utils.data.BatchSampler(order.sampler, SIZE, drop_last=False):
            with torch.autocast("cpu", dtype=dtype):
                loss = cross_entropy(model(x[indices].float()), y[indices])
            loss.backward()
            order.step()
    assert order.state_dict()["dtype"] == "torch.float32"


@pytest.mark.parametrize("kind", [GraB, Herding])
@pytest.mark.parametrize("outputs", [2, 3, 4])
def test_a_head_whose_weight_was_replaced_is_refused_at_once(kind: Any, outputs: int) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3, bias=False))
    x, y = (one[:SIZE] for one in data())
    order = kind(model, 20 * SIZE, params="head")
    indices = iter(order.sampler)
    for step in range(9):  # most passes are not inspected any more
        if step == 8:
            model[2].weight = nn.Parameter(torch.randn(outputs, 4))
        for _ in range(SIZE):
            next(indices)
        cross_entropy(model(x.float()), y.clamp(max=1)).backward()
        if step < 8:
            order.step()
    with pytest.raises(StateError, match="did not exist when the order was created"):
        order.step()


@pytest.mark.parametrize("head", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("body", [torch.float32, torch.bfloat16])
def test_the_head_may_have_another_dtype_than_what_comes_before(body: torch.dtype, head: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = nn.Linear(5, 4).to(body), nn.Linear(4, 3).to(head)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.body(x.to(body)).to(head))

    model = Mixed()
    order = Herding(model, 4 * SIZE, params="head")
    x, y = (one[:SIZE] for one in data())
    indices = iter(order.sampler)
    for _ in range(4):
        for _ in range(SIZE):
            next(indices)
        cross_entropy(model(x).float(), y).backward()
        order.step()
    assert order.state_dict()["stored"].dtype == (torch.float64 if head is torch.float64 else torch.float32)


def test_a_head_that_is_not_called_is_spoken_of() -> None:
    """The first forward went another way than training does."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor, other: bool = False) -> Tensor:
            return self.b(x) if other else self.a(x)

    model = Branches().double()
    order = GraB(model, N, params="head")
    x, y = data()
    model(x[:2], other=True)
    indices = iter(order.sampler)
    for _ in range(SIZE):
        next(indices)
    with pytest.warns(OrdainWarning, match="does not call 'b'"):
        out = model(x[:SIZE])
    cross_entropy(out, y[:SIZE]).backward()
    order.step()
    model(x[:SIZE])  # once is enough


@pytest.mark.parametrize("kind", [GraB, Herding])
def test_a_head_that_gets_no_gradient_is_spoken_of(kind: Any) -> None:
    """Of two heads the loss takes the first, and the last one called is found."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    model = Two().double()
    order = kind(model, N, params="head")
    x, y = data()
    indices = iter(order.sampler)
    for said in (True, False):  # once is enough
        for _ in range(SIZE):
            next(indices)
        with pytest.warns(OrdainWarning, match="brings no gradient to 'b'") if said else contextlib.nullcontext():
            cross_entropy(model(x[:SIZE])[0], y[:SIZE]).backward()
        order.step()


def test_other_tensors_than_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    order = GraB(model, 4, params="head")
    list(order.sampler)
    other = {name: p * 1.5 for name, p in model.named_parameters()}
    with pytest.raises(UnsupportedModuleError, match="functional_call"):
        torch.func.functional_call(model, other, (torch.randn(4, 4),))
    with pytest.raises(InputError, match="expected 'head', names"):
        GraB(model, 4, params=np.array(["head", "2"]))
