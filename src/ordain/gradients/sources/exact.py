"""Exact per-example gradients from an ordinary backward, computed from what hooks kept of each layer.

Two checks stand between a model this does not understand and a wrong order: the batch dimension of each tensor
is determined by a probe, not guessed (``layout.py``), and the first gradients must add up to those that
autograd gives to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ordain.errors import InputError, StateError, UnsupportedModuleError
from ordain.gradients.combined import Sum
from ordain.gradients.factored import Factored
from ordain.gradients.memory import shrinking
from ordain.gradients.param_grads import ParamGrads
from ordain.gradients.protocol import Collected
from ordain.gradients.rules import rule_for
from ordain.gradients.rules.fallback import fallback
from ordain.gradients.rules.recurrent import cell, recurrent
from ordain.gradients.sources.hooks import Hooks, Pass
from ordain.gradients.sources.model_checks import check_reduction, choose

_TRIES = 32  # batches in which a parameter may have no gradient before that counts as its habit


class ExactSource:
    """Watch ``model`` and compute per-example gradients from what its layers saw in an ordinary backward.

    Args:
        model: called once for each batch.
        params: which trainable parameters to order by, as a test of their names; all by default.
        loss_reduction: how the loss reduces over the examples of a batch, ``"mean"`` or ``"sum"``.
        batch_dim: the batch dimension of the model's inputs.
    """

    name = "exact"
    whole_units = False

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
        self._sizes = {offset: p.numel() for p, (offset, _) in self._offsets.items()}
        self._ends = {offset + numel for offset, numel in self._sizes.items()}
        self._dtype = _common_dtype(chosen)
        self._others = {p for p in model.parameters() if p not in self._offsets}  # left out, or not trainable at first
        self._tries = 0
        self._understood: set[tuple[Any, ...]] = set()  # what has been checked, by its signature
        self._hooks = Hooks(model, self._offsets, batch_dim=batch_dim)
        self.like = torch.empty(0, dtype=self._dtype, device=next(iter(self._offsets)).device)
        self._rules = {module: rule_for(module) or fallback for module in self._hooks.paths}
        self._hooks.sharded.refuse_reading(self._rules, self._hooks.paths, (fallback, recurrent, cell))
        self.attach, self.detach, self.drop = self._hooks.attach, self._hooks.detach, self._hooks.drop
        self.attach()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactSource:
        """It watches one model, whatever is copied."""
        return self

    def collect(self) -> list[Collected]:
        passes, arrived = self._hooks.take()
        self._hooks.rerunning = True  # a rule may run its module again
        try:
            batches = [shrinking(partial(self._factored, one)) for one in passes if one.size]
        finally:
            self._hooks.rerunning = False
        calls = {self._signature(one) for one in passes if one.size}
        if not calls <= self._understood:
            # Something new: compare it with what autograd says, or ask it to say so next time.
            self._hooks.layout.refuse_mixed()
            self._refuse_new(self._model.parameters())
            self._tries += arrived is not None
            compared = partial(_check_sums, batches, arrived or {}, self._offsets, coarse=self._hooks.coarse)
            if arrived is not None and (shrinking(compared) or self._tries >= _TRIES):
                self._understood |= calls
                self._tries = 0
            else:
                self._hooks.ask()
        for one in passes:
            one.reached = {}  # its graph may live on for another backward
        if len(batches) < len(passes):  # some were without an example
            batches.append(Factored([], dim=self.dim, size=0, scale=1.0, like=self.like))
        return [Collected(batch, batch.size) for batch in batches]

    def _signature(self, record: Pass) -> tuple[Any, ...]:
        """Which modules were called how often, and which parameters were trainable: what a check was made of."""
        calls = sorted((self._hooks.paths[module], len(uses)) for module, uses in record.reached.items())
        return (*calls, *(p.requires_grad for p in self._offsets))

    def _factored(self, record: Pass) -> Factored:
        found: dict[int, list[ParamGrads]] = {}  # by offset
        for module, uses in record.reached.items():
            for use in uses.values():
                use.check_versions()
            for names, grads in self._rules[module](module, [uses[call] for call in sorted(uses)]).items():
                places = [self._place(module, name) for name in ((names,) if isinstance(names, str) else names)]
                together = places[0] >= 0 and places[-1] - places[0] == grads.rows * grads.cols
                parts = [grads] if len(places) == 1 or together else grads.apart()
                for place, part in zip(places, parts, strict=False):
                    if place >= 0:
                        found.setdefault(place, []).append(part)
        for offset, several in list(found.items()):  # a weight or bias that other modules use too is not joined
            bias = offset + self._sizes[offset]
            if max(part.numel for part in several) > self._sizes[offset] and (len(several) > 1 or bias in found):
                apart = [part.apart() for part in several]
                found[offset] = [parts[0] for parts in apart]
                found.setdefault(bias, []).extend(parts[1] for parts in apart if len(parts) > 1)
        placed = [(offset, several[0] if len(several) == 1 else Sum(*several)) for offset, several in found.items()]
        for offset, grads in placed:
            if offset + grads.numel not in self._ends or grads.numel < self._sizes[offset]:
                raise self._resized(offset, grads.numel)
        scale = float(record.size) if self._mean else 1.0
        return Factored(placed, dim=self.dim, size=record.size, scale=scale, like=self.like)

    def _place(self, module: nn.Module, name: str) -> int:
        """The offset of a module's parameter; negative if it takes no part."""
        p = module._parameters.get(name)
        if p is None and "." in name:
            path, _, last = name.rpartition(".")
            p = module.get_submodule(path)._parameters.get(last)
        if p is None or not p.requires_grad:
            return -self.dim
        place = self._offsets.get(p) or self._offsets.get(self._hooks.sharded.part(p))
        if place is None:
            self._refuse_new([p])
            return -self.dim
        return place[0]

    def _resized(self, offset: int, numel: int) -> StateError:
        name = next(name for place, name in self._offsets.values() if place == offset)
        return StateError(
            f"{name!r} of {numel} numbers",
            expected=f"{self._sizes[offset]}, as when the order was made",
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


def _check_sums(
    batches: Sequence[Factored],
    arrived: Mapping[Tensor, Tensor],
    offsets: Mapping[Tensor, tuple[int, str]],
    *,
    coarse: bool,
) -> bool:
    """Per-example gradients must add up to what autograd gave: name the first parameter where they do not.

    Args:
        batches: all that the backward reached.
        arrived: what autograd gave each parameter.
        offsets: each parameter's place in the flat vector, and its name.
        coarse: was anything computed in less than float32 (autocast)?

    Returns:
        Whether that proves anything: a gradient that is zero or not finite does not.
    """
    like = batches[0]
    explained = torch.zeros(1, like.dim, dtype=like.dtype, device=like.device)
    for batch in batches:
        ones = torch.full((1, batch.size), 1.0 / batch.scale, dtype=batch.dtype, device=batch.device)
        batch.weighted_sum(ones, out=explained)
    # A gradient that is zero but for rounding (a bias before a normalization, the bias of attention's keys)
    # has no digits to compare: it need only be small beside the whole.
    whole = float(explained.norm())
    conclusive = True
    for p, (offset, name) in offsets.items():
        mine = explained[0, offset : offset + p.numel()]
        theirs = arrived[p].reshape(-1).to(mine) if p in arrived else torch.zeros_like(mine)
        size = max(float(theirs.norm()), float(mine.norm()))
        apart = float((mine - theirs).norm())
        exact = p.dtype in (torch.float32, torch.float64) and not coarse
        tolerance = (1e-6 if p.dtype == torch.float64 else 1e-3) if exact else 5e-2
        if apart > tolerance * max(size, 1e-2 * whole, 1e-12):
            raise UnsupportedModuleError(
                f"parameter {name!r} with a gradient that the calls of its module do not explain",
                expected="every parameter to be used by calling the module that owns it, and a loss of outputs only",
                remedy="If the loss has a penalty on the weights, move it to the optimizer's weight_decay=; if the "
                f"parameter is used elsewhere, leave it out with params=lambda name: name != {name!r}, or take "
                "gradients='func'.",
            )
        conclusive &= 0.0 < size < float("inf") or not p.requires_grad
    return conclusive


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
