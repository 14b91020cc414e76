"""Convolutions: W's gradient is the sum over output positions of b a', with a the patch of input seen there.

A transposed convolution is the same with input and output gradient changing places, so both are one form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ordain.gradients.combined import total
from ordain.gradients.memory import chunk_numbers, in_pieces
from ordain.gradients.param_grads import Materialized, OuterProduct, ParamGrads
from ordain.gradients.rules.folding import per_channel, trailing
from ordain.gradients.rules.registry import Use, register_rule

_PATCH_NUMBERS = 2**18  # 1 MB of float32 patches at a time: they are still in the cache when multiplied


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves. One entry a spatial dimension; padding is (before, after), negative to crop."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int

    def pad(self, x: Tensor, mode: str = "constant") -> Tensor:
        """``[N, C, *space]``, padded."""
        widths = [width for pair in reversed(self.padding) for width in pair]
        return functional.pad(x, widths, mode=mode) if self.pads() else x

    def pads(self) -> bool:
        """Whether anything is added or cropped."""
        return any(width for pair in self.padding for width in pair)

    def padded(self) -> Geometry:
        """The same for an input that is padded already."""
        none = tuple((0, 0) for _ in self.kernel)
        return Geometry(self.kernel, self.stride, self.dilation, none, self.groups)


class Convolved(ParamGrads):
    """Gradients of a convolution's weight ``[out, in/groups, *kernel]``, seen as ``[out, in/groups * kernel]``.

    Only the input x ``[B, N, in, *space]`` and the output gradient b ``[B, N, out, *places]`` are held; an
    example may be N images. Patches are a view, copied for a few examples at a time. What sums over examples or
    over the weight never makes a gradient an example: it is one ordinary convolution.
    """

    kind = "convolved"

    def __init__(self, x: Tensor, b: Tensor, geometry: Geometry) -> None:
        super().__init__(b.shape[0], b.shape[2], x.shape[2] // geometry.groups * math.prod(geometry.kernel))
        self._x, self._b, self._geometry = x, b, geometry
        self.steps = b.shape[1] * math.prod(b.shape[3:])

    def materialize(self, lo: int, hi: int) -> Tensor:
        groups = self._geometry.groups
        each = self.rows // groups
        first, last = lo // each, -(-hi // each)  # the groups these rows are in
        if last - first == 1:
            rows, skip = slice(lo, hi), 0
        else:
            rows, skip = slice(first * each, last * each), lo - first * each
        number = last - first
        b = self._b[:, :, rows].transpose(1, 2).reshape(self.size * number, -1, self.steps)
        grads = b.new_empty(len(b), b.shape[1], self.cols)
        for start, patches in self._patches(first, last):
            here = slice(start, start + len(patches))
            torch.bmm(b[here], patches.mT, out=grads[here])
        return grads.view(self.size, -1, self.cols)[:, skip : skip + hi - lo]

    def dot(self, vectors: Tensor) -> Tensor:
        # <V, G_i> is the sum of b_i * conv(x_i, V): one forward of the layer a vector.
        x, padding = self._ready()
        shape = self._weight_shape()
        g = self._geometry
        b = self._b.reshape(self.size, -1)
        dots = b.new_empty(len(vectors), self.size)
        for vector, row in zip(vectors, dots, strict=True):
            seen = torch.convolution(
                x, vector.reshape(shape), None, g.stride, padding, g.dilation, False, [0] * len(padding), g.groups
            )
            torch.linalg.vecdot(seen.reshape(self.size, -1), b, out=row)
        return dots

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        # Scaling b by example makes the sum the layer's own weight gradient: one backward of it a weighting.
        x, padding = self._ready()
        g = self._geometry
        like = x.new_empty(1).expand(self._weight_shape())
        images = self._b.shape[1]
        for weight, target in zip(weights, out, strict=True):

            def add(lo: int, hi: int, weight: Tensor = weight, target: Tensor = target) -> None:
                b = (self._b[lo:hi] * weight[lo:hi].view(-1, *[1] * (self._b.ndim - 1))).flatten(0, 1)
                grad = torch.ops.aten.convolution_backward(
                    b,
                    x[lo * images : hi * images],
                    like,
                    None,
                    g.stride,
                    padding,
                    g.dilation,
                    False,
                    [0] * len(padding),
                    g.groups,
                    [False, True, False],
                )[1]
                target.add_(grad.reshape(-1))

            in_pieces(self.size, add)

    def select(self, rows: Tensor) -> Convolved:
        return Convolved(self._x[rows], self._b[rows], self._geometry)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._x, self._b

    def settings(self) -> dict[str, Any]:
        return {"geometry": asdict(self._geometry)}

    @classmethod
    def build(cls, tensors: Sequence[Tensor], parts: Sequence[ParamGrads], **settings: Any) -> Convolved:
        told = settings["geometry"]
        padding = tuple((before, after) for before, after in told["padding"])
        kernel, stride, dilation = (tuple(told[name]) for name in ("kernel", "stride", "dilation"))
        x, b = tensors
        return cls(x, b, Geometry(kernel, stride, dilation, padding, told["groups"]))

    def paired(self) -> Convolved:
        # The second of a pair is so many images more, with b flipped round.
        half, images = self.size // 2, 2 * self._b.shape[1]
        flipped = torch.tensor([1.0, -1.0], dtype=self._b.dtype, device=self._b.device)
        b = self._b.reshape(half, 2, -1) * flipped[:, None]
        return Convolved(
            self._x.reshape(half, images, *self._x.shape[2:]),
            b.view(half, images, *self._b.shape[2:]),
            self._geometry,
        )

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        # Gram of factors: T^2 (rows + cols) a pair. Making: T rows cols an example, then rows cols a pair.
        steps = self.steps
        factored = self.size * steps**2 * (self.rows + self.cols)
        if self._geometry.groups > 1 or factored > (self.size + steps) * self.rows * self.cols:
            super().add_products(vectors, gram, dots)
        else:
            self.outer().add_products(vectors, gram, dots)  # its patches are dropped with it

    def outer(self) -> OuterProduct:
        """The same gradients with all patches copied; for one group."""
        space = len(self._geometry.kernel)
        a = self._windows(self._x).permute(0, *range(2 + space, 3 + 2 * space), *range(1, 2 + space))
        b = self._b.movedim(2, -1)
        return OuterProduct(a.reshape(self.size, self.steps, self.cols), b.reshape(self.size, self.steps, self.rows))

    def chunks(self) -> Iterator[tuple[int, int]]:
        # Ranges inside one group, or of whole groups: nothing is grads twice.
        each = self.rows // self._geometry.groups
        for lo, hi in super().chunks():
            yield from _aligned(lo, hi, each)

    def _patches(self, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """(start, ``[few, cols, T]``), counting the groups first .. last of each example; overwritten by the next."""
        number, channels = last - first, self._x.shape[2] // self._geometry.groups
        few = min(self.size, max(1, min(_PATCH_NUMBERS, chunk_numbers()) // (number * self.cols * self.steps)))
        view = self._windows(self._x[:, :, first * channels : last * channels])
        buffer = self._x.new_empty(few * number, self.cols, self.steps)
        shaped = buffer.view(few, *view.shape[1:])
        for start in range(0, self.size, few):
            stop = min(start + few, self.size)
            shaped[: stop - start].copy_(view[start:stop])
            yield start * number, buffer[: (stop - start) * number]

    def _windows(self, x: Tensor) -> Tensor:
        """``[B, N, C, *space]`` to ``[B, C, *kernel, N, *places]``, a view but for the padding.

        Windows as wide as all places, one at each tap of the kernel: a copy's last dimension then runs
        along the input's memory.
        """
        g = self._geometry
        view = g.pad(x.flatten(0, 1))
        view = view.view(*x.shape[:2], *view.shape[1:])
        for i, places in enumerate(self._b.shape[3:]):
            reach = (places - 1) * g.stride[i] + 1
            view = view.unfold(3 + i, reach, g.dilation[i]).narrow(3 + i, 0, g.kernel[i])[..., :: g.stride[i]]
        return view.movedim(1, 2 + len(g.kernel))

    def _ready(self) -> tuple[Tensor, list[int]]:
        """``[B N, in, *space]`` and the padding still to do, for torch's own convolutions."""
        x = self._x.flatten(0, 1)
        if all(before == after for before, after in self._geometry.padding):
            return x, [before for before, _ in self._geometry.padding]
        return self._geometry.pad(x), [0] * len(self._geometry.padding)

    def _weight_shape(self) -> tuple[int, ...]:
        return (self.rows, self._x.shape[2] // self._geometry.groups, *self._geometry.kernel)


def _aligned(lo: int, hi: int, each: int) -> Iterator[tuple[int, int]]:
    """The range lo .. hi cut into ranges of whole groups of ``each`` rows and what is left at either end."""
    inside = -(-lo // each) * each, hi // each * each
    cuts = sorted({lo, hi, *(cut for cut in inside if lo < cut < hi)})
    yield from pairwise(cuts)


def convolved(x: Tensor, b: Tensor, geometry: Geometry) -> ParamGrads:
    """The cheapest form for x ``[B, N, in, *space]`` and b ``[B, N, out, *places]``.

    A kernel as large as its input is a linear layer. Gradients no larger than the x and b they come from are
    grads at once, which frees those and leaves nothing to convolve later.
    """
    if geometry.groups == 1 and x.shape[3:] == geometry.kernel and b[0, 0, 0].numel() == 1 and not geometry.pads():
        return OuterProduct(x.flatten(2), b.flatten(2))
    form = Convolved(x, b, geometry)
    if form.rows * form.cols <= x[0].numel() + b[0].numel():
        return Materialized(form.materialize(0, form.rows))
    return form


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, uses: list[Use]) -> dict[str, ParamGrads]:
    """Input ``[B, in, *space]``, output gradient ``[B, out, *places]``; unbatched for one example."""
    kernel, dilation = module.kernel_size, module.dilation
    if module.padding == "same":
        gaps = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = tuple((gap // 2, gap - gap // 2) for gap in gaps)
    elif isinstance(module.padding, str):
        padding = tuple((0, 0) for _ in kernel)
    else:
        padding = tuple((p, p) for p in module.padding)
    geometry = Geometry(kernel, module.stride, dilation, padding, module.groups)
    pairs = [trailing(use, len(kernel) + 1) for use in uses]
    weights: list[ParamGrads] = []
    if module.weight.requires_grad:
        for x, b in pairs:
            if module.padding_mode == "zeros":
                weights.append(convolved(x, b, geometry))
            else:
                around = geometry.pad(x.flatten(0, 1), module.padding_mode)
                around = around.view(*x.shape[:2], *around.shape[1:])
                weights.append(convolved(around, b, geometry.padded()))
    return _forms(weights, module.bias, [b for _, b in pairs])


@register_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def conv_transpose(
    module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d, uses: list[Use]
) -> dict[str, ParamGrads]:
    """Input ``[B, in, *places]``, output gradient ``[B, out, *space]``; unbatched for one example."""
    pairs = [trailing(use, len(module.kernel_size) + 1) for use in uses]
    weights: list[ParamGrads] = []
    if module.weight.requires_grad:
        weights = [convolved(b, x, _transposed(module, x.shape[3:], b.shape[3:])) for x, b in pairs]
    return _forms(weights, module.bias, [b for _, b in pairs])


def _transposed(
    module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d, places: Sequence[int], space: Sequence[int]
) -> Geometry:
    """The convolution that takes the output's shape back to the input's.

    What output_padding (or output_size) added at the end is touched by no tap of the kernel. If it is as long
    as a stride, the way back would have one place too many there: it is cropped.
    """
    padding = []
    for i, (kernel, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        before = int(module.padding[i])
        reached = (places[i] - 1) * stride + dilation * (kernel - 1) + 1 - 2 * before
        extra = space[i] - reached
        padding.append((before, before - extra if extra >= stride else before))
    return Geometry(module.kernel_size, module.stride, module.dilation, tuple(padding), module.groups)


def _forms(weights: list[ParamGrads], bias: Tensor | None, grads: list[Tensor]) -> dict[str, ParamGrads]:
    """The weight's forms, one a use, and the bias's: b ``[B, N, out, *places]`` summed over all but B and out."""
    forms: dict[str, ParamGrads] = {}
    if weights:
        forms["weight"] = total(weights)
    if bias is not None and bias.requires_grad:
        sums = [per_channel(b) for b in grads]
        forms["bias"] = Materialized.flat(torch.stack(sums).sum(dim=0) if len(sums) > 1 else sums[0])
    return forms
