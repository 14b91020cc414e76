"""Convolutions: W's gradient is the sum over output positions of b a', with a the patch of input seen there.

A transposed convolution is the same with input and output gradient changing places, so both share one representation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from ordain.gradients.combined import total
from ordain.gradients.memory import chunk_numbers, in_pieces
from ordain.gradients.param_grads import Materialized, OuterProduct, ParamGrads, pair_factors
from ordain.gradients.rules.folding import per_channel, trailing
from ordain.gradients.rules.registry import Use, register_rule

_PATCH_NUMBERS = 2**18  # 1 MB of float32 patches at a time: they are still in the cache when multiplied


class Geometry(TypedDict):
    """How a kernel moves over an input that is padded already: one entry a spatial dimension."""

    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    groups: int


class Convolved(ParamGrads):
    """Gradients of a convolution's weight ``[out, in/groups, *kernel]``, seen as ``[out, in/groups * kernel]``.

    Only the padded input x ``[B, N, in, *space]`` and the output gradient b ``[B, N, out, *places]`` are held; an
    example may be N images. Patches are a view, copied for a few examples at a time. Sums over examples or over the
    weight never materialise a gradient: each is one ordinary convolution.
    """

    kind = "convolved"

    def __init__(self, x: Tensor, b: Tensor, geometry: Geometry) -> None:
        self._weight_shape = b.shape[2], x.shape[2] // geometry["groups"], *geometry["kernel"]
        cols = math.prod(self._weight_shape[1:])
        super().__init__(b.shape[0], b.shape[2], cols, tensors=(x, b), settings={"geometry": dict(geometry)})
        self._x, self._b, self._geometry = x, b, geometry
        self._kernel, self._groups = geometry["kernel"], geometry["groups"]
        none = [0] * len(self._kernel)
        self._moves = geometry["stride"], none, geometry["dilation"], False, none, self._groups  # as torch takes them
        self.steps = b.shape[1] * math.prod(b.shape[3:])

    def materialize(self, lo: int, hi: int) -> Tensor:
        each = self.rows // self._groups
        first, last = lo // each, -(-hi // each)  # the groups these rows are in
        start, stop = (lo, hi) if last - first == 1 else (first * each, last * each)
        number = last - first
        b = self._b[:, :, start:stop].transpose(1, 2).reshape(self.size * number, -1, self.steps)
        grads = b.new_empty(len(b), b.shape[1], self.cols)
        for at, patches in self._patches(first, last):
            torch.bmm(b[at : at + len(patches)], patches.mT, out=grads[at : at + len(patches)])
        return grads.view(self.size, -1, self.cols)[:, lo - start : hi - start]

    def dot(self, vectors: Tensor) -> Tensor:
        # <V, G_i> is the sum of b_i * conv(x_i, V): one forward of the layer a vector.
        x, b = self._x.flatten(0, 1), self._b.reshape(self.size, -1)
        dots = b.new_empty(len(vectors), self.size)
        for vector, row in zip(vectors, dots, strict=True):
            seen = torch.convolution(x, vector.reshape(self._weight_shape), None, *self._moves)
            torch.linalg.vecdot(seen.reshape(self.size, -1), b, out=row)
        return dots

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        # Scaling b by example makes the sum the layer's own weight gradient: one backward of it a weighting.
        like = self._x.new_empty(1).expand(self._weight_shape)
        only_weight = [False, True, False]
        for weight, target in zip(weights, out, strict=True):

            def add(lo: int, hi: int, weight: Tensor = weight, target: Tensor = target) -> None:
                b = (self._b[lo:hi] * weight[lo:hi].view(-1, *[1] * (self._b.ndim - 1))).flatten(0, 1)
                x = self._x[lo:hi].flatten(0, 1)
                _, grad, _ = torch.ops.aten.convolution_backward(b, x, like, None, *self._moves, only_weight)
                target.add_(grad.reshape(-1))

            in_pieces(self.size, add)

    def paired(self) -> Convolved:
        return Convolved(*pair_factors(self._x, self._b), self._geometry)

    def add_products(self, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
        # Gram of factors: T^2 (rows + cols) a pair. Materialising: T rows cols an example, then rows cols a pair.
        factored = self.size * self.steps**2 * (self.rows + self.cols)
        if self._groups > 1 or factored > (self.size + self.steps) * self.rows * self.cols:
            super().add_products(vectors, gram, dots)
        else:
            self._outer().add_products(vectors, gram, dots)  # its patches are dropped with it

    def _outer(self) -> OuterProduct:
        """The same gradients with all patches copied; for one group."""
        space = len(self._kernel)
        a = self._windows(self._x).permute(0, *range(2 + space, 3 + 2 * space), *range(1, 2 + space))
        b = self._b.movedim(2, -1)
        return OuterProduct(a.reshape(self.size, self.steps, self.cols), b.reshape(self.size, self.steps, self.rows))

    def chunks(self) -> Iterator[tuple[int, int]]:
        # Ranges inside one group, or of whole groups: nothing is materialised twice.
        each = self.rows // self._groups
        for lo, hi in super().chunks():
            inside = -(-lo // each) * each, hi // each * each
            yield from pairwise(sorted({lo, hi, *(cut for cut in inside if lo < cut < hi)}))

    def _patches(self, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """(start, ``[few, cols, T]``), counting the groups first .. last of each example; overwritten by the next."""
        number, channels = last - first, self._weight_shape[1]
        few = min(self.size, max(1, min(_PATCH_NUMBERS, chunk_numbers()) // (number * self.cols * self.steps)))
        view = self._windows(self._x[:, :, first * channels : last * channels])
        buffer = self._x.new_empty(few * number, self.cols, self.steps)
        shaped = buffer.view(few, *view.shape[1:])
        for start in range(0, self.size, few):
            stop = min(start + few, self.size)
            shaped[: stop - start].copy_(view[start:stop])
            yield start * number, buffer[: (stop - start) * number]

    def _windows(self, x: Tensor) -> Tensor:
        """``[B, N, C, *space]`` to ``[B, C, *kernel, N, *places]``, a view.

        Windows as wide as all places, one at each tap of the kernel: a copy's last dimension then runs
        along the input's memory.
        """
        for i, places in enumerate(self._b.shape[3:]):
            stride = self._geometry["stride"][i]
            x = x.unfold(3 + i, (places - 1) * stride + 1, self._geometry["dilation"][i])
            x = x.narrow(3 + i, 0, self._kernel[i])[..., ::stride]
        return x.movedim(1, 2 + len(self._kernel))


def _padded(x: Tensor, widths: Sequence[tuple[int, int]], mode: str = "zeros") -> Tensor:
    """``[B, N, C, *space]`` with (before, after) added to each spatial dimension; a negative width crops."""
    if not any(width for pair in widths for width in pair):
        return x
    flat = [width for pair in reversed(widths) for width in pair]
    padded = functional.pad(x.flatten(0, 1), flat, mode="constant" if mode == "zeros" else mode)
    return padded.view(*x.shape[:2], *padded.shape[1:])


def convolved(x: Tensor, b: Tensor, geometry: Geometry) -> ParamGrads:
    """The cheapest representation for padded x ``[B, N, in, *space]`` and b ``[B, N, out, *places]``.

    A kernel as large as its input is a linear layer. Gradients no larger than the x and b they come from are
    materialised at once, which frees those and leaves nothing to convolve later.
    """
    if geometry["groups"] == 1 and x.shape[3:] == tuple(geometry["kernel"]) and b[0, 0, 0].numel() == 1:
        return OuterProduct(x.flatten(2), b.flatten(2))
    grads = Convolved(x, b, geometry)
    if grads.numel <= x[0].numel() + b[0].numel():
        return Materialized(grads.materialize(0, grads.rows))
    return grads


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, uses: list[Use]) -> dict[str, ParamGrads]:
    """Input ``[B, in, *space]``, output gradient ``[B, out, *places]``; unbatched for one example."""
    if module.padding == "same":
        gaps = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        widths = [(gap // 2, gap - gap // 2) for gap in gaps]
    else:
        padding = [0] * len(module.kernel_size) if isinstance(module.padding, str) else module.padding
        widths = [(p, p) for p in padding]

    def weight(x: Tensor, b: Tensor) -> ParamGrads:
        return convolved(_padded(x, widths, module.padding_mode), b, _geometry(module))

    return _grads(module, uses, weight)


@register_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def conv_transpose(
    module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d, uses: list[Use]
) -> dict[str, ParamGrads]:
    """Input ``[B, in, *places]``, output gradient ``[B, out, *space]``; unbatched for one example.

    The gradient is that of the convolution which takes the output's shape back to the input's.
    """

    def weight(x: Tensor, b: Tensor) -> ParamGrads:
        widths = []
        for i, (kernel, stride, dilation) in enumerate(
            zip(module.kernel_size, module.stride, module.dilation, strict=True)
        ):
            # No tap of the kernel touches the end that output_padding (or output_size) added. If that is as long
            # as a stride, the convolution back would have one place too many: it is cropped.
            before = int(module.padding[i])
            extra = b.shape[3 + i] - ((x.shape[3 + i] - 1) * stride + dilation * (kernel - 1) + 1 - 2 * before)
            widths.append((before, before - extra if extra >= stride else before))
        return convolved(_padded(b, widths), x, _geometry(module))

    return _grads(module, uses, weight)


def _geometry(module: Any) -> Geometry:
    kernel, stride, dilation = (list(sizes) for sizes in (module.kernel_size, module.stride, module.dilation))
    return {"kernel": kernel, "stride": stride, "dilation": dilation, "groups": module.groups}


def _grads(module: Any, uses: list[Use], weight: Callable[[Tensor, Tensor], ParamGrads]) -> dict[str, ParamGrads]:
    """``weight(x, b)`` summed over the uses, and b ``[B, N, out, *places]`` summed over all but B and out."""
    pairs = [trailing(use, len(module.kernel_size) + 1) for use in uses]
    grads: dict[str, ParamGrads] = {}
    if module.weight.requires_grad:
        grads["weight"] = total([weight(x, b) for x, b in pairs])
    if module.bias is not None and module.bias.requires_grad:
        grads["bias"] = Materialized.of(torch.stack([per_channel(b) for _, b in pairs]).sum(dim=0))
    return grads
