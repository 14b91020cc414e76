"""Convolutions, normalizations and PReLU with each of their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from engine import Setting
from torch import Tensor, nn


class Twice(nn.Module):
    """One layer that keeps its input's shape, called twice in a forward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Unbatched(nn.Module):
    """A layer that sees its one example without a dimension that counts it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.squeeze(0)).unsqueeze(0)


class Images(nn.Module):
    """Several images an example, all of them at once through a layer: for one example only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Running(nn.Module):
    """A normalization with running statistics that training mode does not reach."""

    def __init__(self, norm: nn.Module, features: int) -> None:
        super().__init__()
        self.norm = norm
        norm.running_mean = torch.linspace(-0.5, 0.5, features)
        norm.running_var = torch.linspace(0.5, 2.0, features)

    def train(self, mode: bool = True) -> Running:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Sized(nn.Module):
    """A transposed convolution that is told its output's size."""

    def __init__(self, layer: nn.ConvTranspose2d, size: list[int]) -> None:
        super().__init__()
        self.layer, self.size = layer, size

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, output_size=self.size)


def shaken(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """With all parameters random: ones and zeros hide mistakes."""

    def made() -> nn.Module:
        model = build()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) / 2)
        return model

    return made


def frozen(build: Callable[[], nn.Module], name: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = build()
        model.get_parameter(name).requires_grad_(False)
        return model

    return made


def setting(name: str, build: Callable[[], nn.Module], *shape: int, **options: Any) -> Setting:
    return Setting(name, shaken(build), lambda b: (torch.randn(b, *shape),), **options)


CONVOLUTIONS = [
    setting("conv1d", lambda: nn.Conv1d(3, 4, 3), 3, 9),
    setting("conv1d-no-bias", lambda: nn.Conv1d(3, 4, 3, bias=False), 3, 9),
    setting("conv1d-all", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=3, dilation=2, groups=2), 4, 11),
    setting("conv1d-square", lambda: nn.Conv1d(5, 5, 1), 5, 5),  # B = in = out = places
    setting("conv1d-one-channel", lambda: nn.Conv1d(1, 1, 2), 1, 4),
    setting("conv2d", lambda: nn.Conv2d(3, 4, 3), 3, 7, 6),
    setting("conv2d-large", lambda: nn.Conv2d(20, 30, 3, padding=1), 20, 4, 4),
    setting("conv2d-factored", lambda: nn.Conv2d(20, 30, 3, padding=1), 20, 2, 2),
    setting("conv2d-once", lambda: nn.Conv2d(8, 30, 3), 8, 3, 3),  # the kernel fits once
    setting("conv2d-pointwise", lambda: nn.Conv2d(3, 4, 1), 3, 4, 5),
    setting("conv2d-stride", lambda: nn.Conv2d(3, 4, 3, stride=2), 3, 8, 7),  # the last column is not used
    setting("conv2d-stride-over", lambda: nn.Conv2d(3, 4, (1, 2), stride=3), 3, 8, 7),
    setting("conv2d-dilation", lambda: nn.Conv2d(3, 4, 3, dilation=(2, 1)), 3, 8, 7),
    setting("conv2d-uneven", lambda: nn.Conv2d(3, 4, (3, 2), stride=(1, 2), padding=(2, 1)), 3, 6, 7),
    setting("conv2d-same", lambda: nn.Conv2d(3, 4, 4, padding="same", dilation=(1, 2)), 3, 6, 7),
    setting("conv2d-same-large", lambda: nn.Conv2d(20, 30, (2, 3), padding="same"), 20, 4, 4),
    setting("conv2d-valid", lambda: nn.Conv2d(3, 4, 3, padding="valid"), 3, 6, 7),
    setting("conv2d-groups", lambda: nn.Conv2d(4, 6, 3, groups=2), 4, 6, 7),
    setting("conv2d-groups-large", lambda: nn.Conv2d(40, 60, 3, groups=2, padding=1), 40, 3, 3),
    setting("conv2d-depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4), 4, 6, 7),
    setting("conv2d-reflect", lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect"), 3, 6, 7),
    setting("conv2d-replicate", lambda: nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="replicate"), 3, 6, 7),
    setting("conv2d-circular", lambda: nn.Conv2d(3, 4, 4, padding="same", padding_mode="circular"), 3, 6, 7),
    setting("conv2d-circular-large", lambda: nn.Conv2d(20, 30, 3, padding=1, padding_mode="circular"), 20, 4, 4),
    setting("conv2d-twice", lambda: Twice(nn.Conv2d(3, 3, 3, padding=1)), 3, 5, 4),
    setting("conv2d-twice-large", lambda: Twice(nn.Conv2d(20, 20, 3, padding=1)), 20, 4, 3),
    setting("conv2d-frozen-weight", frozen(lambda: nn.Conv2d(3, 4, 3), "weight"), 3, 7, 6),
    setting("conv2d-frozen-bias", frozen(lambda: nn.Conv2d(3, 4, 3), "bias"), 3, 7, 6),
    setting("conv2d-unbatched", lambda: Unbatched(nn.Conv2d(3, 4, 3)), 3, 7, 6, sizes=(1,)),
    setting("conv2d-unbatched-one", lambda: Unbatched(nn.Conv2d(1, 4, 3)), 1, 7, 6, sizes=(1,)),
    setting("conv2d-images", lambda: Images(nn.Conv2d(3, 4, 3)), 2, 3, 7, 6, sizes=(1,)),
    setting("conv2d-images-large", lambda: Images(nn.Conv2d(20, 30, 3, padding=1)), 2, 20, 4, 4, sizes=(1,)),
    setting("conv3d", lambda: nn.Conv3d(2, 3, 2), 2, 4, 3, 5),
    setting("conv3d-all", lambda: nn.Conv3d(4, 4, (2, 1, 3), (1, 2, 2), (1, 0, 2), (2, 1, 1), 2), 4, 4, 3, 5),
    setting(
        "conv-stack",
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(4, 12, 3), nn.Flatten()),
        *(3, 8, 9),
    ),
]

TRANSPOSED = [
    setting("deconv1d", lambda: nn.ConvTranspose1d(3, 4, 3), 3, 5),
    setting("deconv1d-no-bias", lambda: nn.ConvTranspose1d(3, 4, 3, bias=False), 3, 5),
    setting("deconv2d", lambda: nn.ConvTranspose2d(3, 4, 3), 3, 4, 5),
    setting("deconv2d-stride", lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1), 3, 4, 5),
    setting("deconv2d-output-padding", lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=(1, 0)), 3, 4, 5),
    setting(
        "deconv2d-output-padding-dilation",  # longer than the stride
        lambda: nn.ConvTranspose2d(3, 4, 2, stride=1, output_padding=2, dilation=3),
        *(3, 4, 5),
    ),
    setting(
        "deconv2d-output-padding-large",
        lambda: nn.ConvTranspose2d(20, 30, 3, stride=1, padding=1, output_padding=1, dilation=2),
        *(20, 3, 3),
    ),
    setting("deconv2d-output-size", lambda: Sized(nn.ConvTranspose2d(3, 4, 3, 2, 1), [8, 9]), 3, 4, 5),
    setting("deconv2d-groups", lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), 4, 4, 5),
    setting("deconv2d-groups-large", lambda: nn.ConvTranspose2d(40, 60, 3, groups=2), 40, 2, 2),
    setting("deconv2d-large", lambda: nn.ConvTranspose2d(20, 30, 3, stride=2), 20, 3, 3),
    setting("deconv2d-twice", lambda: Twice(nn.ConvTranspose2d(3, 3, 3, padding=1)), 3, 4, 5),
    setting("deconv2d-unbatched", lambda: Unbatched(nn.ConvTranspose2d(3, 4, 3)), 3, 4, 5, sizes=(1,)),
    setting("deconv3d", lambda: nn.ConvTranspose3d(2, 3, 2, (1, 2, 1), dilation=(1, 1, 2)), 2, 3, 2, 3),
]
NORMALIZATIONS = [
    setting("layer-norm", lambda: nn.LayerNorm(4), 4),
    setting("layer-norm-3d", lambda: nn.LayerNorm(4), 6, 4),
    setting("layer-norm-square", lambda: nn.LayerNorm(5), 5, 5),
    setting("layer-norm-shape", lambda: nn.LayerNorm((3, 4)), 2, 3, 4),
    setting("layer-norm-no-bias", lambda: nn.LayerNorm(4, bias=False), 6, 4),
    setting("layer-norm-plain", lambda: nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 2)), 4),
    setting("layer-norm-one", lambda: nn.LayerNorm(1), 6, 1),
    setting("layer-norm-unbatched", lambda: Unbatched(nn.LayerNorm((3, 1))), 3, 1, sizes=(1,)),
    setting("layer-norm-twice", lambda: Twice(nn.LayerNorm(4)), 6, 4),
    setting("layer-norm-frozen", frozen(lambda: nn.LayerNorm(4), "weight"), 4),
    Setting(
        "layer-norm-sequence-first", shaken(lambda: nn.LayerNorm(4)), lambda b: (torch.randn(6, b, 4),), batch_dim=1
    ),
    setting("rms-norm", lambda: nn.RMSNorm(4), 4),
    setting("rms-norm-shape", lambda: nn.RMSNorm((3, 4), eps=1e-3), 2, 3, 4),
    setting("group-norm", lambda: nn.GroupNorm(2, 4), 4),
    setting("group-norm-2d", lambda: nn.GroupNorm(2, 4), 4, 3, 5),
    setting("group-norm-twice", lambda: Twice(nn.GroupNorm(1, 4)), 4, 3),
    setting("group-norm-images", lambda: Images(nn.GroupNorm(2, 4)), 3, 4, 5, sizes=(1,)),
    setting("instance-norm-1d", lambda: nn.InstanceNorm1d(4, affine=True), 4, 5),
    setting("instance-norm-2d", lambda: nn.InstanceNorm2d(4, affine=True), 4, 3, 5),
    setting("instance-norm-3d", lambda: nn.InstanceNorm3d(2, affine=True), 2, 2, 3, 2),
    setting("instance-norm-unbatched", lambda: Unbatched(nn.InstanceNorm1d(4, affine=True)), 4, 5, sizes=(1,)),
    setting("instance-norm-tracking", lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), 4, 5),
    setting(
        "instance-norm-running",
        lambda: Running(nn.InstanceNorm1d(4, affine=True, track_running_stats=True), 4),
        *(4, 5),
    ),
    setting("batch-norm", lambda: Running(nn.BatchNorm1d(4), 4), 4),
    setting("batch-norm-1d", lambda: Running(nn.BatchNorm1d(4), 4), 4, 5),
    setting("batch-norm-2d", lambda: Running(nn.BatchNorm2d(4), 4), 4, 5, 3),
    setting("batch-norm-3d", lambda: Running(nn.BatchNorm3d(2), 2), 2, 3, 2, 2),
]

SLOPES = [
    setting("prelu", nn.PReLU, 4),
    setting("prelu-0d", nn.PReLU),
    setting("prelu-4d", nn.PReLU, 4, 3, 2),
    setting("prelu-channels", lambda: nn.PReLU(4), 4),
    setting("prelu-channels-4d", lambda: nn.PReLU(4), 4, 3, 2),
    setting("prelu-twice", lambda: Twice(nn.PReLU(4)), 4, 3),
    Setting("prelu-sequence-first", shaken(nn.PReLU), lambda b: (torch.randn(6, b, 4),), batch_dim=1),
]

SETTINGS = [*CONVOLUTIONS, *TRANSPOSED, *NORMALIZATIONS, *SLOPES]
