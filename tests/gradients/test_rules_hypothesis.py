"""Layer rules against the loop over random shapes and options."""

from __future__ import annotations

import pytest
import torch
from engine import Setting, check
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from settings_conv_norm import Running, shaken
from torch import nn

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
DECONV = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
BATCH = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SIZES = st.integers(1, 4)
REDUCTIONS = st.sampled_from(["mean", "sum"])
SOME = settings(max_examples=30, deadline=None)


def several(data: st.DataObject, number: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(data.draw(st.lists(st.integers(low, high), min_size=number, max_size=number)))


@SOME
@given(st.data(), SIZES, REDUCTIONS, st.booleans(), st.booleans())
def test_bilinear(data: st.DataObject, size: int, reduction: str, bias: bool, same: bool) -> None:
    first, second, outputs = several(data, 3, 1, 5)
    more = several(data, data.draw(st.integers(0, 2)), 1, 4)
    second = first if same else second

    def build() -> nn.Module:
        return nn.Bilinear(first, second, outputs, bias=bias)

    def inputs(b: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(b, *more, first), torch.randn(b, *more, second)

    check(Setting("", build, inputs), size, reduction)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@SOME
@given(st.data(), SIZES, REDUCTIONS, st.sampled_from([1, 2, 3]))
def test_convolutions(data: st.DataObject, size: int, reduction: str, dims: int) -> None:
    groups, inputs, outputs = several(data, 3, 1, 3)
    kernel, dilation = several(data, dims, 1, 3), several(data, dims, 1, 2)
    same = data.draw(st.booleans())
    stride = (1,) * dims if same else several(data, dims, 1, 3)
    padding = "same" if same else several(data, dims, 0, 2)
    mode = data.draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    space = several(data, dims, 5, 7)  # as long as the longest kernel, and longer than any padding
    bias = data.draw(st.booleans())

    def build() -> nn.Module:
        wide = (groups * inputs, groups * outputs)
        return CONV[dims](*wide, kernel, stride, padding, dilation, groups, bias, mode)

    check(Setting("", build, lambda b: (torch.randn(b, groups * inputs, *space),)), size, reduction)


@SOME
@given(st.data(), SIZES, REDUCTIONS, st.sampled_from([1, 2, 3]))
def test_transposed_convolutions(data: st.DataObject, size: int, reduction: str, dims: int) -> None:
    groups, inputs, outputs = several(data, 3, 1, 3)
    kernel, stride, dilation = several(data, dims, 1, 3), several(data, dims, 1, 3), several(data, dims, 1, 3)
    padding = several(data, dims, 0, 2)
    extra = tuple(min(e, max(s, d) - 1) for e, s, d in zip(several(data, dims, 0, 2), stride, dilation, strict=True))
    space = several(data, dims, 1, 4)
    lengths = zip(space, kernel, stride, dilation, padding, extra, strict=True)
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + e + 1 > 0 for n, k, s, d, p, e in lengths))
    bias = data.draw(st.booleans())

    def build() -> nn.Module:
        wide = (groups * inputs, groups * outputs)
        return DECONV[dims](*wide, kernel, stride, padding, extra, groups, bias, dilation)

    check(Setting("", build, lambda b: (torch.randn(b, groups * inputs, *space),)), size, reduction)


@SOME
@given(st.data(), SIZES, REDUCTIONS, st.sampled_from(["layer", "rms", "group", "instance", "batch"]))
def test_normalizations(data: st.DataObject, size: int, reduction: str, kind: str) -> None:
    dims = data.draw(st.integers(1 if kind == "instance" else 0, 3))
    groups, each = several(data, 2, 1, 3)
    channels = groups * each
    shape = (channels, *several(data, dims, 2, 4))
    last = data.draw(st.integers(1, len(shape)))

    def build() -> nn.Module:
        if kind == "layer":
            return nn.LayerNorm(shape[-last:])
        if kind == "rms":
            return nn.RMSNorm(shape[-last:])
        if kind == "group":
            return nn.GroupNorm(groups, channels)
        if kind == "instance":
            return INSTANCE[dims](channels, affine=True)
        return Running(BATCH[dims](channels), channels)

    assume(kind != "group" or size * torch.Size(shape).numel() > groups)  # torch refuses one value a group
    check(Setting("", shaken(build), lambda b: (torch.randn(b, *shape),)), size, reduction)


@SOME
@given(st.data(), SIZES, REDUCTIONS, st.booleans())
def test_slopes(data: st.DataObject, size: int, reduction: str, shared: bool) -> None:
    shape = several(data, data.draw(st.integers(1, 4)), 1, 4)
    slopes = 1 if shared else shape[0]
    check(Setting("", lambda: nn.PReLU(slopes), lambda b: (torch.randn(b, *shape),)), size, reduction)
