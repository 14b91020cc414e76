"""A user's own rule for a user's own module, as docs/gradients.md shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine import Setting, check
from torch import Tensor, nn

from ordain.gradients import Use, register_rule
from ordain.gradients.param_grads import Materialized, ParamGrads
from ordain.gradients.rules import registry


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Louder(Scale):
    """A forward of its own: the rule of its parent must not be taken for it."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x * self.scale


@pytest.fixture
def calls() -> Iterator[list[int]]:
    seen: list[int] = []

    @register_rule(Scale)
    def scale(module: Scale, uses: list[Use]) -> dict[str, ParamGrads]:
        seen.append(len(uses))
        x, b = uses[0].input(), uses[0].grad()
        return {"scale": Materialized.of((x * b).reshape(len(x), -1, x.shape[-1]).sum(1))}

    yield seen
    del registry.RULES[Scale]


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_a_rule_of_ones_own(calls: list[int], shape: tuple[int, ...]) -> None:
    check(Setting("scale", Scale, lambda b: (torch.randn(b, *shape),)), 5, "mean")
    assert calls == [1] * 5  # for four sets of examples, whose gradients are known, and for all


def test_a_subclass_with_its_own_forward_does_not_inherit_the_rule(calls: list[int]) -> None:
    check(Setting("louder", Louder, lambda b: (torch.randn(b, 4),)), 5, "mean")
    assert calls == []


def test_a_library_s_layer_by_its_name() -> None:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(3, 4)
    assert registry.rule_for(layer) is not None
    for shape in ((4,), (6, 4), (2, 3, 4)):
        check(Setting("conv1d", lambda: Conv1D(3, 4), lambda b, shape=shape: (torch.randn(b, *shape),)), 5, "mean")
