"""Orders by gradients as an adaptive optimizer scales them, against a loop over single examples on a twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from helpers import reloaded, same_state
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ordain import GraB, Greedy, Herding, RandomReshuffling, reference
from ordain.errors import InputError, StateError, StepError
from ordain.gradients import Dense, Sketch

N, SIZE, EPOCHS = 27, 6, 2
Optimizer = torch.optim.Optimizer


class Transformer(nn.Module):
    """A sparse table, attention, norms, and a linear layer at several positions."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 8), nn.Parameter(torch.randn(5, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 9 if tied else 3, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 6).long().clamp(max=8)
        return self.head(self.block(self.words(ids) + self.places)).mean(1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv1d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "linear": lambda: nn.Linear(5, 3),
    "conv": conv,
    "transformer": Transformer,
    "tied": lambda: Transformer(tied=True),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, betas=(0.9, 0.9)),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, betas=(0.8, 0.99)),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.003),
    "centred": lambda params: torch.optim.RMSprop(params, lr=0.003, centered=True, eps=1e-4),
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(N, 5, generator=generator, dtype=torch.float64), torch.randint(0, 3, (N,), generator=generator)


def make(name: str, optimizer: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    return model, OPTIMIZERS[optimizer](model.parameters())


def diagonal(optimizer: Any, chosen: list[Tensor]) -> Tensor:
    """Of each parameter, from the formulas of torch's documentation."""
    parts = []
    for p in chosen:
        state, group = optimizer.state[p], optimizer.param_groups[0]
        if not state:
            parts.append(torch.ones(p.numel(), dtype=torch.float64))
            continue
        if "square_avg" in state:
            v = state["square_avg"] - (state["grad_avg"] ** 2 if group["centered"] else 0.0)
        else:
            v = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
            v = v / (1 - group["betas"][1] ** state["step"].item())
        parts.append(1 / (v.sqrt() + group["eps"]).flatten())
    return torch.cat(parts)


def single(model: nn.Module, chosen: list[Tensor], index: int) -> Tensor:
    x, y = data()
    loss = cross_entropy(model(x[[index]]), y[[index]])
    grads = torch.autograd.grad(loss, chosen, materialize_grads=True, allow_unused=True)
    return torch.cat([g.flatten() for g in grads])


class Twins:
    """A model under an order, and its twin that is trained alike and gives single gradients."""

    def __init__(self, name: str, optimizer: str = "adam", names: Any = None, kind: Any = GraB, **options: Any) -> None:
        (self.model, self.optimizer), (self.twin, self.other) = make(name, optimizer), make(name, optimizer)
        self.chosen = [p for path, p in self.twin.named_parameters() if names is None or path.startswith(names)]
        self.order = kind(self.model, N, precondition=self.optimizer, **options)
        self.micro = options.get("gradients") == "microbatch"
        self.permutation = list(self.order.sampler)

    def epoch(self) -> list[Tensor]:
        """Train for an epoch; the twin's gradients in the order visited, times the diagonal as it began."""
        x, y = data()
        scale, rows = diagonal(self.other, self.chosen), []
        for start in range(0, N, SIZE):
            indices = self.permutation[start : start + SIZE]
            rows += [scale * single(self.twin, self.chosen, index) for index in indices]
            for one in ([i] for i in indices) if self.micro else [indices]:
                (cross_entropy(self.model(x[one]), y[one]) * len(one) / len(indices)).backward()
                self.order.step(loss_scale=len(one) / len(indices))
            cross_entropy(self.twin(x[indices]), y[indices]).backward()
            for optimizer in (self.optimizer, self.other):
                optimizer.step()
                optimizer.zero_grad()
        self.permutation = list(self.order.sampler)
        return rows


def check_grab(twins: Twins, centering: str, compress: Callable[[Tensor], Tensor] = lambda row: row) -> None:
    book: Any = None
    for _ in range(EPOCHS):
        before = twins.permutation
        rows = [compress(row) for row in twins.epoch()]
        if book is None:
            book = (reference.GraB if centering == "mean" else reference.PairGraB)(before, len(rows[0]))
        for row in rows:
            book.see(row.numpy())
        assert twins.permutation == book.next_order()


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("name", MODELS)
def test_signs_are_those_of_scaled_gradients(name: str, centering: Any) -> None:
    check_grab(Twins(name, centering=centering), centering)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_has_its_own_second_moments(optimizer: str) -> None:
    check_grab(Twins("conv", optimizer), "mean")


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize(("name", "names"), [("mlp", "2."), ("transformer", "head.")])
def test_by_the_head(name: str, names: str, centering: Any) -> None:
    check_grab(Twins(name, names=names, params="head", centering=centering), centering)


@pytest.mark.parametrize("gradients", ["func", "microbatch"])
@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_other_sources(gradients: str, centering: Any) -> None:
    check_grab(Twins("mlp", gradients=gradients, centering=centering), centering)


def test_units_of_several_examples() -> None:
    twins, book = Twins("mlp", group=3), None
    for _ in range(EPOCHS):
        before = twins.permutation
        units = torch.stack(twins.epoch()).view(N // 3, 3, -1).mean(1)
        book = book or reference.GraB(range(N // 3), units.shape[1])
        sigma = book.sigma
        unit_of = {unit: before[3 * at : 3 * at + 3] for at, unit in enumerate(sigma)}
        for row in units:
            book.see(row.numpy())
        assert twins.permutation == [index for unit in book.next_order() for index in unit_of[unit]]


def test_sketches_are_of_scaled_gradients() -> None:
    sketch = Sketch(16, seed=0)
    twins = Twins("mlp", sketch=16)
    sizes = [p.shape for p in twins.chosen]

    def sketched(row: Tensor) -> Tensor:
        parts = row.split([shape.numel() for shape in sizes])
        return sketch(_ByParameter([p.view(1, *shape) for p, shape in zip(parts, sizes, strict=True)])).rows()[0]

    check_grab(twins, "mean", sketched)


class _ByParameter(Dense):
    """Gradients hashed by rows and columns of each parameter, as those of a model are."""

    def __init__(self, blocks: list[Tensor]) -> None:
        super().__init__([block.flatten(1) for block in blocks])
        shaped = [block if block.ndim == 3 else block.unsqueeze(1) for block in blocks]
        offsets = [offset for offset, _ in self.placed]
        kind = type(self.placed[0][1])
        self.placed = [(offset, kind(block)) for offset, block in zip(offsets, shaped, strict=True)]


@pytest.mark.parametrize(("kind", "routine"), [(Herding, reference.herd), (Greedy, reference.greedy)])
def test_herding_stores_scaled_gradients(kind: Any, routine: Any) -> None:
    twins = Twins("transformer", kind=kind, **({"tolerance": 0.0} if kind is Herding else {}))
    for _ in range(EPOCHS):
        before = twins.permutation
        found = routine(torch.stack(twins.epoch()).numpy())
        assert twins.permutation == [before[row] for row in found]


def test_an_epoch_begins_with_the_moments_that_an_optimizer_has() -> None:
    """An order over an optimizer that has stepped already; and peeks at the loader take them anew."""
    (model, optimizer), (x, y) = make("mlp", "adam"), data()
    order = GraB(model, N, precondition=optimizer)
    next(iter(order.sampler))
    model.eval()  # such passes do not count
    cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.train()
    permutation = list(order.sampler)
    book = reference.GraB(permutation, order.state_dict()["dim"])
    scale, twin = diagonal(optimizer, list(model.parameters())), copy.deepcopy(model)
    for index in permutation:
        book.see((scale * single(twin, list(twin.parameters()), index)).numpy())
    cross_entropy(model(x[permutation]), y[permutation]).backward()
    order.step()
    assert list(order.sampler) == book.next_order()


def train(order: Any, model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    """So many steps over what is left of this epoch and the next ones."""
    x, y = data()
    while steps:
        indices = iter(order.sampler)
        while steps and (batch := list(islice(indices, SIZE))):
            cross_entropy(model(x[batch]), y[batch]).backward()
            order.step()
            optimizer.step()
            optimizer.zero_grad()
            steps -= 1


@pytest.mark.parametrize("stop", [2, 5, 7])
@pytest.mark.parametrize("options", [{}, {"params": "head"}, {"centering": "pair"}], ids=str)
def test_resumed_in_mid_epoch_it_is_the_same_to_the_bit(options: dict[str, Any], stop: int) -> None:
    whole, half = make("mlp", "adam"), make("mlp", "adam")
    orders = [GraB(model, N, precondition=optimizer, **options) for model, optimizer in (whole, half)]
    train(orders[0], *whole, steps=13)
    train(orders[1], *half, steps=stop)
    saved = reloaded([half[0].state_dict(), half[1].state_dict(), orders[1].state_dict()])
    model, optimizer = make("mlp", "adam")
    order = GraB(model, N, precondition=optimizer, **options)
    for one, state in zip((model, optimizer, order), saved, strict=True):
        one.load_state_dict(state)
    order.resume()
    train(order, model, optimizer, steps=13 - stop)
    assert same_state(order.state_dict(), orders[0].state_dict())
    assert same_state(dict(model.state_dict()), dict(whole[0].state_dict()))


def test_a_state_without_vectors_takes_the_moments_of_now() -> None:
    model, optimizer = make("mlp", "adam")
    order = GraB(model, N, precondition=optimizer)
    train(order, model, optimizer, steps=7)
    small = reloaded(order.state_dict(vectors=False))
    assert small["diagonal"] is None
    order.load_state_dict(small)
    order.resume()
    next(iter(order.sampler))
    torch.testing.assert_close(order.state_dict()["diagonal"], diagonal(optimizer, list(model.parameters())))


def test_states_of_other_orders_are_refused() -> None:
    model, optimizer = make("mlp", "adam")
    order = GraB(model, N, precondition=optimizer)
    train(order, model, optimizer, steps=7)
    state = order.state_dict()
    for wrong in (state["diagonal"][:-1], state["diagonal"].float(), -state["diagonal"], state["diagonal"][None], "no"):
        with pytest.raises(StateError, match="diagonal"):
            order.load_state_dict(state | {"diagonal": wrong})
    order.detach()
    plain = GraB(model, N)
    with pytest.raises(StateError, match="precondition"):
        plain.load_state_dict(state)
    plain.detach()
    other = GraB(model, N, precondition=OPTIMIZERS["adamw"](model.parameters()))
    with pytest.raises(StateError, match="precondition='Adam'"):
        other.load_state_dict(state)


def test_what_cannot_be_preconditioned_is_refused_by_name() -> None:
    model = mlp()
    for kind in (torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax):
        with pytest.raises(InputError, match=f"got precondition={kind.__name__};.*AdamW"):
            GraB(model, N, precondition=kind(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match=r"precondition='adam'.*Write precondition=optimizer"):
        GraB(model, N, precondition="adam")
    adam = torch.optim.Adam(model[2].parameters())
    with pytest.raises(InputError, match=r"does not have '0\.weight'.*params="):
        GraB(model, N, precondition=adam)
    GraB(model, N, precondition=adam, params="2").detach()
    with pytest.raises(InputError, match="without a model"):
        GraB(None, N, precondition=adam)
    with pytest.raises(TypeError, match="precondition"):
        RandomReshuffling(N, precondition=adam)
    order = GraB(model, N, precondition=adam, params="2")
    next(iter(order.sampler))
    with pytest.raises(StepError, match="observe"):
        order.observe(torch.zeros(1, 27))


def test_a_head_that_the_optimizer_does_not_have_is_refused_at_its_first_batch() -> None:
    model, (x, y) = mlp().double(), data()
    order = GraB(model, N, precondition=torch.optim.Adam(model[0].parameters()), params="head")
    indices = list(order.sampler)[:SIZE]
    cross_entropy(model(x[indices]), y[indices]).backward()
    with pytest.raises(InputError, match=r"does not have '2\.weight'"):
        order.step()


class Signs(torch.optim.Optimizer):
    """Looks like Adam from outside."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = p.grad.clone()


def test_an_optimizer_whose_state_is_of_another_kind_is_refused_when_it_shows() -> None:
    model, _ = make("mlp", "adam")
    optimizer = Signs(model.parameters())
    order = GraB(model, N, precondition=optimizer)
    with pytest.raises(InputError, match="precondition=Signs, whose state has momentum"):
        train(order, model, optimizer, steps=7)
