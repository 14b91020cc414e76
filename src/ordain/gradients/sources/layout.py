"""The batch dimension of each of a layer's tensors: found out, not guessed.

A tensor of 64 rows in a batch of 64 may be 64 examples or 64 positions. So once, before the first batch,
the model is run without gradient on all examples but the last: the dimension that got shorter is the one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ordain.errors import GradientError, UnsupportedModuleError

Axes = dict[tuple[str, int], int | None]
Shapes = dict[tuple[str, int], tuple[int, ...]]


class Layout:
    """Remembers the batch dimensions of the inputs and outputs of each call of each module in a pass."""

    def __init__(self, model: nn.Module, batch_dim: int, *, probes: bool = True) -> None:
        self._model, self._batch_dim, self._probes = model, batch_dim, probes
        self.probed = not probes
        self._shorter: dict[tuple[nn.Module, int], Shapes] = {}
        self._mixed = False
        self._output: Any = None  # of the probe, if the model draws no random numbers
        self._known: dict[tuple[nn.Module, int], Axes] = {}

    def probe(self, modules: Iterable[nn.Module], args: Any, kwargs: Any, size: int) -> None:
        """Run the model on one example less and note every shape. Needed once; impossible for one example."""
        if self.probed or size < 2:
            return
        self.probed = True
        counts: Counter[nn.Module] = Counter()

        def note(module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
            self._shorter[module, counts[module]] = shapes((inputs, keywords), output)
            counts[module] += 1

        def cut(leaf: Any) -> Any:
            return leaf.narrow(self._batch_dim, 0, size - 1) if self._counts(leaf, size) else leaf

        handles = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
        try:
            with torch.no_grad(), _untouched(self._model) as drawn:
                output = self._model(*tree_map(cut, args), **tree_map(cut, kwargs))
                self._output = None if drawn() else output
        except Exception:  # a model that cannot be cut short is judged by shapes alone
            self._shorter.clear()
        except BaseException:  # interrupted: what there is of it says nothing
            self._shorter.clear()
            self.probed = False
            raise
        finally:
            for handle in handles:
                handle.remove()

    def compare(self, output: Any, size: int) -> None:
        """Once: is an example's output the same without the last example, or do examples mix?"""
        shorter, self._output = self._output, None
        if shorter is None:
            return
        for one, other in zip(tree_leaves(output), tree_leaves(shorter), strict=False):
            if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.is_floating_point()):
                continue
            axis = _shortened(one.shape, other.shape, size)
            if axis is None or not other.numel():
                continue
            same = one.detach().narrow(axis, 0, size - 1)
            self._mixed |= float((same - other).abs().max()) > 1e-2 * float(same.abs().max())

    def refuse_mixed(self) -> None:
        """Raise if the comparison showed that examples mix."""
        if self._mixed:
            raise UnsupportedModuleError(
                "a model whose output for an example depends on the other examples of the batch",
                expected="a model that treats each example by itself",
                remedy="Look for statistics over the batch (F.batch_norm, x.mean(0)) in its forward, or for a "
                "layer that takes another dimension for the batch; or order whole batches with group=batch_size and "
                "gradients='microbatch'.",
            )

    def failed(self) -> None:
        """The forward that the probe was made for failed: if the probe did too, that says nothing of the model."""
        self.probed = not self._probes or bool(self._shorter)

    def _counts(self, leaf: Any, size: int) -> bool:
        return isinstance(leaf, Tensor) and leaf.ndim > self._batch_dim and leaf.shape[self._batch_dim] == size

    def axes(self, module: nn.Module, call: int, inputs: Any, output: Any, size: int) -> Axes:
        """For the ``call``-th call of ``module`` in a pass of ``size`` examples."""
        known = self._known.get((module, call))
        if known is not None:
            return known
        shorter = self._shorter.get((module, call))
        found: Axes = {}
        for name, shape in shapes(inputs, output).items():
            if shorter is not None and len(shorter.get(name, ())) == len(shape):
                found[name] = _shortened(shape, shorter[name], size)
            else:
                same = [i for i, n in enumerate(shape) if n == size]
                found[name] = same[0] if len(same) == 1 else None
        if size > 1 and shorter is not None:
            self._known[module, call] = found
        return found


def _shortened(shape: Sequence[int], shorter: Sequence[int], size: int) -> int | None:
    """The only dimension in which two shapes differ, if it went from ``size`` to one less."""
    changed = [i for i, (n, m) in enumerate(zip(shape, shorter, strict=False)) if n != m]
    if len(shape) != len(shorter) or len(changed) != 1:
        return None
    return changed[0] if (shape[changed[0]], shorter[changed[0]]) == (size, size - 1) else None


@contextmanager
def _untouched(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Run a model and leave no trace of it: buffers, attributes and random generators are put back.

    Gives a function that says whether random numbers were drawn.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    attributes = [(module, dict(module.__dict__)) for module in model.modules()]
    devices = sorted({p.get_device() for p in model.parameters() if p.is_cuda})
    python, legacy, before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002

    def drawn() -> bool:
        return not torch.equal(before, torch.get_rng_state()) or random.getstate() != python

    try:
        with torch.random.fork_rng(devices):
            yield drawn
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        for module, entries in attributes:
            module.__dict__.clear()
            module.__dict__.update(entries)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])


def shapes(inputs: Any, output: Any) -> Shapes:
    """The shapes of all tensors that go in and come out, by their place."""
    found = {("in", i): tuple(leaf.shape) for i, leaf in enumerate(tree_leaves(inputs)) if isinstance(leaf, Tensor)}
    for i, leaf in enumerate(tree_leaves(output)):
        if isinstance(leaf, Tensor):
            found["out", i] = tuple(leaf.shape)
    return found


def examples_in(args: Any, kwargs: Any, batch_dim: int) -> int:
    """B, from dimension ``batch_dim`` of the model's first input, or of most of its keyword inputs."""
    if args and isinstance(args[0], Tensor) and args[0].ndim > batch_dim:
        return args[0].shape[batch_dim]
    sizes = [
        leaf.shape[batch_dim]
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor) and leaf.ndim > batch_dim
    ]
    if not sizes:
        raise GradientError(
            "a call of the model without a tensor that has a batch dimension",
            expected=f"an input with the examples in dimension {batch_dim}",
            remedy="Pass batch_dim= to say where, or call observe() with your own gradients.",
        )
    return Counter(sizes).most_common(1)[0][0]
