"""One gradient a backward: the paper's way, with micro-batches of one unit each.

Needs nothing of the model, so it serves where examples mix (batch normalisation): a whole batch is then
the unit that is ordered. With one example a micro-batch it is the slow way to order examples.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ordain.gradients.dense import Dense
from ordain.gradients.protocol import Collected
from ordain.gradients.sources.backward import sending
from ordain.gradients.sources.hooks import Hooks, Pass
from ordain.gradients.sources.model_checks import check_reduction, like
from ordain.gradients.sources.selection import Selection, choose, described


class MicrobatchSource:
    """Watch the parameters of ``model``; each backward's gradient is one row.

    Args:
        model: called once for each micro-batch.
        params: which trainable parameters to order by.
        loss_reduction: under ``"sum"`` the gradient is divided by the number of examples.
        batch_dim: the batch dimension of the model's inputs.
    """

    name = "microbatch"
    whole_units = True

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Selection = None,
        loss_reduction: str = "mean",
        batch_dim: int = 0,
    ) -> None:
        self._sum = check_reduction(loss_reduction) == "sum"
        self._model, self._batch_dim = model, batch_dim
        chosen = choose(model, params)
        self.parameters = described(chosen)
        self.dim = sum(p.numel() for p in chosen.values())
        self._params = list(chosen.values())
        self.like = like(self._params)
        self._task = -1  # the backward that is running
        self._arriving: dict[Tensor, Tensor] = {}  # what it has brought
        self._last: Pass | None = None  # that it has reached, with the number of examples and the gradients
        self._hooks = Hooks(model, self._params, batch_dim=batch_dim, listener=self, whole=True)
        self._handles: dict[Tensor, Any] = {}
        self.ignore, self.drop = self._hooks.ignore, self._hooks.drop
        self.passes_waiting = self._hooks.passes_waiting
        self.attach()

    def attach(self) -> None:
        self._hooks.attach()
        self._stand_by()

    def _stand_by(self) -> None:
        """Be told of the gradients of all parameters that have one now."""
        for p in self._params:
            if p.requires_grad and p not in self._handles:
                self._handles[p] = p.register_hook(partial(self._arrive, p))  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> MicrobatchSource:
        """A copy of the model takes the hook along: it goes on to watch this one only."""
        return self

    def _arrive(self, p: Tensor, grad: Tensor) -> None:
        if sending():
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._arriving = task, {}
        found = self._arriving
        found[p] = found[p] + grad if p in found else _kept(grad.detach())

    def forward_began(self, record: Pass, inputs: Any) -> None:
        """Nothing is known of the model, and nothing checked; but layers may have been unfrozen."""
        self._stand_by()

    def forward_ended(self, record: Pass, output: Any, outputs: list[tuple[Any, int]]) -> None:
        """Nothing."""

    def backward_ended(self, record: Pass) -> None:
        """One row for each forward, or for several that one backward reached; further backwards add to it."""
        if self._arriving:
            grads, self._arriving = self._arriving, {}
            if record.result is not None:
                before = record.result[1]
                grads = before | {p: before[p] + grad if p in before else grad for p, grad in grads.items()}
            record.result, self._last = (record.size, grads), record
        elif self._last is not record and self._last is not None:
            size, grads = self._last.result
            self._last.result = size + record.size, grads

    def collect(self) -> list[Collected]:
        passes, self._last = self._hooks.take()[0], None
        rows = [record.result for record in passes if record.result is not None]
        for record in passes:
            record.forget()
        return [Collected(self._gradient(size, grads), size) for size, grads in rows]

    def _gradient(self, size: int, grads: dict[Tensor, Tensor]) -> Dense:
        dtype = self.like.dtype
        parts = [(grads[p] if p in grads else torch.zeros_like(p)).reshape(1, -1).to(dtype) for p in self._params]
        return Dense([part / size for part in parts] if self._sum and size else parts)

    def detach(self) -> None:
        self._hooks.detach()
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._arriving, self._last = {}, {}, None


def _kept(grad: Tensor) -> Tensor:
    """The gradient as it is now. Where torch can, it is copied only once somebody writes to it (clipping, say)."""
    try:
        return torch._lazy_clone(grad)
    except RuntimeError:  # memory that is not torch's own, or a device that cannot
        return grad.clone()
