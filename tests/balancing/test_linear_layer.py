"""The fused pass over one linear layer against Algorithm 4 and pair balancing, one gradient at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import BALANCERS, reference_rule
from torch import nn

from ordain import GraB, _rng, reference
from ordain.balancing import Deterministic
from ordain.gradients.factored import Factored
from ordain.gradients.param_grads import OuterProduct, WithBias
from ordain.kernels.layer_rows import layer_rows
from ordain.kernels.signs import announce


def gradients(a, b, biased):
    weight = np.einsum("bo,bi->boi", b, a).reshape(len(a), -1)
    return np.concatenate([weight, b], axis=1) if biased else weight


@pytest.mark.parametrize("balancer", BALANCERS)
@pytest.mark.parametrize("paired", [False, True], ids=["mean", "pair"])
@pytest.mark.parametrize("biased", [False, True], ids=["weight", "weight and bias"])
@pytest.mark.parametrize("few", [1, 3])
@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_the_fused_pass_is_the_reference(balancer, paired, biased, few, size):
    """Several batches of every size around the block of four, over two epochs: all signs, and so all orders, agree."""
    n, width = 3 * size + size // 2, 5
    rng = np.random.default_rng(size)
    x, b = rng.normal(size=(n, width)) + 0.5, rng.normal(size=(n, few)) + 0.3
    model = nn.Linear(width, few, bias=biased).double()
    order = GraB(model, n, centering="pair" if paired else "mean", balancer=BALANCERS[balancer])
    d = few * (width + biased)
    twin = (reference.PairGraB if paired else reference.GraB)(order.history(0).tolist(), d)
    for epoch in range(3):
        twin.rule = reference_rule(BALANCERS[balancer], n // 2 if paired else n, d)
        u = _rng.uniforms(n, seed=0, stream=epoch)
        indices = list(order.sampler)
        assert indices == twin.sigma
        if epoch == 2:
            break
        for at in range(0, n, size):
            batch = indices[at : at + size]
            # A loss whose gradient at the output is b, under a mean over the batch.
            (model(torch.from_numpy(x[batch])) * torch.from_numpy(b[batch])).sum(1).mean().backward()
            order.step()
        for t, g in enumerate(gradients(x[indices], b[indices], biased)):
            twin.see(g, float(u[t // 2 if paired else t]))
        twin.next_order()


@pytest.mark.parametrize("paired", [False, True], ids=["mean", "pair"])
def test_what_is_not_finite_touches_nothing(paired):
    """A bad row is found before the first sum changes; the others are then learned from without it."""
    from ordain.kernels.linear_layer import layer_signs

    a, b = np.ones((6, 4)), np.ones((6, 2))
    a[4, 1] = np.inf
    table, state, sums, signs = np.zeros((3, 10)), np.zeros(3), np.zeros(3), np.empty(6, dtype=np.int8)
    assert not layer_signs(Deterministic.kind, a, b, 6.0, True, paired, *table, sums, np.zeros(6), state, 0.0, signs)
    assert not sums.any()
    assert not table.any()
    assert not state.any()


def set_one(value):
    return lambda model: model[2].weight.grad.data[1, 5].fill_(value)


def on_all(change):
    return lambda model: [change(p.grad.data) for p in model.parameters()]


CHANGES = {
    "infinite": set_one(float("inf")),
    "nan": set_one(float("nan")),
    "huge": set_one(1e30),
    "zero": set_one(0.0),
    "negated": on_all(lambda grad: grad.neg_()),
    "flipped": on_all(lambda grad: grad.copy_(grad.flip(0))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_changed_behind_the_back_is_not_believed(change):
    """Through ``.data`` no version is counted: the sums must be what they are without the change."""

    def run(change):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()
        order = GraB(model, 24)
        for _ in range(2):
            for at in torch.tensor(list(order.sampler)).split(8):
                x = torch.sin(at[:, None] * torch.arange(1.0, 7.0)).double()
                nn.functional.cross_entropy(model(x), at % 3).backward()
                change(model)
                order.step()
                model.zero_grad()
        next(iter(order.sampler))
        return order

    touched, plain = run(CHANGES[change]), run(lambda model: None)
    torch.testing.assert_close(touched.state_dict()["vectors"]["table"], plain.state_dict()["vectors"]["table"])
    assert touched.history(2).tolist() == plain.history(2).tolist()


@pytest.mark.parametrize(
    ("files", "lines"), [((), 1), (("linear_layer.other-1.py311.nbi",), 1), (("m.loop-1.py311.nbi",), 0)]
)
def test_a_long_compilation_is_announced_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: tuple[str, ...], lines: int
) -> None:
    def loop() -> None: ...

    for name in files:
        (tmp_path / name).touch()
    loop.stats = SimpleNamespace(cache_path=str(tmp_path))  # type: ignore[attr-defined]
    announce(loop)
    assert [record.name for record in caplog.records] == ["ordain"] * lines


def test_without_a_cache_every_process_is_told(caplog: pytest.LogCaptureFixture) -> None:
    announce(SimpleNamespace(stats=SimpleNamespace(cache_path=None), __name__="loop"))
    assert "in every process" in caplog.text
    announce(announce)  # a plain function: Numba is switched off
    assert len(caplog.records) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("biased", [False, True], ids=["weight", "weight and bias"])
def test_rows_are_written_as_torch_would(dtype, biased):
    """Bit by bit, so that it makes no difference to an order who has written them."""
    torch.manual_seed(0)
    a, b, scale = torch.randn(7, 5, dtype=dtype), torch.randn(7, 3, dtype=dtype), 7.0
    rows = torch.empty(7, 3 * (5 + biased), dtype=dtype)
    assert layer_rows(a.numpy(), b.numpy(), biased, scale, 1e140, rows.numpy())
    kind = WithBias if biased else OuterProduct
    placed = [(0, kind(a.unsqueeze(1), b.unsqueeze(1)))]
    assert torch.equal(rows, Factored(placed, dim=rows.shape[1], size=7, scale=scale, like=rows).rows())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -1e150])
@pytest.mark.parametrize("place", ["a", "b"])
def test_rows_that_are_not_finite_or_too_large_are_seen(value, place):
    dtype = np.float64 if abs(value) == 1e150 else np.float32  # 64 times 3e38 is infinite in float32
    a, b, out = np.ones((4, 3), dtype), np.ones((4, 2), dtype), np.empty((4, 8), dtype)
    assert layer_rows(a, b, True, 64.0, 1e140, out)
    (a if place == "a" else b)[2, 1] = value
    assert not layer_rows(a, b, True, 64.0, 1e140, out)
