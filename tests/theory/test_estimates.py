"""Estimated constants against closed forms, brute force and finite differences."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ordain import theory
from ordain.errors import InputError


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.manual_seed(0)


def linear(d: int) -> nn.Module:
    return nn.Linear(d, 1, bias=False).double()


def data(n: int, d: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(1)
    return torch.from_numpy(rng.normal(size=(n, d))), torch.from_numpy(rng.normal(size=(n, 1)))


def test_least_squares() -> None:
    x, y = data(12, 5)
    model = linear(5)
    found = theory.estimate_constants(model, nn.functional.mse_loss, x, y, infimum=-1.0, mu=0.01)
    hessian = 2 * x.T @ x / len(x)
    assert pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-5) == found.L
    # f_i = (x.w - y)^2 has the Hessian 2 x x': row sums 2 |x_r| |x|_1, and |Hv|_2 = 2 |x.v| |x|_2.
    assert found.L_inf == pytest.approx(float((2 * x.abs().amax(1) * x.abs().sum(1)).max()))
    assert found.L_2inf == pytest.approx(float((2 * x.norm(dim=1) * x.abs().sum(1)).max()))
    residual = x @ model.weight.detach().T - y
    gradients = 2 * residual * x
    assert found.varsigma == pytest.approx(float((gradients - gradients.mean(0)).norm(dim=1).max()))
    assert pytest.approx(float(residual.square().mean()) + 1) == found.F
    assert found.mu == 0.01


def test_logistic_regression() -> None:
    x, _ = data(20, 4)
    y = (torch.arange(20) % 2).double().unsqueeze(1)
    model = linear(4)
    loss = nn.functional.binary_cross_entropy_with_logits
    p = torch.sigmoid(x @ model.weight.detach().T)
    slope = p * (1 - p)
    assert theory.smoothness(model, loss, x, y) == pytest.approx(
        float(torch.linalg.eigvalsh((slope * x).T @ x / 20)[-1]), rel=1e-5
    )
    cross, sup = theory.example_smoothness(model, loss, x, y)
    assert sup == pytest.approx(float((slope[:, 0] * x.abs().amax(1) * x.abs().sum(1)).max()))
    assert cross == pytest.approx(float((slope[:, 0] * x.norm(dim=1) * x.abs().sum(1)).max()))
    gradients = (p - y) * x
    assert theory.gradient_error(model, loss, x, y) == pytest.approx(
        float((gradients - gradients.mean(0)).norm(dim=1).max())
    )


def test_network_against_brute_force_and_finite_differences() -> None:
    """A net's Hessians have any rank: L_2inf may be too large, never too small; L and L_inf are exact."""
    x, y = data(3, 2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    parameters = list(model.parameters())
    w = nn.utils.parameters_to_vector(parameters).detach()
    d = len(w)

    def gradient(at: Tensor, i: slice) -> Tensor:
        nn.utils.vector_to_parameters(at, parameters)
        parts = torch.autograd.grad(nn.functional.mse_loss(model(x[i]), y[i]), parameters)
        return torch.cat([part.reshape(-1) for part in parts])

    def hessian(i: slice) -> Tensor:
        h = 1e-5
        columns = [(gradient(w + h * e, i) - gradient(w - h * e, i)) / (2 * h) for e in torch.eye(d).double()]
        nn.utils.vector_to_parameters(w, parameters)
        return torch.stack(columns)

    whole = torch.linalg.eigvalsh(hessian(slice(None))).abs().max()
    single = [hessian(slice(i, i + 1)) for i in range(3)]
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=d))).double()
    exact = max(float((signs @ h).norm(dim=1).max()) for h in single)
    assert theory.smoothness(model, nn.functional.mse_loss, x, y, tolerance=1e-9, iterations=2000) == pytest.approx(
        float(whole), rel=1e-4
    )
    cross, sup = theory.example_smoothness(model, nn.functional.mse_loss, x, y)
    assert sup == pytest.approx(max(float(h.abs().sum(1).max()) for h in single), rel=1e-5)
    assert exact * (1 - 1e-5) <= cross <= math.sqrt(d) * sup * (1 + 1e-9)
    assert torch.equal(nn.utils.parameters_to_vector(parameters), w)


def test_frozen_weights_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(7, 3)
    model = nn.Linear(3, 1).double()
    model.bias.requires_grad_(False)
    before = theory.estimate_constants(model, nn.functional.mse_loss, x, y)
    monkeypatch.setattr(theory.estimate, "_NUMBERS", 20)
    assert theory.estimate_constants(model, nn.functional.mse_loss, x, y) == pytest.approx(before)
    assert before.L_inf == pytest.approx(float((2 * x.abs().amax(1) * x.abs().sum(1)).max()))


def test_a_loss_without_curvature() -> None:
    x, y = data(5, 2)
    assert theory.smoothness(linear(2), lambda out, y: out.sum(), x, y) == 0.0


def test_refused() -> None:
    x, y = data(5, 2)
    model = linear(2)
    with pytest.raises(InputError, match="5 inputs and 4 targets"):
        theory.smoothness(model, nn.functional.mse_loss, x, y[:4])
    with pytest.raises(InputError, match="without trainable weights"):
        theory.gradient_error(nn.Tanh(), nn.functional.mse_loss, x, y)
    with pytest.raises(InputError, match="5,000 weights"):
        theory.example_smoothness(linear(5000), nn.functional.mse_loss, torch.zeros(1, 5000).double(), y[:1])
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    with pytest.raises(InputError, match="not finite"):
        theory.smoothness(model, nn.functional.mse_loss, x, y)
