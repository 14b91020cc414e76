"""By which diagonal an adaptive optimizer multiplies gradients, as it stood when the epoch began."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ordain.balancing.state import broken, check_vectors, described
from ordain.errors import InputError, StateError
from ordain.gradients import Gradients, Source, preconditioned
from ordain.gradients.sources.selection import plain
from ordain.gradients.sources.sharded import is_split
from ordain.orders.saved_state import State

_ADAPTIVE = "an optimizer with second moments of each parameter: Adam, AdamW, NAdam, RAdam or RMSprop"
_REMEDY = "Leave precondition= out, or train with one of those."


class Preconditioner:
    """1 / (sqrt(v) + eps) for each number of a gradient, with v the optimizer's (bias-corrected) second moments.

    v is taken when an epoch begins and stays the same in it: sums over an epoch's gradients are of gradients scaled
    alike. A parameter that the optimizer has not stepped yet has 1, and so have all in a first epoch without a state.

    Args:
        optimizer: steps the parameters.
        model: has them.
        source: knows which of them are ordered by, once it has seen a batch.
    """

    def __init__(self, optimizer: Any, model: nn.Module, source: Source) -> None:
        _check_optimizer(optimizer)
        if any(is_split(p) for p in model.parameters()):
            raise InputError(
                "precondition= with parameters that are sharded over ranks",
                expected="whole parameters, and second moments, on every rank",
                remedy="Leave precondition= out, or use DistributedDataParallel.",
            )
        self._optimizer, self._model, self._source = optimizer, model, source
        self._moments: dict[str, Tensor] | None = None  # the diagonal by name, of parameters that have one
        self._diagonal: Tensor | None = None  # [d]; [0] where all of it is 1; None until it is needed
        if source.dim is not None:  # else the head is still to be found
            self._named(source.parameters)

    def begin_epoch(self) -> None:
        """Take the second moments as they are now."""
        groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        names = set(_names(self._source.parameters))
        self._diagonal, self._moments = None, {}
        for name, p in self._model.named_parameters():
            if p in groups and (not names or plain(name) in names):
                found = _diagonal(self._optimizer, p, groups[p])
                if found is not None:
                    self._moments[plain(name)] = found.to(self._source.like)

    @property
    def begun(self) -> bool:
        """Is a diagonal known for the epoch?"""
        return self._moments is not None or self._diagonal is not None

    def __call__(self, batch: Gradients) -> Gradients:
        """The gradients as the optimizer scales them."""
        diagonal = self._flat()
        return preconditioned(batch, diagonal.to(batch.dtype)) if len(diagonal) else batch

    def _flat(self) -> Tensor:
        if self._diagonal is None:
            moments, like = self._moments or {}, self._source.like
            own = self._named(self._source.parameters)
            parts = [moments.get(name, like.new_ones(1).expand(p.numel())) for name, p in own.items()]
            self._diagonal = torch.cat(parts) if moments.keys() & own.keys() else like.new_empty(0)
            self._moments = None
        return self._diagonal

    def _named(self, described: Iterable[str]) -> dict[str, Tensor]:
        """The parameters of these names and shapes; all must be the optimizer's."""
        own = {p for group in self._optimizer.param_groups for p in group["params"]}
        every = {plain(name): p for name, p in self._model.named_parameters()}
        names = _names(described)
        if not names or any(name not in every for name in names):
            raise InputError(
                "precondition= with a source that does not name parameters of the model",
                expected="a source whose `parameters` are names and shapes: 'fc.weight [3, 4]'",
                remedy="See ordain.gradients.Source, or use gradients='exact'.",
            )
        for name in names:
            if every[name] not in own:
                raise InputError(
                    f"precondition= with an optimizer that does not have {name!r}",
                    expected="an optimizer with all parameters that are ordered by",
                    remedy="Order by the optimizer's parameters with params=, or freeze the others first.",
                )
        return {name: every[name] for name in names}

    # --- saving -----------------------------------------------------------------------------------

    def save(self, *, vectors: bool) -> State:
        """The diagonal of the epoch. Without vectors it is taken anew, unless it is 1."""
        if not self.begun or not self._source.parameters:
            return {"diagonal": None}
        diagonal = self._flat()
        return {"diagonal": diagonal.clone() if vectors or not len(diagonal) else None}

    def check(self, state: State, dim: int | None) -> None:
        """Raise if no preconditioner of gradients of this length can have saved this."""
        saved = state["diagonal"]
        if saved is None:
            return
        length = (
            len(saved) if isinstance(saved, Tensor) and saved.ndim == 1 and (dim is None or not len(saved)) else dim
        )
        check_vectors("diagonal", saved, (length,), like=saved)
        if saved.dtype is not self._source.like.dtype:
            raise StateError(
                f"a state with a diagonal of {saved.dtype}",
                expected=f"{self._source.like.dtype}, as the gradients of the model are",
                remedy="Convert the model first, then create the order.",
            )
        if not bool((saved > 0).all()):
            raise broken("diagonal", described(saved), "numbers > 0")

    def load(self, state: State) -> None:
        """Go back to a state that has passed :meth:`check`."""
        saved = state["diagonal"]
        self._moments = None
        self._diagonal = None if saved is None else saved.to(self._source.like, copy=True)


def _names(parameters: Iterable[str]) -> list[str]:
    return [one.rpartition(" [")[0] for one in parameters]


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"precondition={optimizer!r}", expected=_ADAPTIVE, remedy="Write precondition=optimizer.")
    name = type(optimizer).__name__
    if name == "ZeroRedundancyOptimizer":
        raise InputError(
            "precondition=ZeroRedundancyOptimizer, whose state is sharded over the ranks",
            expected="all second moments on every rank",
            remedy="Use the plain optimizer under DistributedDataParallel.",
        )
    for group in optimizer.param_groups:
        if not ("eps" in group and ("betas" in group or "alpha" in group)) or name in ("Adamax", "SparseAdam"):
            raise InputError(f"precondition={name}", expected=_ADAPTIVE, remedy=_REMEDY)


def _diagonal(optimizer: Any, p: Tensor, group: dict[str, Any]) -> Tensor | None:
    """``[numel]``: what the gradient of ``p`` is multiplied by; None before its first step."""
    state = optimizer.state.get(p)
    if not state or not float(state.get("step", 1)):
        return None
    if "square_avg" in state:  # RMSprop
        v = state["square_avg"]
        if group.get("centered"):
            v = v.addcmul(state["grad_avg"], state["grad_avg"], value=-1).clamp_(min=0.0)
    elif "exp_avg_sq" in state and "step" in state:
        v = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
        v = v / (1.0 - group["betas"][1] ** float(state["step"]))
    else:
        raise InputError(
            f"precondition={type(optimizer).__name__}, whose state has {', '.join(map(str, state))}",
            expected=f"exp_avg_sq and step, or square_avg. That is {_ADAPTIVE}",
            remedy=_REMEDY,
        )
    wide: Tensor = v.detach().to(torch.promote_types(v.dtype, torch.float32))
    return wide.sqrt().add_(group["eps"]).reciprocal_().flatten()
