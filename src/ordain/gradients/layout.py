"""Where the examples of a batch lie in a tensor: found out from gradients, not guessed from shapes.

A tensor of 64 rows in a batch of 64 may be 64 examples or 64 positions. So the gradient of some of the examples alone
is sent back through the graph: the rows that it leaves at zero belong to the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ordain.errors import GradientError

_SMALL = 1e-6  # of the largest entry: what is left of a zero in the arithmetic of a backward


class Layout(NamedTuple):
    """How B examples lie in one dimension of length B k.

    Attributes:
        axis: the dimension.
        interleaved: whether row r is of example r mod B; else rows ``i k .. (i + 1) k`` are of example i.
    """

    axis: int
    interleaved: bool = False

    def fits(self, shape: Sequence[int], size: int) -> bool:
        """Can a tensor of this shape hold ``size`` examples so?"""
        length = shape[self.axis] if self.axis < len(shape) else 0
        return isinstance(length, int) and length > 0 and length % size == 0  # no number in a nested tensor

    def rows(self, chosen: Tensor, length: int) -> Tensor:
        """``[B]`` of examples to ``[length]``: which rows are theirs."""
        each = length // len(chosen)
        return chosen.repeat(each) if self.interleaved else chosen.repeat_interleave(each)

    def keep(self, tensor: Tensor, chosen: Tensor) -> Tensor:
        """``tensor`` with zeros for all examples but the chosen ones, ``[B]``."""
        shape = [-1 if axis == self.axis else 1 for axis in range(tensor.ndim)]
        return torch.where(self.rows(chosen, tensor.shape[self.axis]).view(shape), tensor, 0)

    def split(self, tensor: Tensor, size: int) -> Tensor:
        """``[B, *]``: each example's part, of k rows at ``axis`` (which is then ``axis + 1``)."""
        each = tensor.shape[self.axis] // size
        parts = (each, size) if self.interleaved else (size, each)
        shape = *tensor.shape[: self.axis], *parts, *tensor.shape[self.axis + 1 :]
        return tensor.reshape(shape).movedim(self.axis + self.interleaved, 0)

    def others(self, chosen: Tensor, length: int) -> Tensor:
        """Of the examples ``[B]`` that are not chosen: which rows of ``length`` are theirs."""
        return (~self.rows(chosen, length)).nonzero()[:, 0]

    def separates(self, sizes: Tensor, largest: float, others: Tensor) -> bool:
        """Is a gradient of some examples, of these absolute values, zero in the rows of the ``others``?"""
        left = sizes.index_select(self.axis, others)
        return not left.numel() or float(left.max()) <= _SMALL * largest


def layouts(shape: Sequence[int], size: int, batch_dim: int) -> list[Layout]:
    """All ways in which ``size`` examples may lie in a tensor, the likely ones first."""
    axes = sorted(range(len(shape)), key=lambda axis: (shape[axis] != size, axis != batch_dim, axis))
    ways = [Layout(axis, interleaved) for axis in axes for interleaved in (False, True)]
    return [way for way in ways if way.fits(shape, size) and (shape[way.axis] > size or not way.interleaved)]


def batch_sizes(inputs: Any, batch_dim: int) -> list[int]:
    """What may be B: the lengths of dimension ``batch_dim`` of the model's inputs, and of lists of tensors."""
    args, kwargs = inputs
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # nearly always
        return [args[0].shape[batch_dim]] if args[0].ndim > batch_dim else []
    sizes = [len(leaf) for leaf in tree_leaves(inputs, is_leaf=_is_list) if _is_list(leaf)]
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return [leaf.shape[batch_dim] for leaf in leaves if leaf.ndim > batch_dim] + sizes


def _is_list(leaf: Any) -> bool:
    return isinstance(leaf, list) and len(leaf) > 0 and all(isinstance(one, Tensor) for one in leaf)


def batch_size(sizes: Sequence[int], shapes: Sequence[Sequence[int]], batch_dim: int) -> int:
    """B: the input's length that the outputs of these shapes have too, or else the most common one."""
    if not sizes:
        raise GradientError(
            "a call of the model without a tensor that has a batch dimension",
            expected=f"an input with the examples in dimension {batch_dim}",
            remedy="Pass batch_dim= to say where, or call observe() with your own gradients.",
        )
    if len(sizes) == 1:  # nearly always
        return sizes[0]
    votes = Counter(sizes)
    kept = [
        size for size in votes if any(shape[axis : axis + 1] == (size,) for shape in shapes for axis in (batch_dim, 0))
    ]
    several = [size for size in kept if size != 1]
    if len(several) > 1:
        raise GradientError(
            f"inputs of {several[0]} and {several[1]} rows, and outputs of both",
            expected="one number of examples",
            remedy="Return only tensors with a row for each example, and keep what all examples share in the model (a "
            "buffer) instead of passing it in.",
        )
    if several:
        return several[0]
    plural = [size for size in votes if size != 1]
    return max(kept or plural or votes, key=votes.__getitem__)


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors of a model's output, those in the fields of its objects too."""
    found: list[Tensor] = []
    todo: list[tuple[Any, int]] = [(output, 0)]
    while todo:
        one, depth = todo.pop()
        if isinstance(one, Tensor):
            found.append(one)
            continue
        inner = tree_leaves(one)
        if len(inner) == 1 and inner[0] is one:  # nothing that pytree opens
            inner = list(getattr(one, "__dict__", {}).values()) if depth < 3 and not isinstance(one, type) else []
        todo.extend((leaf, depth + 1) for leaf in reversed(inner))
    return found
