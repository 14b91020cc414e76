"""GraB on whole models: the orders are those of the paper's algorithm, fed by a loop over examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gradients.whole_models import SETTINGS, Batch, Case, N, Setting
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ordain import GraB, reference
from ordain.errors import OrdainError, UnsupportedModuleError
from ordain.gradients.sources.vmap import FuncSource

EPOCHS = {"mean": 2, "pair": 1}  # the second is the first that is centred; pairs need no mean


def forward(case: Case, indices: list[int]) -> tuple[Any, Tensor]:
    """The output and the losses of these examples, with the same random numbers at every call."""
    torch.manual_seed(1)
    batch: Batch = {name: tensor[indices] for name, tensor in case.data.items()}
    output = case.call(case.model, batch)
    return output, case.losses(output, batch)


def loop(setting: Setting, case: Case, indices: list[int], losses: Tensor) -> list[np.ndarray]:
    """[d] for each example: the gradient of its loss alone, or of its own part of ``losses`` if it has one."""
    parameters = [p for p in case.model.parameters() if p.requires_grad]
    rows = []
    for k, i in enumerate(indices):
        loss = losses[k] if setting.draws else forward(case, [i])[1].sum()
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.reshape(-1) for g in grads]).numpy())
    return rows


def assert_equal_bits(found: Any, wanted: Any) -> None:
    """In all tensors of the two."""
    for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def check(setting: Setting, centering: Any) -> None:
    """Train a model that GraB watches, and a twin that nobody watches, in the same orders."""
    case, twin = setting.make(0), setting.make(0)
    parameters = [p for p in twin.model.parameters() if p.requires_grad]
    order = GraB(case.model, N, centering=centering)
    optimizers = [torch.optim.SGD(one.model.parameters(), lr=0.2) for one in (case, twin)]
    permutation = list(iter(order.sampler))
    kind = reference.GraB if centering == "mean" else reference.PairGraB
    book = kind(permutation, sum(p.numel() for p in parameters))
    for epoch in range(EPOCHS[centering]):
        for start in range(0, N, setting.batch_size):
            indices = permutation[start : start + setting.batch_size]
            watched = forward(case, indices)
            state = torch.get_rng_state()
            plain = forward(twin, indices)
            assert_equal_bits((state, watched), (torch.get_rng_state(), plain))
            rows = loop(setting, twin, indices, plain[1])
            for row in rows:
                book.see(row)
            for (_, losses), optimizer in zip((watched, plain), optimizers, strict=True):
                optimizer.zero_grad()
                losses.mean().backward()
            assert_equal_bits([p.grad for p in case.model.parameters()], [p.grad for p in twin.model.parameters()])
            order.step()
            whole = torch.cat(
                [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in parameters]
            )
            assert np.allclose(np.mean(rows, axis=0), whole, rtol=0, atol=1e-6 * float(whole.abs().max())), "no mean"
            for optimizer in optimizers:
                optimizer.step()
        permutation = list(iter(order.sampler))
        assert permutation == book.next_order(), f"after epoch {epoch}"


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_orders_are_those_of_the_loop(setting: Setting, centering: str) -> None:
    if setting.expected == "refused":
        with pytest.raises(UnsupportedModuleError):
            check(setting, centering)
    else:
        check(setting, centering)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
@pytest.mark.filterwarnings("ignore")
def test_torch_func_gives_the_gradients_of_the_loop_or_refuses(setting: Setting) -> None:
    """Whatever torch.func cannot run is refused by name, with no error of its own."""
    case, twin, indices = setting.make(0), setting.make(0), list(range(setting.batch_size))
    source = FuncSource(case.model)
    try:
        forward(case, indices)[1].mean().backward()
        ((batch, _),) = source.collect()
    except OrdainError:
        return
    wanted = np.stack(loop(setting, twin, indices, forward(twin, indices)[1]))
    assert np.allclose(batch.rows(), wanted, rtol=1e-6, atol=1e-9 * np.abs(wanted).max())
    assert setting.expected == "exact"
