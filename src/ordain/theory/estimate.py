"""Estimates of the theorems' constants for small models, at the weights the model has now.

The assumptions speak of every w; what is measured at one w is a lower bound on their suprema. Take the largest
over several w (along training, say) before trusting a step size, or use exact values where the problem has them.

``loss(model(x), y)`` must be the mean over the examples, and an example must not see the others (batch
normalisation in eval mode). The model is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vjp, vmap

from ordain.errors import InputError
from ordain.theory.constants import Constants

Loss = Callable[[Any, Tensor], Tensor]

_LARGEST = 4096  # weights, for whole Hessians: 128 MB each in float64
_NUMBERS = 2**24  # held at a time


def smoothness(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, *, iterations: int = 200, tolerance: float = 1e-6, seed: int = 0
) -> float:
    """L of Assumption 1: the largest |eigenvalue| of the mean loss's Hessian at the present weights.

    Power iteration with Hessian-vector products, which converges from below; it stops when an iteration changes the
    estimate by less than the fraction ``tolerance``.
    """
    weights, _, mean_loss = _flat(model, loss, x, y)
    v = torch.randn(len(weights), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    v = (v / v.norm()).to(weights)
    times_hessian = vjp(grad(mean_loss), weights)[1]  # the Hessian is symmetric: v' H is H v
    found = 0.0
    for _ in range(iterations):
        product = times_hessian(v)[0].detach()
        before, found = found, float(product.norm())
        if not found:
            break
        v = product / product.norm()
        if abs(found - before) <= tolerance * found:
            break
    return found


def example_smoothness(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> tuple[float, float]:
    """``(L_2inf, L_inf)`` of Assumption 1 at the present weights: the largest over the examples.

    From each example's whole Hessian H, with d weights ``[d, d]``. L_inf is its largest row sum of |H|, exactly.
    L_2inf, the largest |Hv|_2 over |v|_inf <= 1, is a hard problem; the root of the sum of squared row sums of
    |H| is taken, which is never too small, and exact where H is diagonal or of rank one (linear models).
    """
    weights, of_example, _ = _flat(model, loss, x, y)
    d = len(weights)
    if d > _LARGEST:
        raise InputError(
            f"a model of {d:,} weights",
            expected=f"at most {_LARGEST:,}, because each example's Hessian is computed",
            remedy="Estimate on a smaller model of the same kind.",
        )

    def norms(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = jacrev(grad(of_example))(weights, x, y).detach().abs().sum(dim=1)
        return rows.norm(), rows.max()

    cross, sup = vmap(norms, chunk_size=max(1, _NUMBERS // d**2))(x, y)
    return float(cross.max()), float(sup.max())


def gradient_error(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> float:
    """Varsigma of Assumption 3 at the present weights: max_i |grad f_i - grad f|."""
    weights, of_example, mean_loss = _flat(model, loss, x, y)
    mean = grad(mean_loss)(weights).detach()

    def error(x: Tensor, y: Tensor) -> Tensor:
        distance: Tensor = (grad(of_example)(weights, x, y).detach() - mean).norm()
        return distance

    return float(vmap(error, chunk_size=max(1, _NUMBERS // len(weights)))(x, y).max())


def estimate_constants(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, *, infimum: float = 0.0, mu: float | None = None
) -> Constants:
    """All constants at the present weights w_1, of which F = f(w_1) - infimum.

    Args:
        model: of at most a few thousand weights.
        loss: ``loss(model(x), y)``, the mean over the examples.
        x: ``[n, ...]``.
        y: ``[n, ...]``.
        infimum: f*, or a number below it; 0 for losses that are never negative.
        mu: the PL constant, which cannot be measured at one point.

    >>> x = torch.eye(2)
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> c = estimate_constants(model, nn.functional.mse_loss, x, torch.tensor([[1.0], [2.0]]))
    >>> c.L, c.L_2inf, c.F
    (1.0, 2.0, 2.5)
    """
    cross, sup = example_smoothness(model, loss, x, y)
    weights, _, mean_loss = _flat(model, loss, x, y)
    return Constants(
        L=smoothness(model, loss, x, y),
        L_2inf=cross,
        L_inf=sup,
        varsigma=gradient_error(model, loss, x, y),
        F=float(mean_loss(weights)) - infimum,
        mu=mu,
    )


def _flat(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor
) -> tuple[Tensor, Callable[[Tensor, Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The trained weights as one vector ``[d]``, and one example's loss and the mean loss at such a vector."""
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("a model without trainable weights", expected="at least one", remedy="Set requires_grad.")
    if not len(x) or len(x) != len(y):
        raise InputError(
            f"{len(x)} inputs and {len(y)} targets", expected="one target for each input", remedy="Check x and y."
        )
    if not all(math.isfinite(float(p.detach().abs().sum())) for p in model.parameters()):
        raise InputError("weights that are not finite", expected="finite ones", remedy="Estimate before divergence.")
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    fixed |= {name: buffer.detach() for name, buffer in model.named_buffers()}
    sizes = [p.numel() for p in trained.values()]

    def of_example(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts = zip(trained.items(), torch.split(w, sizes), strict=True)
        given = {name: part.view_as(p) for (name, p), part in parts}
        return loss(functional_call(model, fixed | given, (x.unsqueeze(0),)), y.unsqueeze(0))

    def mean_loss(w: Tensor) -> Tensor:
        return vmap(of_example, in_dims=(None, 0, 0))(w, x, y).mean()

    return torch.cat([p.reshape(-1) for p in trained.values()]), of_example, mean_loss
