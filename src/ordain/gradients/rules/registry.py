"""One rule for each kind of module: per-example gradients from its inputs and output gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ordain.errors import UnsupportedModuleError
from ordain.gradients.layout import Layout
from ordain.gradients.param_grads import ParamGrads


class NoRuleError(UnsupportedModuleError):
    """A call that its module's rule does not explain."""


@dataclass(slots=True)
class Use:
    """One call of a module.

    Attributes:
        path: the module's name in the model, for messages.
        size: B, the number of examples.
        args: positional inputs, tensors detached.
        kwargs: keyword inputs, tensors detached.
        grads: output leaf number (in pytree order) to its gradient.
        layouts: output leaf number to where the examples are in it.
        extra: the object that the rule's ``watch`` yielded during the forward.
        versions: versions of the inputs at the backward, to detect later in-place changes.
    """

    path: str
    size: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grads: dict[int, Tensor] = field(default_factory=dict)
    layouts: dict[int, Layout] = field(default_factory=dict)
    extra: Any = None
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def argument(self, place: int, name: str) -> Any:
        """The input that the forward calls ``name``, its ``place``-th; None if it was not given."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)

    def axis(self, leaf: int = 0) -> int | None:
        """The batch dimension of output ``leaf``; None if several steps of an example are folded into it."""
        way, grad = self.layouts.get(leaf), self.grads.get(leaf)
        return None if way is None or grad is None or grad.shape[way.axis] != self.size else way.axis

    def input(self, leaf: int = 0) -> Tensor:
        """Input ``leaf`` with its batch dimension moved to the front: it is where the first output has it."""
        plain = len(self.args) == 1 and not self.kwargs and isinstance(self.args[0], Tensor)
        tensor = self.args[0] if plain else tree_leaves((self.args, self.kwargs))[leaf]
        return self.batch_first(tensor, next(iter(self.grads)))

    def grad(self, leaf: int = 0) -> Tensor:
        """The gradient at output ``leaf`` with its batch dimension moved to the front."""
        return self.batch_first(self.grads[leaf], leaf)

    @staticmethod
    def inner(number: int) -> int:
        """The leaf number of the ``number``-th of the further outputs that a rule's ``watch`` asked for."""
        return -1 - number

    def batch_first(self, tensor: Tensor, leaf: int) -> Tensor:
        """A tensor that has its examples where output ``leaf`` has them, with the batch dimension moved to the front.

        Steps that are folded into that dimension come next. One example may get one more dimension there.
        """
        way, output = self.layouts.get(leaf), self.grads[leaf]
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor = tensor.float()  # autocast mixes dtypes; products are taken in one, and in no less than float32
        if self.size == 1 and way != (0, False):
            return tensor.unsqueeze(0)  # a length of 1 elsewhere may be anything, and must stay where it is
        if way is None:
            raise self.refusal(f"a tensor of shape {tuple(tensor.shape)} whose examples cannot be told apart")
        if way.axis >= tensor.ndim or tensor.shape[way.axis] != output.shape[way.axis]:
            raise self.refusal(f"a tensor of shape {tuple(tensor.shape)}, with an output of {tuple(output.shape)},")
        if tensor.shape[way.axis] > self.size:
            return way.split(tensor, self.size).movedim(way.axis + 1, 1)
        return tensor if way.axis == 0 else tensor.movedim(way.axis, 0)

    def refusal(self, came: str) -> NoRuleError:
        """For a rule to raise where it does not apply: the gradients are then taken from the graph."""
        return NoRuleError(
            f"{came} at {self.path!r} in a batch of {self.size}",
            expected="inputs and outputs with a batch dimension",
            remedy="Keep the examples in a separate dimension, with all positions and not only some ([B, T, ...]), or "
            f"leave this layer out with params=lambda name: not name.startswith({self.path + '.'!r}).",
        )


Names = str | tuple[str, ...]  # of one parameter, or of several that lie one after the other
Rule = Callable[[Any, list[Use]], dict[Any, ParamGrads]]  # by Names
Watch = Callable[[Any, str, tuple[Any, ...], dict[str, Any]], AbstractContextManager[Any]]
RULES: dict[type[nn.Module] | str, tuple[Rule, Watch | None]] = {}


def register_rule(*kinds: type[nn.Module] | str, watch: Watch | None = None) -> Callable[[Rule], Rule]:
    """Register a rule for the per-example gradients of these modules (and of subclasses that keep their forward).

    A kind may be a qualified name, ``"package.module.Class"``, so that its library need not be installed.

    A rule takes the module and its uses in one batch and returns the gradients of each of the module's own
    trainable parameters, by its name in the module. Per-example gradients are those of the reduced loss; the 1/B of
    a mean is undone elsewhere.

    ``watch(module, path, args, kwargs)`` is for a module whose gradients do not follow from its inputs and outputs:
    the forward runs inside the context manager that it returns, and the object that this yields
    becomes :attr:`Use.extra`. If that has a list ``outputs`` of tensors, their gradients are kept too (see
    :meth:`Use.inner`), and the list is emptied. A watch may also refuse a call before it is made. A rule with a watch
    may return gradients for the parameters of submodules (``"out_proj.weight"``).
    """

    def register(rule: Rule) -> Rule:
        for kind in kinds:
            RULES[kind] = rule, watch
        return rule

    return register


def rule_for(module: nn.Module) -> Rule | None:
    """The rule for a module, or None."""
    found = _registered(module)
    return found[0] if found else None


def watch_for(module: nn.Module) -> Watch | None:
    """The watch of a module's rule, or None."""
    found = _registered(module)
    return found[1] if found else None


def _registered(module: nn.Module) -> tuple[Rule, Watch | None] | None:
    """A subclass with a forward of its own may do anything: nothing is registered for it."""
    for kind in type(module).__mro__:
        found = RULES.get(kind) or RULES.get(f"{kind.__module__}.{kind.__qualname__}")
        if found:
            return found if type(module).forward is getattr(kind, "forward", None) else None
    return None
