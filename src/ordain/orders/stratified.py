"""Random reshuffling that mixes the classes evenly, without using gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ordain import _rng
from ordain.errors import InputError
from ordain.orders.order import Order
from ordain.orders.saved_state import digest
from ordain.orders.units import Indices

__all__ = ["Stratified"]


class Stratified(Order):
    """A new random order every epoch, in which every prefix holds the classes in proportion.

    Each class is shuffled and spread evenly over the epoch: its j-th of c examples gets the position (j + u) / c, with
    one uniform random u per class and epoch, and examples are visited by position. Of the first m examples, m p
    are of a class with share p, give or take 1 + (C - 2) p for C classes. This holds in the first epoch too, so it
    does not share its first epoch with other orders of the same seed.

    Args:
        labels: ``[n]``, the class of each example: integers or strings, in a list, an array or a tensor.
        seed: as in :class:`~ordain.Order`.
        distributed: as in :class:`~ordain.Order`.

    >>> labels = ["cat", "dog", "cat", "cat", "dog", "cat"]
    >>> order = Stratified(labels)
    >>> sorted(labels[i] for i in list(order.sampler)[:3])
    ['cat', 'cat', 'dog']
    """

    def __init__(self, labels: Any, *, seed: int = 0, distributed: Any = "auto") -> None:
        classes = _classes(labels)
        seed = _rng.check_seed(seed)

        def arrange(epoch: int, units: int) -> Indices:
            mine = classes[self._units.members]  # of this rank, if each orders its own
            return _spread(mine, seed=seed, epoch=epoch) if epoch else np.arange(units)

        super().__init__(
            len(classes),
            seed=seed,
            distributed=distributed,
            arrange=arrange,
            members=_spread(classes, seed=seed, epoch=0),
            identity={"labels": digest(classes)},
        )


def _classes(labels: Any) -> Indices:
    """``[n]``: the number of each example's class."""
    try:
        given = np.asarray(labels.detach().cpu() if isinstance(labels, torch.Tensor) else labels)
    except (TypeError, ValueError) as error:  # a list of lists, a dataset, bfloat16
        raise _refused(f"labels={labels!r:.80}") from error
    if given.dtype == object and all(isinstance(one, str) for one in given.flat):  # as pandas has them
        given = given.astype(str)
    if given.ndim != 1 or not len(given) or given.dtype.kind not in "biuUS":
        raise _refused(f"labels of shape {given.shape} and dtype {given.dtype}")
    return np.unique(given, return_inverse=True)[1].astype(np.int64)


def _refused(came: str) -> InputError:
    return InputError(
        came,
        expected="one class for each example, integers or strings",
        remedy="Pass dataset.targets, for example; regression targets are not classes: bin them first.",
    )


def _spread(classes: NDArray[np.int64], *, seed: int, epoch: int) -> Indices:
    """The examples by position. One u for a class, not for an example, keeps its examples at equal distances."""
    shuffled = _rng.permutation(len(classes), seed=seed, stream=epoch)  # ties stay in this order
    mixed, sizes = classes[shuffled], np.bincount(classes)
    rank = np.empty_like(mixed)
    rank[np.argsort(mixed, kind="stable")] = np.arange(len(mixed)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    offsets = _rng.uniforms(len(sizes), seed=seed, stream=epoch)
    positions = (rank + offsets[mixed]) / sizes[mixed]
    return shuffled[np.argsort(positions, kind="stable")]
