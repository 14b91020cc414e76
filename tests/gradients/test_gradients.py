"""Per-example gradients: forms users have them in, and torch.func out of an ordinary backward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from faulty_run import plain_hooks
from helpers import Regression, loop_gradients, small_model
from torch import Tensor, nn

from ordain.balancing.grouping import Prepended
from ordain.errors import GradientError, InputError, UnsupportedModuleError
from ordain.gradients import Dense, FuncSource, Gradients, MicrobatchSource, as_gradients, memory
from ordain.gradients.factored import Factored
from ordain.gradients.param_grads import Materialized, OuterProduct, WithBias


def rows_of(batch: Gradients) -> Tensor:
    return batch.weighted_sum(torch.eye(batch.size, dtype=batch.dtype))


class Bare(Gradients):
    """No more than what a class of the user's must have."""

    def __init__(self, rows: Tensor) -> None:
        self.kept = rows
        (self.size, self.dim), self.dtype, self.device = rows.shape, rows.dtype, rows.device

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return (self.kept @ self.kept.T).triu(), vectors @ self.kept.T

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        return weights @ self.kept if out is None else out.addmm_(weights, self.kept)

    def select(self, rows: Tensor) -> Bare:
        return Bare(self.kept[rows])


@pytest.mark.parametrize("form", ["dense", "blocks", "bare"])
def test_all_operations(form: str) -> None:
    rows = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    forms: dict[str, Callable[[], Gradients]] = {
        "dense": lambda: Dense([rows]),
        "blocks": lambda: Dense([rows[:, :2], rows[:, 2:3], rows[:, 3:]]),
        "bare": lambda: Bare(rows),
    }
    batch = forms[form]()
    vectors, weights = torch.randn(3, 7).double(), torch.randn(2, 5).double()
    assert (batch.size, batch.dim, batch.dtype) == (5, 7, torch.float64)
    torch.testing.assert_close(batch.gram(), rows @ rows.T)
    torch.testing.assert_close(batch.dot(vectors), vectors @ rows.T)
    torch.testing.assert_close(batch.weighted_sum(weights), weights @ rows)
    assert torch.equal(batch.rows(), rows)
    sent = [grads.materialize(0, 1).flatten(1) for _, grads in batch.by_parameter()[0]]
    assert torch.equal(torch.cat(sent, dim=1), rows)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    for count in (1, 2):
        out = torch.ones(count, 7, dtype=torch.float64)
        batch.add_signed(signs, out)
        wanted = torch.stack([signs @ rows, rows.sum(dim=0)])
        torch.testing.assert_close(out, 1 + wanted[:count])
    pairs = rows[:4:2] - rows[1:4:2]
    gram, dots = batch.select(torch.arange(4)).paired_products(vectors)
    torch.testing.assert_close(gram.triu(), (pairs @ pairs.T).triu())
    torch.testing.assert_close(dots, vectors @ pairs.T)
    picked = torch.tensor([0, 3, 4])
    torch.testing.assert_close(rows_of(batch.select(picked)), rows[picked])


def test_rows_in_front_of_a_batch() -> None:
    rows = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    vectors, weights = torch.randn(3, 7).double(), torch.randn(2, 5).double()
    batch = Prepended(rows[:2], Dense([rows[2:, :4], rows[2:, 4:]]))
    assert (batch.size, batch.dim, batch.dtype) == (5, 7, torch.float64)
    gram, dots = batch.products(vectors)
    torch.testing.assert_close(gram.triu(), (rows @ rows.T).triu())
    torch.testing.assert_close(dots, vectors @ rows.T)
    torch.testing.assert_close(batch.weighted_sum(weights), weights @ rows)
    out = torch.ones(2, 7, dtype=torch.float64)
    torch.testing.assert_close(batch.weighted_sum(weights, out=out), weights @ rows + 1)


def test_forms_of_gradients() -> None:
    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(8.0).reshape(2, 2, 2)
    joined = torch.cat([a, b.reshape(2, 4)], dim=1)
    for given in ({"w": a, "b": b}, [a, b], (a, b), {"w": a.numpy(), "b": b}, joined, joined.numpy(), Dense([joined])):
        torch.testing.assert_close(rows_of(as_gradients(given)), joined)
    assert as_gradients(a.half()).dtype == torch.float32
    assert as_gradients([a, b.double()]).dtype == torch.float64
    assert not rows_of(as_gradients(a.clone().requires_grad_())).requires_grad
    assert as_gradients([torch.ones(4)]).dim == 1  # a scalar parameter in a list


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        (torch.ones(3), r"gradients of shape \(3,\); expected \[B, d\]"),
        ([], "no gradients"),
        (torch.ones(3, 0), "gradients of length 0"),
        ([torch.ones(2, 3), torch.ones(3, 3)], r"different numbers of examples: \{'\[0\]': 2, '\[1\]': 3\}"),
        ({"w": torch.ones(2, 3, dtype=torch.int64)}, "w of shape .* dtype torch.int64; expected floating-point"),
        (np.array([["a"]]), "dtype|type"),
        ("abc", "grads of type str; expected a torch tensor or a NumPy array"),
        ([torch.tensor(1.0)], r"\[0\] of shape \(\)"),
    ],
)
def test_bad_gradients_are_named(grads: object, message: str) -> None:
    with pytest.raises((GradientError, TypeError), match=message):
        as_gradients(grads)


def backward(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> None:
    nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("chunk", [None, 3])
def test_func_is_the_loop(reduction: str, size: int, chunk: int | None) -> None:
    data, model = Regression(size), small_model()
    source = FuncSource(model, loss_reduction=reduction, chunk_size=chunk)
    backward(model, data.x, data.y, reduction)
    ((batch, _),) = source.collect()
    wanted = loop_gradients(model, nn.functional.cross_entropy, data.x, data.y)
    torch.testing.assert_close(rows_of(batch), wanted)
    total = torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # the user's gradient is as ever
    torch.testing.assert_close(wanted.mean(0) if reduction == "mean" else wanted.sum(0), total)


def test_what_is_captured() -> None:
    data, model = Regression(4), small_model()
    source = FuncSource(model)
    with torch.no_grad():
        model(data.x)
    model.eval()
    backward(model, data.x, data.y)
    model.train()
    assert source.collect() == []
    model(data.x[:2])  # a forward whose backward never comes
    backward(model, data.x[:3], data.y[:3])
    backward(model, data.x[3:], data.y[3:])  # gradient accumulation
    assert [batch.examples for batch in source.collect()] == [3, 1]
    assert source.collect() == []
    first, second = model(data.x[:2]), model(data.x[2:])  # two forwards before one backward
    nn.functional.cross_entropy(torch.cat([first, second]), data.y).backward()
    assert [batch.examples for batch in source.collect()] == [2, 2]


def test_two_inputs_outputs_and_keywords() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, *, other: Tensor, scale: float) -> dict[str, Tensor | float]:
            return {"one": self.a(x) * scale, "unused": self.a(x), "two": self.b(other).tanh(), "note": 1.0}

    model = Two().double()
    x, other = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    source = FuncSource(model)

    def loss(i: slice) -> Tensor:
        out = model(x[i], other=other[i], scale=2.0)
        return (out["one"] * out["two"]).sum(dim=1).mean()

    loss(slice(None)).backward()
    ((batch, _),) = source.collect()
    wanted = [
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(slice(i, i + 1)), list(model.parameters()))])
        for i in range(5)
    ]
    torch.testing.assert_close(rows_of(batch), torch.stack(wanted))


def test_only_the_parameters_asked_for() -> None:
    data, model = Regression(3), small_model()
    model[0].weight.requires_grad_(False)
    source = FuncSource(model, params=lambda name: name.endswith("bias"))
    assert source.dim == 4 + 3
    backward(model, data.x, data.y)
    ((batch, _),) = source.collect()
    model[0].weight.requires_grad_(True)
    wanted = loop_gradients(model, nn.functional.cross_entropy, data.x, data.y)
    torch.testing.assert_close(rows_of(batch), torch.cat([wanted[:, 20:24], wanted[:, 36:]], dim=1))
    with pytest.raises(InputError, match="no trainable parameter"):
        FuncSource(model, params=lambda name: False)


def test_the_model_comes_back_as_it_was() -> None:
    model = small_model()
    before = (dict(model.__dict__), list(model.state_dict()), pickle.dumps(model))
    source = FuncSource(model)
    backward(model, Regression(3).x, Regression(3).y)
    source.detach()
    assert not any(plain_hooks(model))
    model.zero_grad(set_to_none=True)
    assert pickle.dumps(model) == before[2]
    assert list(model.state_dict()) == before[1]
    assert model.__dict__.keys() == before[0].keys()


def test_layers_that_mix_examples_or_draw_random_numbers_are_refused() -> None:
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    mixing = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.BatchNorm1d(5)), nn.Linear(5, 3))
    source = FuncSource(mixing)
    backward(mixing, x, y)
    with pytest.raises(UnsupportedModuleError, match=r"BatchNorm1d at '1\.0'.*GroupNorm"):
        source.collect()
    mixing[1].eval()
    backward(mixing, x, y)
    assert source.collect()[0].examples == 6
    dropping = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    source = FuncSource(dropping)
    backward(dropping, x, y)
    with pytest.raises(UnsupportedModuleError, match="dropout"):
        source.collect()


def test_a_loss_inside_the_model_is_refused() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean()

    model = Inside()
    source = FuncSource(model)
    model(torch.randn(3, 4)).backward()
    with pytest.raises(GradientError, match="take the loss outside"):
        source.collect()


@pytest.mark.parametrize("kind", [FuncSource, MicrobatchSource])
def test_a_copy_of_the_model_is_not_watched(kind: type[FuncSource] | type[MicrobatchSource]) -> None:
    data, model = Regression(4), small_model()
    source = kind(model)
    twin = copy.deepcopy(model)
    backward(twin, data.x, data.y)
    assert source.collect() == []
    backward(model, data.x, data.y)
    backward(twin, data.x, data.y)
    assert len(source.collect()) == 1


@pytest.mark.parametrize("room", [0, 300, 10**6])  # nothing is kept, some of the forms, all
def test_signed_differences_are_the_weighted_sum(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the products of pairs made and kept gives the same sum as the factors do."""
    monkeypatch.setattr(memory, "CHUNK_NUMBERS", max(room, 1))
    rng = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    forms = [
        (0, OuterProduct(random(6, 9, 5), random(6, 9, 4))),
        (20, OuterProduct(random(6, 1, 3), random(6, 1, 2))),
        (26, Materialized(random(6, 1, 7))),
        (33, OuterProduct(random(6, 16, 11), random(6, 16, 13))),
    ]
    batch = Factored(forms, dim=176, size=6, scale=6.0, like=torch.empty(0, dtype=torch.float64))
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    out = random(1, 176)
    expected = batch.weighted_sum(signs[None], out=out.clone())
    vectors = random(1, 176)
    gram, dots = batch.paired_products(vectors)
    differences = batch.weighted_sum(torch.eye(6, dtype=torch.float64)[0::2] - torch.eye(6, dtype=torch.float64)[1::2])
    torch.testing.assert_close(gram.triu(), (differences @ differences.T).triu())
    torch.testing.assert_close(dots, vectors @ differences.T)
    batch.add_signed(signs, out)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("room", [1, 30, 10**6])  # a row at a time, a few, all
def test_rows_are_filled_whatever_was_there(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk at a time, and zero where a parameter (here numbers 41 to 44) got no gradient."""
    monkeypatch.setattr(memory, "CHUNK_NUMBERS", room)
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(6, 9, width, generator=rng, dtype=torch.float64) for width in (5, 4))
    made = torch.randn(6, 7, 3, generator=rng, dtype=torch.float64)
    forms = [(0, OuterProduct(a, b)), (20, Materialized(made))]
    batch = Factored(forms, dim=45, size=6, scale=6.0, like=torch.empty(0, dtype=torch.float64))
    out = torch.full((6, 45), torch.nan, dtype=torch.float64)
    assert batch.rows(out) is out
    parts = [torch.einsum("btr,btc->brc", b, a).flatten(1), made.flatten(1), torch.zeros(6, 4, dtype=torch.float64)]
    torch.testing.assert_close(out, 6.0 * torch.cat(parts, dim=1))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_sums_by_sign(steps: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over either sign's rows and a few rows of the parameter at a time, against the weighted sums of all."""
    rng = np.random.default_rng(0)
    steps = 1 if biased else steps
    a, b = (torch.from_numpy(rng.normal(size=(15, steps, width))) for width in (7, 9))
    grads = (WithBias if biased else OuterProduct)(a, b)
    monkeypatch.setattr("ordain.gradients.param_grads._CACHED", 20)
    for signs in (np.sign(rng.normal(size=15)), np.ones(15), -np.ones(15)):
        each = 2.5 * torch.from_numpy(signs)
        found, wanted = (torch.ones(2, grads.numel, dtype=torch.float64) for _ in range(2))
        grads.add_signed(each, 2.5, found)
        grads.add_weighted(torch.stack([each, torch.full_like(each, 2.5)]), wanted)
        torch.testing.assert_close(found, wanted)
