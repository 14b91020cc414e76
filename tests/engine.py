"""The exact engine against the loop: what the tests of single layers and of whole models share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ordain.gradients import ExactSource, Gradients, per_example_loop


@dataclass(frozen=True)
class Setting:
    """A model and inputs for it.

    Attributes:
        name: for the test's id.
        build: makes the model (made float64 and put in train mode by the test).
        inputs: makes the positional (or, as a dict, keyword) inputs for B examples.
        batch_dim: where the inputs count the examples.
        sizes: batch sizes to try.
        options: for the source.
        tolerance: relative; more than rounding in float64 only for models that compute in less.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...] | dict[str, Any]]
    batch_dim: int = 0
    sizes: tuple[int, ...] = (1, 2, 5)
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9


def combinations(settings: Sequence[Setting]) -> list[Any]:
    """Every setting at all its sizes, one of them under a sum, which is a factor on all gradients; others under a mean.

    The largest size is under a mean; a setting of one size comes under both.
    """
    under = []
    for s in settings:
        *others, largest = sorted(s.sizes)
        summed = others[-1] if others else largest
        under += [(s, size, "mean") for size in (*others[:-1], largest)] + [(s, summed, "sum")]
    return [pytest.param(*one, id=f"{one[0].name}-{one[1]}-{one[2]}") for one in under]


def doubled(inputs: Any) -> Any:
    return tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, inputs)


def call(model: nn.Module, inputs: tuple[Any, ...] | dict[str, Any]) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def example(inputs: Any, i: int, size: int, batch_dim: int) -> Any:
    """The inputs of example i alone."""

    def cut(leaf: Any) -> Any:
        counts = isinstance(leaf, Tensor) and leaf.ndim > batch_dim and leaf.shape[batch_dim] == size
        return leaf.narrow(batch_dim, i, 1) if counts else leaf

    return tree_map(cut, inputs)


def losses(output: Any, size: int, batch_dim: int) -> Tensor:
    """[B]: a loss for each example that is neither linear nor symmetric in the outputs."""
    total = torch.zeros(size, dtype=torch.float64)
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            axis = batch_dim if tensor.ndim > batch_dim and tensor.shape[batch_dim] == size else 0
            axis = next(i for i in (axis, *range(tensor.ndim)) if tensor.shape[i] == size)
            rows = tensor.movedim(axis, 0).reshape(size, -1)
            ramp = torch.linspace(0.5, 1.5, rows.shape[1], dtype=rows.dtype)
            total = total + (rows * ramp).sin().sum(dim=1) + (rows * ramp).square().mean(dim=1)
    return total


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-300))


def check_operations(batch: Gradients, rows: Tensor, *, tolerance: float = 1e-9) -> None:
    """All that a batch can be asked for, against its rows [B, d]."""
    generator = torch.Generator().manual_seed(1)
    size, dim = rows.shape
    assert (batch.size, batch.dim) == (size, dim)
    vectors = torch.randn(2, dim, generator=generator, dtype=torch.float64)
    weights = torch.randn(2, size, generator=generator, dtype=torch.float64)
    gram, dots = batch.products(vectors)
    assert relative(gram.triu(), (rows @ rows.T).triu()) < tolerance
    assert relative(dots, vectors @ rows.T) < tolerance
    assert relative(batch.gram(), rows @ rows.T) < tolerance
    assert relative(batch.dot(vectors), vectors @ rows.T) < tolerance
    assert relative(batch.weighted_sum(weights), weights @ rows) < tolerance
    assert relative(batch.rows(), rows) < tolerance
    start = torch.ones(2, dim, dtype=torch.float64)
    assert relative(batch.weighted_sum(weights, out=start), weights @ rows + 1) < tolerance
    even = batch.select(torch.arange(size - size % 2))
    pairs = rows[: size - size % 2]
    pairs = pairs[0::2] - pairs[1::2]
    if len(pairs):
        gram, dots = even.paired_products(vectors)
        # Beside the rows themselves: their differences may be zero but for rounding.
        assert float((gram.triu() - (pairs @ pairs.T).triu()).abs().max()) <= tolerance * float((rows @ rows.T).max())
        assert float((dots - vectors @ pairs.T).abs().max()) <= tolerance * float((vectors @ rows.T).abs().max())
    some = torch.arange(0, size, 2)
    assert relative(batch.select(some).weighted_sum(weights[:, some]), weights[:, some] @ rows[some]) < tolerance
    assert relative(batch.select(some).gram(), (rows @ rows.T)[some][:, some]) < tolerance


def check(setting: Setting, size: int, reduction: str) -> None:
    """One forward and backward of a setting, its gradients against the loop's."""
    torch.manual_seed(0)
    model = setting.build().double()
    model.train()
    inputs = doubled(setting.inputs(size))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loss() -> Tensor:
        each = losses(call(model, inputs), size, setting.batch_dim)
        return each.mean() if reduction == "mean" else each.sum()

    loss().backward()
    plain = [None if p.grad is None else p.grad.clone() for p in parameters]
    model.zero_grad(set_to_none=True)

    source = ExactSource(model, loss_reduction=reduction, batch_dim=setting.batch_dim, **setting.options)
    loss().backward()
    ((batch, examples),) = source.collect()
    assert examples == size
    source.detach()
    for p, before in zip(parameters, plain, strict=True):
        assert (p.grad is None) == (before is None)
        assert p.grad is None or torch.equal(p.grad, before)  # to the last bit

    def alone(i: int) -> Tensor:
        return losses(call(model, example(inputs, i, size, setting.batch_dim)), 1, setting.batch_dim).sum()

    rows = per_example_loop(alone, size, parameters)
    check_operations(batch, rows, tolerance=setting.tolerance)
