"""The way out that a refusal names is one: it is taken here, and leads out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ordain import GraB
from ordain.errors import OrdainError

N, BATCH = 8, 4
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))


class TwoPrecisions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).double())  # type: ignore[no-any-return]


class Centred(nn.Module):
    """Mixes the examples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return out - out.mean(dim=0)  # type: ignore[no-any-return]


class Branching(nn.Module):
    """Looks at its numbers, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2.0 if float(x.sum()) > 1e9 else 1.0)  # type: ignore[no-any-return]


def train(model: nn.Module, **options: Any) -> None:
    order = GraB(model, N, **options)
    try:
        for _ in range(2):
            drawn = list(order.sampler)
            for at in range(0, N, BATCH):
                model(X[drawn[at : at + BATCH]]).square().mean().backward()
                order.step()
    finally:
        order.detach()


CASES: list[tuple[Callable[[], nn.Module], str]] = [
    (TwoPrecisions, "exact"),
    (Centred, "exact"),
    (Centred, "func"),
    (Branching, "func"),
    (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), "func"),
]


@pytest.mark.parametrize(("build", "gradients"), CASES)
def test_the_way_out_that_is_named_leads_out(build: Any, gradients: str) -> None:
    with pytest.raises(OrdainError) as caught:
        train(build(), gradients=gradients)
    message = str(caught.value)
    named = set(re.findall(r"gradients='(\w+)'", message))
    assert named == {"microbatch"}, message
    train(build(), gradients="microbatch", group=BATCH)
    if "Leave gradients= out" in message:
        train(build())


def test_parameters_of_two_precisions_by_torch_func() -> None:
    train(TwoPrecisions(), gradients="func")
