"""GraB in JAX: the orders of reference.py, of GraB in torch, and of a training run over single examples."""

from __future__ import annotations

import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from helpers import gradient_field, is_permutation

from ordain import GraB, reference
from ordain.errors import GradientError, InputError, StepError
from ordain.integrations import jax as grab

EPOCHS, D = 3, 7


def rows_of(field: Any, indices: Any, epoch: int) -> np.ndarray:
    return np.stack([field(int(i), epoch) for i in indices])


def run(state: Any, rows: Any, size: int) -> tuple[list[list[int]], Any]:
    """The orders of some epochs and of the one after, in batches; ``rows(indices, epoch)`` are the gradients."""
    orders = []
    for epoch in range(EPOCHS):
        visited = np.asarray(grab.order(state)).tolist()
        orders.append(visited)
        for start in range(0, len(visited), size):
            state = grab.update(state, rows(visited[start : start + size], epoch))
        state = grab.next_epoch(state)
    return [*orders, np.asarray(grab.order(state)).tolist()], state


def expected(rows: Any, first: list[int], d: int, *, paired: bool, least: float = 0.0) -> list[list[int]]:
    """Of reference.py. ``least``: no sign may hang on less than this share of |s| |z|."""

    def rule(s: Any, z: Any, u: float = 0.0) -> int:
        size = float(np.linalg.norm(s) * np.linalg.norm(z))
        assert size == 0.0 or abs(float(s @ z)) > least * size
        return reference.deterministic(s, z)

    book: Any = (reference.PairGraB if paired else reference.GraB)(first, d, rule)
    orders = [first]
    for epoch in range(EPOCHS):
        for row in rows(orders[-1], epoch):
            book.see(np.asarray(row, dtype=np.float64))
        orders.append(book.next_order())
    return orders


SIZES = [(1, 1), (2, 1), (12, 5), (13, 4), (41, 8)]


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize(("n", "size", "wide"), [*((*one, True) for one in SIZES), (13, 4, False), (41, 8, False)])
def test_orders_of_the_reference(n: int, size: int, centering: Any, wide: bool) -> None:
    field = gradient_field(n, D, seed=n)

    def rows(indices: Any, epoch: int) -> np.ndarray:
        return rows_of(field, indices, epoch).astype(np.float64 if wide else np.float32)

    with jax.enable_x64(wide):
        state = grab.init(n, D, centering=centering, seed=1)
        assert state.signed.dtype == (jnp.float64 if wide else jnp.float32)
        found, _ = run(state, rows, size)
    least = 1e-9 if wide else 1e-5
    assert found == expected(rows, found[0], D, paired=centering == "pair", least=least)
    assert all(is_permutation(one, n) for one in found)


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_the_same_as_in_torch(centering: Any) -> None:
    """First orders too, which follow from the seed; and with gradients that are not finite, and an early end."""
    n, size, field = 30, 4, gradient_field(30, D, seed=2)
    order, state = GraB(None, n, centering=centering, seed=5), grab.init(n, D, centering=centering, seed=5)
    for epoch in range(4):
        visited = list(order.sampler)
        assert np.asarray(grab.order(state)).tolist() == visited
        for start in range(0, n - (7 if epoch == 1 else 0), size):
            rows = rows_of(field, visited[start : start + size], epoch).astype(np.float32)
            if epoch == 2:
                rows[np.arange(start, start + len(rows)) % 9 == 5, 2] = np.nan if start > 8 else np.inf
            bad = not np.isfinite(rows).all()
            with pytest.warns(match="not finite") if bad and not order.set_aside else nullcontext():
                order.observe(torch.from_numpy(rows))
            state = grab.update(state, jnp.asarray(rows))
        state = grab.next_epoch(state)
    assert order.set_aside == 3
    assert np.asarray(grab.order(state)).tolist() == list(order.sampler)


def test_pytrees_are_joined_in_jax_s_order() -> None:
    rows = np.random.default_rng(0).normal(size=(6, 7)).astype(np.float32)
    tree = {"b": jnp.asarray(rows[:, 4:]), "a": (jnp.asarray(rows[:, :4].reshape(6, 2, 2)),)}
    one, other = (grab.update(grab.init(6, D), grads) for grads in (rows, tree))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def loss(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], y)


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_inside_a_compiled_training_step(centering: Any) -> None:
    """Against a loop that takes the gradient of one example after the other, and is not compiled."""
    n, size, rng = 13, 5, np.random.default_rng(1)
    with jax.enable_x64(True):
        x, y = jnp.asarray(rng.normal(size=(n, 4))), jnp.asarray(rng.integers(0, 3, n))
        shapes = {"in": (4, 6), "bias": (6,), "out": (6, 3)}
        start = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
        dim = sum(p.size for p in jax.tree.leaves(start))
        optimizer = optax.adam(0.05)

        @jax.jit
        def step(params: Any, opt: Any, state: Any, batch: Any) -> Any:
            grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, x[batch], y[batch])
            state = grab.update(state, grads)
            updates, opt = optimizer.update(jax.tree.map(lambda g: g.mean(0), grads), opt)
            return optax.apply_updates(params, updates), opt, state

        state = grab.init(n, dim, centering=centering)
        params, opt = start, optimizer.init(start)
        twin, twin_opt = start, optimizer.init(start)
        kind: Any = reference.GraB if centering == "mean" else reference.PairGraB
        book = kind(np.asarray(grab.order(state)).tolist(), dim)
        for _ in range(2):
            for at in range(0, n, size):
                batch = grab.order(state)[at : at + size]
                grads = [jax.grad(loss)(twin, x[i], y[i]) for i in book.sigma[at : at + size]]
                for grad in grads:
                    book.see(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grad)]))
                mean = jax.tree.map(lambda *several: sum(several) / len(several), *grads)
                updates, twin_opt = optimizer.update(mean, twin_opt)
                twin = optax.apply_updates(twin, updates)
                params, opt, state = step(params, opt, state, batch)
            state = jax.jit(grab.next_epoch)(state)
            assert np.asarray(grab.order(state)).tolist() == book.next_order()
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(twin), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_a_state_is_arrays_and_goes_on_from_a_file(tmp_path: Any, centering: Any) -> None:
    n, rows = 11, np.random.default_rng(0).normal(size=(11, D)).astype(np.float32)
    state = grab.update(grab.init(n, D, centering=centering), rows[:5])
    leaves, structure = jax.tree.flatten(state)
    np.savez(tmp_path / "state.npz", *leaves)
    with np.load(tmp_path / "state.npz") as saved:
        again = jax.tree.unflatten(structure, [saved[name] for name in saved.files])
    ends = [grab.next_epoch(grab.update(one, rows[5:])) for one in (state, again)]
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, ends), strict=True))


def test_half_precision_is_summed_in_the_state_s_dtype() -> None:
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(6, D)), jnp.bfloat16)
    one, other = (grab.update(grab.init(6, D), grads) for grads in (rows, rows.astype(jnp.float32)))
    assert one.signed.dtype == jnp.float32
    assert np.array_equal(one.signed, other.signed)


def test_an_epoch_of_nothing_changes_nothing() -> None:
    state = grab.next_epoch(grab.update(grab.init(6, D), np.ones((6, D), np.float32)))
    again = grab.next_epoch(state)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True))


def test_bad_arguments_are_told() -> None:
    state = grab.init(6, D)
    for bad in ({"centering": "median"}, {"seed": -1}):
        with pytest.raises(InputError, match=f"{next(iter(bad))}="):
            grab.init(6, D, **bad)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="n"):
        grab.init(0, D)
    with pytest.raises(InputError, match=r"dim=0.*jax\.tree\.leaves"):
        grab.init(6, 0)
    with pytest.raises(GradientError, match=r"length 8; expected length 7"):
        grab.update(state, np.ones((2, 8), np.float32))
    grads: Any
    for grads in ([np.ones((2, 3)), np.ones((3, 4))], np.ones((2, D), np.int32), [], [np.float32(1.0)]):
        with pytest.raises(GradientError, match=r"of shapes.*jax\.vmap"):
            grab.update(state, grads)
    with pytest.raises(GradientError, match="of length 1"):
        grab.update(state, np.ones(D, np.float32))


def test_more_examples_than_there_are() -> None:
    state = grab.update(grab.init(6, D), np.ones((8, D), np.float32))
    with pytest.raises(StepError, match=r"8 examples were observed; expected at most n=6"):
        grab.next_epoch(state)


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a user runs it: started, and taken up again."""
    path = Path(__file__).parents[2] / "examples" / "jax_mnist.py"
    for words in (["--epochs", "1"], ["--epochs", "2", "--resume"]):
        monkeypatch.setattr(sys, "argv", [str(path), "--out", str(tmp_path), *words])
        runpy.run_path(str(path), run_name="__main__")
    told = [re.fullmatch(r"epoch (\d): loss (\d\.\d+)", line) for line in capsys.readouterr().out.splitlines()]
    assert [match and match[1] for match in told] == ["1", "2"]
    assert all(match and float(match[2]) < limit for match, limit in zip(told, (2.3, 0.5), strict=True))
