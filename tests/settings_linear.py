"""Linear layers in every arrangement."""

from __future__ import annotations

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
]
