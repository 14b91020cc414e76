"""A notebook cell run twice, a model that is saved or copied while it is watched, a model that cannot be watched."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from itertools import islice
from typing import Any

import pytest
import torch
from faulty_run import plain_hooks
from helpers import is_permutation
from torch import Tensor, nn

from ordain import Every, GraB, Herding, RandomReshuffling, Until
from ordain.errors import OrdainWarning, StepError, UnsupportedModuleError

N = 8
X, Y = torch.randn(N, 4, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3
SOURCES = ["exact", "func", "microbatch"]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def backward(model: nn.Module, chosen: Any = slice(None)) -> None:
    nn.functional.cross_entropy(model(X[chosen]), Y[chosen]).backward()


def epoch(model: nn.Module, order: Any) -> list[int]:
    drawn = list(order.sampler)
    for at in range(0, N, 4):
        backward(model, drawn[at : at + 4])
        order.step()
    return drawn


@pytest.mark.parametrize("gradients", SOURCES)
def test_a_second_order_takes_the_model_over(gradients: Any) -> None:
    model = small()
    options = {"gradients": gradients, "group": 4 if gradients == "microbatch" else 1}
    first = GraB(model, N, **options)
    epoch(model, first)
    hooks = plain_hooks(model)
    with pytest.warns(OrdainWarning, match=r"another order.*detach\(\)"):
        second = GraB(model, N, **options)
    assert plain_hooks(model) == hooks
    drawn = list(first.sampler)
    backward(model, drawn[:4])
    with pytest.raises(StepError, match=r"watched by another order.*GraB\(model, n\)"):
        first.step()
    assert all(is_permutation(epoch(model, second), N) for _ in range(3))
    second.detach()
    assert not any(plain_hooks(model))
    GraB(model, N, **options).detach()  # no warning: nothing watches it


def test_an_order_that_was_let_go_is_detached_all_the_same() -> None:
    model = small()

    def cell() -> Any:
        return GraB(model, N)

    cell()
    gc.collect()
    hooks = plain_hooks(model)
    with pytest.warns(OrdainWarning, match="another order"):
        order = cell()
    assert plain_hooks(model) == hooks
    assert is_permutation(epoch(model, order), N)


def test_nothing_is_kept_alive() -> None:
    model = small()
    order: Any = GraB(model, N)
    epoch(model, order)
    gone = weakref.ref(model)
    del model, order
    gc.collect()
    assert gone() is None


def test_a_second_order_that_is_refused_changes_nothing() -> None:
    model = small()
    order = GraB(model, N)
    with pytest.raises(MemoryError):
        Herding(model, N, memory_limit=1)
    assert is_permutation(epoch(model, order), N)


def test_orders_that_watch_nothing_are_not_in_the_way() -> None:
    model = small()
    order = GraB(model, N)
    RandomReshuffling(N)
    GraB(None, N)
    GraB(model[0], N).detach()  # a part of the model is another model
    assert is_permutation(epoch(model, order), N)


def test_an_old_order_does_not_come_back_in_a_later_epoch() -> None:
    model = small()
    first = GraB(model, N, learn=Every(2))
    epoch(model, first)
    epoch(model, first)
    with pytest.warns(OrdainWarning, match="another order"):
        GraB(model, N, learn=Until(3))
    hooks = plain_hooks(model)
    list(first.sampler)
    assert first.epoch == 2
    assert plain_hooks(model) == hooks


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("learn", [Every(2), Every(3, after=2), Until(1), lambda epoch: epoch == 1])
def test_the_model_is_as_it_was_in_epochs_that_do_not_learn(learn: Any, source: str) -> None:
    """No hook of any kind, not in the first epoch either, nor after a state was loaded."""
    model = small()
    plain = plain_hooks(model)
    order = GraB(model, N, gradients=source, group=4 if source == "microbatch" else 1, learn=learn)
    assert learn(0) or plain_hooks(model) == plain
    for number in range(5):
        for at in (0, 4):
            batch = list(islice(order.sampler, 4))
            assert (plain_hooks(model) != plain) == learn(number)
            nn.functional.cross_entropy(model(X[batch]), Y[batch]).backward()
            order.step()
            order.load_state_dict(order.state_dict())
            order.resume(at + 4)
    assert order.epoch == 4
    order.detach()
    assert plain_hooks(model) == plain


# --- saved and copied -------------------------------------------------------------------------------


class Layers(nn.Module):
    """One of every kind of hook: attention's rule watches inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 3, -1)
        return self.head(self.attention(x, x, x)[0].mean(1))  # type: ignore[no-any-return]


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Any] = {
    "torch.save": saved,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),  # noqa: S301
    "deepcopy": copy.deepcopy,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("gradients", SOURCES)
@pytest.mark.parametrize("how", COPIES)
def test_a_watched_model_can_be_saved_and_copied(how: str, gradients: Any) -> None:
    """At any time: the copy trains, alone or under an order of its own, and the order does not notice."""
    models = Layers(), Layers()
    group = 4 if gradients == "microbatch" else 1
    orders = [GraB(model, N, gradients=gradients, group=group) for model in models]
    epoch(models[0], orders[0])
    epoch(models[1], orders[1])
    backward(models[1])  # and with a batch that waits for its step
    other = COPIES[how](models[1])
    models[1].zero_grad()
    backward(other)
    for p, mine in zip(other.parameters(), models[1].parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(p, mine)
    again = GraB(other, N, gradients=gradients, group=group)
    assert all(is_permutation(epoch(other, again), N) for _ in range(2))
    assert [epoch(models[0], orders[0]) for _ in range(2)] == [epoch(models[1], orders[1]) for _ in range(2)]
    again.detach()


def test_a_pickled_model_needs_nothing_of_ours() -> None:
    model = Layers()
    order = GraB(model, N)
    epoch(model, order)
    assert b"ordain" not in pickle.dumps(model).replace(__name__.encode(), b"")


# --- what cannot be watched -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("gradients", SOURCES)
def test_compiled_by_torch_jit(gradients: Any) -> None:
    for model in (torch.jit.script(small()), torch.jit.trace(small(), X)):
        with pytest.raises(UnsupportedModuleError, match=r"torch\.jit.*train the eager model"):
            GraB(model, N, gradients=gradients)
