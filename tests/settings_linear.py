"""Linear and bilinear layers in every arrangement."""

from __future__ import annotations

from collections.abc import Callable

import torch
from engine import Setting
from torch import Tensor, nn


class Twice(nn.Module):
    """One layer, called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Tensors(nn.Module):
    """A network of neural tensors: bilinear calls of one layer, positional, by name, and of an input with itself."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, out)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.layer(x, z).tanh() + self.layer(input2=x, input1=z) * self.layer(x, x)


def two(*last: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Two inputs of so many features, with two steps where there is a third number."""
    return lambda b: tuple(torch.randn(b, *last[2:], features) for features in last[:2])


SETTINGS = [
    Setting("linear", lambda: nn.Linear(4, 3), lambda b: (torch.randn(b, 4),)),
    Setting("linear-no-bias", lambda: nn.Linear(4, 3, bias=False), lambda b: (torch.randn(b, 4),)),
    Setting("linear-3d-made", lambda: nn.Linear(4, 3), lambda b: (torch.randn(b, 6, 4),)),
    Setting("linear-3d-factored", lambda: nn.Linear(40, 30), lambda b: (torch.randn(b, 2, 40),)),
    Setting("linear-4d", lambda: nn.Linear(4, 3), lambda b: (torch.randn(b, 2, 3, 4),)),
    Setting("linear-square", lambda: nn.Linear(5, 5), lambda b: (torch.randn(b, 5, 5),)),  # B = T = in = out
    Setting("linear-sequence-first", lambda: nn.Linear(4, 3), lambda b: (torch.randn(5, b, 4),), batch_dim=1),
    Setting("linear-twice", Twice, lambda b: (torch.randn(b, 4),)),
    Setting("linear-twice-3d", Twice, lambda b: (torch.randn(b, 3, 4),)),
    Setting("bilinear-few-outputs", lambda: nn.Bilinear(4, 5, 3), two(4, 5)),
    Setting("bilinear-one-output-no-bias", lambda: nn.Bilinear(4, 5, 1, bias=False), two(4, 5)),
    Setting("bilinear-many-outputs", lambda: nn.Bilinear(4, 2, 6), two(4, 2)),
    Setting("bilinear-many-outputs-no-bias", lambda: nn.Bilinear(4, 2, 6, bias=False), two(4, 2)),
    Setting("bilinear-3d-few-outputs", lambda: nn.Bilinear(4, 5, 3), two(4, 5, 3)),
    Setting("bilinear-3d-many-outputs", lambda: nn.Bilinear(4, 2, 6), two(4, 2, 3)),
    Setting(
        "bilinear-sequence-first",
        lambda: nn.Bilinear(4, 5, 3),
        lambda b: (torch.randn(5, b, 4), torch.randn(5, b, 5)),
        batch_dim=1,
    ),
    Setting("bilinear-thrice-few-outputs", lambda: Tensors(2), two(4, 4)),
    Setting("bilinear-thrice-many-outputs", lambda: Tensors(7), two(4, 4, 3)),
]
