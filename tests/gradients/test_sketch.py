"""Sketches of gradients against the matrix that they are a product with, and orders that use them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import settings_conv_norm
import settings_linear
import settings_models
import settings_sequence
import torch
from engine import Setting, call, doubled, losses, relative
from helpers import Regression, gradient_field, is_permutation, loop_gradients, reloaded, run, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ordain import GraB, Greedy, Herding, _rng, herding
from ordain.errors import GradientError, InputError, StateError
from ordain.gradients import Dense, ExactSource, Factored, Gradients, Sketch, sketch
from ordain.gradients.combined import RowRange, Stacked, Sum
from ordain.gradients.hashing import Hashes, HashFamily
from ordain.gradients.param_grads import Materialized, OuterProduct, ParamGrads, WithBias
from ordain.gradients.sparse_rows import SparseRows

ALL = [
    *settings_linear.SETTINGS,
    *settings_conv_norm.SETTINGS,
    *settings_sequence.SETTINGS,
    *settings_models.SETTINGS,
]


def matrix(layout: Sequence[tuple[int, int, int]], d: int, k: int, seed: int) -> Tensor:
    """S ``[k, d]`` for parameters (offset, rows, cols): one entry a column, and no convolution."""
    found = np.zeros((k, d))
    for offset, rows, cols in layout:
        words = _rng.hashes(rows + cols, seed=seed, stream=offset)
        place, sign = ((words >> 1) % k).astype(np.int64), 1 - 2 * (words & 1).astype(np.int64)
        at = (place[:rows, None] + place[rows:]) % k
        found[at.ravel(), offset + np.arange(rows * cols)] = (sign[:rows, None] * sign[rows:]).ravel()
    return torch.from_numpy(found)


def layout_of(batch: Factored) -> list[tuple[int, int, int]]:
    layout = []
    for offset, form in batch.placed:
        layout.append((offset, form.rows, form.cols))
        if isinstance(form, WithBias):
            layout.append((offset + form.rows * form.cols, 1, form.rows))
    return layout


def rows_of(batch: Gradients) -> Tensor:
    return batch.weighted_sum(torch.eye(batch.size, dtype=batch.dtype))


def sketches(batch: Any, k: int, seed: int = 0) -> Tensor:
    block = sketch(batch, k, seed=seed).rows()
    assert block.shape[1] == k
    return block


def placed(*forms: tuple[int, ParamGrads], scale: float = 1.0) -> Factored:
    dim = max(offset + form.numel for offset, form in forms)
    like = torch.empty(0, dtype=torch.float64)
    return Factored(forms, dim=dim, size=forms[0][1].size, scale=scale, like=like)


def gradients_of(setting: Setting, size: int) -> Factored:
    torch.manual_seed(0)
    model = setting.build().double().train()
    inputs = doubled(setting.inputs(size))
    source = ExactSource(model, batch_dim=setting.batch_dim, **setting.options)
    losses(call(model, inputs), size, setting.batch_dim).mean().backward()
    ((batch, _),) = source.collect()
    source.detach()
    assert isinstance(batch, Factored)
    return batch


@pytest.mark.parametrize("setting", ALL, ids=lambda s: s.name)
def test_a_model_is_its_product_with_the_matrix(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = gradients_of(setting, sorted(setting.sizes)[len(setting.sizes) // 2])
    rows = rows_of(batch)
    wanted = {k: rows @ matrix(layout_of(batch), batch.dim, k, seed=3).T for k in (7, 16)}
    for convolve in (True, False):
        monkeypatch.setattr(Hashes, "convolves", lambda self, steps, convolve=convolve: convolve)
        for k in wanted:
            assert relative(sketches(batch, k, seed=3), wanted[k]) < 1e-9


@pytest.mark.parametrize("numbers", [1, 40])
@pytest.mark.parametrize("name", ["mlp", "lenet", "lstm-language-model", "encoder"])
def test_a_little_at_a_time_is_the_same(name: str, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (setting,) = (one for one in settings_models.SETTINGS if one.name == name)
    batch = gradients_of(setting, 5)
    wanted = sketches(batch, 16)
    monkeypatch.setattr("ordain.gradients.memory.CHUNK_NUMBERS", numbers)
    for convolve in (True, False):
        monkeypatch.setattr(Hashes, "convolves", lambda self, steps, convolve=convolve: convolve)
        assert relative(sketches(batch, 16), wanted) < 1e-9


def forms(size: int, steps: int, rows: int, cols: int) -> dict[str, ParamGrads]:
    torch.manual_seed(size + steps + rows + cols)
    a, b = torch.randn(size, steps, cols).double(), torch.randn(size, steps, rows).double()
    entries = torch.randint(0, size, (steps * 3,)), torch.randint(0, rows, (steps * 3,))
    table = SparseRows(*entries, torch.randn(steps * 3, cols).double(), size=size, rows=rows)
    made = Materialized(torch.randn(size, rows, cols).double())
    return {
        "made": made,
        "outer": OuterProduct(a, b),
        "biased": WithBias(a[:, :1], b[:, :1]),
        "rows": table,
        "shifted": RowRange(OuterProduct(a, b), start=2, rows=rows + 3),
        "total": Sum(table, made, OuterProduct(a, b)),
        "stacked": Stacked(
            RowRange(made, start=0, rows=2 * rows), RowRange(OuterProduct(a, b), start=rows, rows=2 * rows)
        ),
    }


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 4),
    steps=st.integers(1, 3),
    rows=st.integers(1, 5),
    cols=st.integers(1, 5),
    k=st.integers(1, 20),
    seed=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 9),
)
def test_every_form_is_its_product_with_the_matrix(
    size: int, steps: int, rows: int, cols: int, k: int, seed: int, offset: int
) -> None:
    for form in forms(size, steps, rows, cols).values():
        batch = placed((offset, form), scale=2.5)
        layout = layout_of(batch)
        made = rows_of(batch)
        wanted = made @ matrix(layout, batch.dim, k, seed).T
        torch.testing.assert_close(sketches(batch, k, seed), wanted, rtol=1e-9, atol=1e-9 * float(made.abs().sum() + 1))
        # The matrix again, from sketches of unit gradients at the same place.
        units = [
            sketches(placed((at, Materialized(torch.eye(r * c).double().view(-1, r, c)))), k, seed).T
            for at, r, c in layout
        ]
        torch.testing.assert_close(torch.cat(units, dim=1), matrix(layout, batch.dim, k, seed)[:, offset:])


def test_given_gradients_lie_block_after_block() -> None:
    rows = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    blocks = Dense([rows[:, :4], rows[:, 4:5], rows[:, 5:]])
    torch.testing.assert_close(sketches(blocks, 6, 1), rows @ matrix([(0, 1, 4), (4, 1, 1), (5, 1, 7)], 12, 6, 1).T)
    whole = rows @ matrix([(0, 1, 12)], 12, 6, 1).T
    for given_rows in (rows, rows.numpy(), Dense([rows])):
        torch.testing.assert_close(sketches(given_rows, 6, 1), whole)
    assert sketches(rows.float(), 6).dtype == torch.float32


def test_a_flat_gradient_too_long_to_keep_hashes_of(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, kept = torch.randn(3, 50).double(), Sketch(8)
    wanted = rows_of(kept(Dense([rows])))
    monkeypatch.setattr("ordain.gradients.hashing._KEPT", 10)
    monkeypatch.setattr("ordain.gradients.memory.CHUNK_NUMBERS", 20)
    anew = Sketch(8)
    torch.testing.assert_close(rows_of(anew(Dense([rows]))), wanted)


def test_sketches_of_parts_add_up() -> None:
    """Of a sum of gradients, of examples seen apart, and of a weight joined with its bias or not."""
    torch.manual_seed(0)
    a, b = torch.randn(4, 1, 6).double(), torch.randn(4, 1, 3).double()
    joined, apart = placed((5, WithBias(a, b))), placed((5, OuterProduct(a, b)), (23, Materialized.of(b[:, 0])))
    one = Sketch(16, seed=2)
    whole = rows_of(one(joined))
    torch.testing.assert_close(rows_of(one(apart)), whole)
    halves = [rows_of(Sketch(16, seed=2)(joined.select(torch.tensor(part)))) for part in ([0, 2], [1, 3])]
    torch.testing.assert_close(torch.stack(halves, dim=1).flatten(0, 1), whole)
    mean = placed((5, Materialized(rows_of(joined)[:, 5:23].mean(0).view(1, 3, 6))))
    bias = placed((23, Materialized.of(b[:, 0].mean(0, keepdim=True))))
    torch.testing.assert_close(rows_of(one(mean)) + rows_of(one(bias)), whole.mean(0, keepdim=True))


@pytest.mark.parametrize("kind", ["flat", "outer"])
def test_inner_products_are_right_on_average(kind: str) -> None:
    """Unbiased, with the variance of a count sketch; of outer products, at most four times that."""
    torch.manual_seed(1)
    k, seeds = 32, 1500
    batch: Gradients = Dense([torch.randn(2, 60).double() + 0.3])
    if kind == "outer":
        batch = placed((0, OuterProduct(torch.randn(2, 1, 10).double() + 0.3, torch.randn(2, 1, 6).double() + 0.3)))
    rows = rows_of(batch)
    found = np.array([sketch(batch, k, seed=seed).gram().numpy() for seed in range(seeds)])
    for i, j in ((0, 0), (0, 1), (1, 1)):
        g, h = rows[i], rows[j]
        plain = float((g @ g) * (h @ h) + (g @ h) ** 2 - 2 * (g * h).square().sum()) / k
        values = found[:, i, j]
        assert abs(values.mean() - float(g @ h)) < 4 * values.std() / math.sqrt(seeds)
        assert plain <= 2 * float((g @ g) * (h @ h)) / k
        ratio = values.var() / plain
        assert 0.8 < ratio < 1.25 if kind == "flat" else 0.5 < ratio < 4.0


@pytest.mark.parametrize("k", [0, -1, True, 2.0, None, "8", 2**40])
def test_lengths_that_no_sketch_has(k: Any) -> None:
    with pytest.raises(InputError, match="a sketch of"):
        sketch(torch.ones(2, 3), k)
    if k is not None:
        with pytest.raises(InputError, match="a sketch of"):
            GraB(None, 4, sketch=k)


# --- orders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"centering": "pair"}, {"group": 3}, {"centering": "pair", "group": 2}])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_an_order_by_sketches_is_the_order_of_the_sketches(options: dict[str, Any], size: int) -> None:
    n, d, k = 23, 9, 6
    field = gradient_field(n, d)
    small = matrix([(0, 1, d)], d, k, seed=5).numpy()
    found = run(GraB(None, n, sketch=k, seed=5, **options), field, 3, batch_size=size)
    wanted = run(GraB(None, n, seed=5, **options), lambda i, e: small @ field(i, e), 3, batch_size=size)
    assert found == wanted
    assert found != run(GraB(None, n, seed=5, **options), field, 3, batch_size=size)


def train(order: GraB | Herding, model: nn.Module, data: Regression, epochs: int, size: int = 4) -> list[list[int]]:
    seen = []
    for _ in range(epochs):
        drawn = list(order.sampler)
        seen.append(drawn)
        for lo in range(0, len(drawn), size):
            batch = drawn[lo : lo + size]
            model.zero_grad()
            nn.functional.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
            order.step()
    return [*seen, list(order.sampler)]


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("source", ["exact", "func", "microbatch"])
def test_a_watched_model(source: str, centering: str) -> None:
    data, model = Regression(20), small_model()
    units = {"group": 4} if source == "microbatch" else {}
    order = GraB(model, 20, sketch=8, gradients=source, centering=centering, **units)
    seen = train(order, model, data, 3)
    assert all(is_permutation(one, 20) for one in seen)
    assert seen[2] != seen[1] != seen[0]
    assert order.state_dict()["vectors"]["table"].shape[1] == 8  # not d
    order.detach()
    if source == "exact":  # the same from the sketches themselves
        layout, d = [(0, 4, 5), (20, 1, 4), (24, 3, 4), (36, 1, 3)], 39
        plain = GraB(None, 20, centering=centering)
        rows = loop_gradients(model, nn.functional.cross_entropy, data.x, data.y) @ matrix(layout, d, 8, seed=0).T
        assert run(plain, lambda i, e: rows[i].numpy(), 3, batch_size=4) == seen


def test_stored_sketches_take_their_own_memory() -> None:
    data, model = Regression(20), small_model()
    order = Herding(model, 20, sketch=8, memory_limit=20 * 8 * 8)
    assert all(is_permutation(one, 20) for one in train(order, model, data, 2))
    order.detach()
    assert is_permutation(train(Greedy(model, 20, sketch=8), model, data, 1)[-1], 20)


def test_a_bad_example_is_set_aside_alone() -> None:
    rows = torch.randn(6, 5).double()
    rows[2, 1] = math.nan
    order = GraB(None, 6, sketch=4)
    list(order.sampler)
    with pytest.warns(UserWarning, match="1 example"):
        order.observe(rows)
    assert order.set_aside == 1
    with pytest.raises(GradientError, match="gradients of length 4; expected length 5"):
        order.observe(rows[:, :4])


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("vectors", [True, False])
def test_a_state_goes_on_where_it_was(centering: str, vectors: bool) -> None:
    n, d = 22, 7
    field = gradient_field(n, d)
    options: dict[str, Any] = {"sketch": 5, "centering": centering, "seed": 4}
    first, again = GraB(None, n, **options), GraB(None, n, **options)
    drawn = run(first, field, 2, batch_size=5)[-1]
    first.observe(torch.from_numpy(np.stack([field(i, 2) for i in drawn[:5]])))
    again.load_state_dict(reloaded(first.state_dict(vectors=vectors)))
    with pytest.raises(GradientError, match="expected length 7"):
        again.observe(torch.ones(1, 5).double())
    if vectors:
        states = [order.state_dict() for order in (first, again)]
        assert states[0].keys() == states[1].keys()
        assert torch.equal(states[0]["vectors"]["table"], states[1]["vectors"]["table"])
    for order in (first, again):
        order.resume()
    assert list(first.sampler) == list(again.sampler)


def test_states_of_other_sketches_are_refused() -> None:
    model = small_model()
    state = GraB(model, 10, sketch=8).state_dict()
    assert state["sketch"] == "8 of exact"
    assert "sketch" not in GraB(None, 10).state_dict()  # states without sketches are as they were
    for other in (
        GraB(small_model(), 10, sketch=9),
        GraB(small_model(), 10, sketch=8, gradients="func"),
        GraB(None, 10, sketch=8),
        GraB(small_model(), 10),
        GraB(None, 10),
    ):
        with pytest.raises(StateError, match="a state with sketch="):
            other.load_state_dict(state)
    with pytest.raises(StateError, match="a state with sketch=None"):
        GraB(small_model(), 10, sketch=8).load_state_dict(GraB(small_model(), 10).state_dict())
    wider = nn.Linear(3, 3).double()
    with pytest.raises(StateError, match="gradients of length 39; expected length 12"):
        GraB(wider, 10, sketch=8).load_state_dict(state)
    for broken in (0, "x", 2.5):
        with pytest.raises(StateError, match="given_dim"):
            GraB(small_model(), 10, sketch=8).load_state_dict(state | {"given_dim": broken})


def test_more_numbers_herd_better() -> None:
    """Of random vectors, whose directions all matter: many more numbers than those are as good as the vectors."""
    n, d = 512, 64
    z = np.random.default_rng(0).random((n, d))

    def quality(k: int | None) -> float:
        order = GraB(None, n, sketch=k, centering="pair")
        return herding.herding_objective(z, run(order, lambda i, e: z[i], 6, batch_size=64)[-1], norm=2)

    exact, small, middle, large = (quality(k) for k in (None, 8, 256, 4096))
    random = herding.herding_objective(z, np.random.default_rng(1).permutation(n), norm=2)
    assert large < 1.2 * exact
    assert middle < 0.6 * random
    assert small > 2 * exact


class SomePositions(nn.Module):
    """A head that is not called for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        scores = h.new_zeros(*mask.shape, 4)
        scores[mask] = self.head(h[mask])
        return scores


@pytest.mark.parametrize("full", [0, 2])
def test_a_sketch_does_not_depend_on_how_a_gradient_was_found(full: int) -> None:
    """A head on some positions is taken from the graph; where all are there, its layer explains it."""
    torch.manual_seed(0)
    model = SomePositions().double()
    source, family = ExactSource(model), HashFamily(16, seed=1)
    for batch in range(5):
        h = torch.randn(4, 5, 8, dtype=torch.float64)
        mask = torch.arange(5) < torch.tensor([5, 5, 5, 5] if batch == full else [2, 5, 3, 4])[:, None]
        model(h, mask).square().sum().div(4).backward()
        (found,) = source.collect()
        sketched, rows = (torch.zeros(4, 16, dtype=torch.float64) for _ in range(2))
        found.gradients.add_sketch(family, sketched)
        whole = found.gradients.rows()
        for offset, (height, width) in ((0, (4, 8)), (32, (1, 4))):
            part = whole[:, offset : offset + height * width].view(4, height, width)
            family.hashes(offset, height, width, rows).add_materialized(part, rows)
        torch.testing.assert_close(sketched, rows)
    assert source.from_graph
