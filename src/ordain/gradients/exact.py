"""Exact per-example gradients out of an ordinary backward: what hooks kept of each layer, made into a batch.

Two checks stand between a model this does not understand and a wrong order: which dimension counts the
examples is found out, not guessed (``layout.py``), and the first gradients must add up to those that
autograd gives to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ordain.errors import InputError, StateError
from ordain.gradients.base import Gradients
from ordain.gradients.check import check_sums
from ordain.gradients.composed import join_biases, total
from ordain.gradients.factored import Factored
from ordain.gradients.forms import Biased, Form
from ordain.gradients.hooks import Hooks, Pass
from ordain.gradients.memory import shrinking
from ordain.gradients.params import check_reduction, choose
from ordain.gradients.rules import rule_for
from ordain.gradients.rules.fallback import fallback
from ordain.gradients.rules.linear import linear
from ordain.gradients.rules.recurrent import cell, recurrent

_TRIES = 32  # batches in which a parameter may have no gradient before that counts as its habit


class ExactSource:
    """Watch ``model`` and give its per-example gradients as forms.

    Args:
        model: called once for each batch.
        params: which trainable parameters to order by, as a test of their names; all by default.
        loss_reduction: how the loss reduces over the examples of a batch, ``"mean"`` or ``"sum"``.
        batch_dim: the dimension of the model's inputs that counts the examples.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Callable[[str], bool] | None = None,
        loss_reduction: str = "mean",
        batch_dim: int = 0,
    ) -> None:
        self._model = model
        self._mean = check_reduction(loss_reduction) == "mean"
        chosen = choose(model, params)
        self._offsets: dict[Tensor, tuple[int, str]] = {}
        self.dim = 0
        for name, p in chosen.items():
            self._offsets[p] = (self.dim, name)
            self.dim += p.numel()
        self._ends = {offset: offset + p.numel() for p, (offset, _) in self._offsets.items()}
        self._dtype = _common_dtype(chosen)
        self._others = {p for p in model.parameters() if p not in self._offsets}  # left out, or not trainable at first
        self._tries = 0
        self._size = 0
        self._understood: set[tuple[Any, ...]] = set()  # what has been checked, by its signature
        self._hooks = Hooks(model, self._offsets, batch_dim=batch_dim)
        self._like = torch.empty(0, dtype=self._dtype, device=next(iter(self._offsets)).device)
        self._rules = {module: rule_for(module) or fallback for module in self._hooks.paths}
        self._hooks.sharded.refuse_reading(self._rules, self._hooks.paths, (fallback, recurrent, cell))
        self._sole = self._sole_layer()
        self._hooks.attach()

    def _sole_layer(self) -> tuple[nn.Linear, list[Tensor]] | None:
        """The linear layer whose weight and bias are all there is to order by, and those two; None of other models."""
        module = next(iter(self._rules)) if len(self._rules) == 1 and not self._hooks.sharded else None
        known = list(self._offsets)
        if not isinstance(module, nn.Linear) or self._rules[module] is not linear or len(known) != 2:
            return None
        return (module, known) if known[0] is module.weight and known[1] is module.bias else None

    def detach(self) -> None:
        self._hooks.detach()

    def forget_sums(self) -> None:
        """Nobody will ask a batch for its sum: spare the hooks that remember what a backward left in ``p.grad``."""
        self._hooks.forget_sums()

    def drop(self, size: int | None = None) -> bool:
        return self._hooks.drop(size)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactSource:
        """It watches one model, whatever is copied."""
        return self

    def collect(self) -> list[Gradients]:
        passes, arrived, left = self._hooks.take()
        self._size = passes[-1].size if passes else 0  # of the last batch
        grads = self._whole_grads(left) if len(passes) == 1 and left else None
        self._hooks.rerunning = True  # a rule may run its module again
        try:
            batches = [shrinking(partial(self._factored, one, grads)) for one in passes if one.size]
        finally:
            self._hooks.rerunning = False
        self._hooks.layout.refuse_mixed()
        calls = {self._signature(one) for one in passes if one.size}
        if not calls <= self._understood:
            # Something new: compare it with what autograd says, or ask it to say so next time.
            self._refuse_new(self._model.parameters())
            self._tries += arrived is not None
            compared = partial(check_sums, batches, arrived or {}, self._offsets, coarse=self._hooks.coarse)
            if arrived is not None and (shrinking(compared) or self._tries >= _TRIES):
                self._understood |= calls
                self._tries = 0
            else:
                self._hooks.ask()
        for one in passes:
            one.reached = {}  # its graph may live on for another backward
        if len(batches) < len(passes):  # some were without an example
            batches.append(Factored([], dim=self.dim, size=0, scale=1.0, like=self._like))
        return [*batches]

    def sum_left(self, out: Tensor, ranks: int) -> bool:
        """``out`` ``[d]`` = the sum of the last batch's gradients over all ranks, where p.grad is their average."""
        scale = (self._size if self._mean else 1) * ranks
        for p, (offset, _) in self._offsets.items():
            if p.grad is None or p.grad.is_sparse:
                return False
            torch.mul(p.grad.detach().flatten(), scale, out=out[offset : offset + p.numel()])
        return True

    def _signature(self, record: Pass) -> tuple[Any, ...]:
        """Which modules were called how often, and which parameters were trainable: what a check was made of."""
        calls = sorted((self._hooks.paths[module], len(uses)) for module, uses in record.reached.items())
        return (*calls, *(p.requires_grad for p in self._offsets))

    def _factored(self, record: Pass, grads: list[tuple[int, Tensor]] | None) -> Factored:
        scale = float(record.size) if self._mean else 1.0
        sole = self._sole_form(record)
        if sole is not None:
            return Factored([(0, sole)], dim=self.dim, size=record.size, scale=scale, like=self._like, grads=grads)
        forms: dict[int, list[Form]] = {}  # by offset
        for module, uses in record.reached.items():
            for use in uses.values():
                use.check_versions()
            rule = self._rules[module]
            made = rule(module, [uses[call] for call in sorted(uses)] if len(uses) > 1 else list(uses.values()))
            for name, form in made.items():
                p = _parameter(module, name)
                if p is None:
                    continue
                place = self._offsets.get(self._hooks.sharded.part(p) if self._hooks.sharded else p)
                if place is None:
                    self._refuse_new([p])
                elif p.requires_grad:
                    forms.setdefault(place[0], []).append(form)
        placed = [(offset, total(several)) for offset, several in forms.items()]
        for offset, form in placed:
            if offset + form.numel != self._ends[offset]:
                raise self._resized(offset, form.numel)
        if grads is not None:
            sparse = {offset for offset, form in placed if form.sparse}
            grads = [one for one in grads if one[0] not in sparse]
        return Factored(join_biases(placed), dim=self.dim, size=record.size, scale=scale, like=self._like, grads=grads)

    def _sole_form(self, record: Pass) -> Form | None:
        """What the way of all layers comes to for logistic regression, where that way takes as long as the products."""
        if self._sole is None:
            return None
        module, (weight, bias) = self._sole
        uses = record.reached.get(module, {})
        same = module._parameters.get("weight") is weight and module._parameters.get("bias") is bias
        if len(uses) != 1 or not same or not (weight.requires_grad and bias.requires_grad):
            return None
        (use,) = uses.values()
        use.check_versions()
        a, b = use.input(), use.grad()
        return Biased(a.unsqueeze(1), b.unsqueeze(1)) if a.ndim == 2 else None

    def _resized(self, offset: int, numel: int) -> StateError:
        name = next(name for place, name in self._offsets.values() if place == offset)
        return StateError(
            f"{name!r} of {numel} numbers",
            expected=f"{self._ends[offset] - offset}, as when the order was made",
            remedy="Give the model its final shape first; then make the order.",
        )

    def _refuse_new(self, parameters: Iterable[Tensor]) -> None:
        """Parameters that were not there when the order was made have no place in its vectors."""
        known = self._offsets.keys() | self._others
        if any(self._hooks.sharded.part(p) not in known for p in parameters):
            raise StateError(
                "a model with parameters that were not there when the order was made",
                expected="the same parameters, frozen or not",
                remedy="Replace layers, and load weights with assign=True, first; then make the order.",
            )

    def _whole_grads(self, left: dict[Tensor, Tensor | None]) -> list[tuple[int, Tensor]] | None:
        """What the backward left in the parameters, if that is this backward's gradient and nothing else.

        Not so if it has been replaced or changed, by this backward (accumulation) or since (clipping, unscaling),
        which a tensor's version counts. What that misses, the batch will see in the sum's square.
        """
        found = []
        for p, grad in left.items():
            if (
                grad is None
                or p.grad is not grad
                or grad._version
                or not grad.is_contiguous()
                or grad.dtype != self._dtype
            ):
                return None
            found.append((self._offsets[p][0], grad))
        return found


def _common_dtype(params: Mapping[str, Tensor]) -> torch.dtype:
    """Float32, which half precision is taken in too, or float64."""
    double = [name for name, p in params.items() if p.dtype is torch.float64]
    other = next((name for name, p in params.items() if p.dtype is not torch.float64), None)
    if double and other is not None:
        raise InputError(
            f"parameters of torch.float64 ({double[0]!r}) beside {params[other].dtype} ({other!r})",
            expected="one of them (float16 and bfloat16 may stand beside float32)",
            remedy="Call .float() or .double() on the model, order by some with params=, or take gradients='func'.",
        )
    return torch.float64 if double else torch.float32


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """A parameter of the module or of a submodule; None where the name is something else (a parametrization)."""
    found = module._parameters.get(name)
    if found is None and "." in name:
        path, _, last = name.rpartition(".")
        found = module.get_submodule(path)._parameters.get(last)
    return found
