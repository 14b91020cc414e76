"""Convolutions a few rows and a few examples at a time, and what their rules refuse."""

from __future__ import annotations

import pytest
import torch
from engine import Setting, check
from settings_conv_norm import CONVOLUTIONS, TRANSPOSED
from torch import Tensor, nn

from ordain.errors import UnsupportedModuleError
from ordain.gradients import ExactSource, memory
from ordain.gradients.rules import conv


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("setting", [*CONVOLUTIONS, *TRANSPOSED], ids=lambda s: s.name)
@pytest.mark.parametrize("chunk", [1, 3000])
def test_chunks_and_blocks(setting: Setting, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK_NUMBERS", chunk)
    monkeypatch.setattr(conv, "_PATCH_NUMBERS", 2 * chunk)
    monkeypatch.setattr(conv, "convolved", conv.Convolved)  # never made beforehand
    check(setting, max(setting.sizes), "mean")


def test_channels_last() -> None:
    def inputs(size: int) -> tuple[Tensor]:
        return (torch.randn(size, 3, 6, 7).to(memory_format=torch.channels_last),)

    def build() -> nn.Module:
        return nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)

    check(Setting("", build, inputs), 5, "mean")


@pytest.mark.parametrize(
    "layer", [nn.Conv1d(4, 4, 3, padding=1), nn.LayerNorm((4, 6)), nn.InstanceNorm1d(4, affine=True)]
)
def test_examples_inside_a_layer_are_refused(layer: nn.Module) -> None:
    model = nn.Sequential(layer)
    source = ExactSource(model)
    model(torch.randn(4, 6)).square().sum().backward()
    with pytest.raises(UnsupportedModuleError, match=r"depends on the other examples|mixes"):
        source.collect()
    source.detach()
