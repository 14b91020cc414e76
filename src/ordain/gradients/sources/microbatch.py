"""One gradient a backward: the paper's way, with micro-batches of one unit each.

Needs nothing of the model, so it serves where examples mix (batch normalisation): a whole batch is then
the unit that is ordered. With one example a micro-batch it is the slow way to order examples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ordain.gradients.dense import Dense
from ordain.gradients.protocol import Collected
from ordain.gradients.sources.backward import Backwards
from ordain.gradients.sources.layout import examples_in
from ordain.gradients.sources.model_checks import check_reduction, choose


class MicrobatchSource:
    """Watch the parameters of ``model``; each backward's gradient is one row.

    Args:
        model: called once for each micro-batch.
        params: which trainable parameters to order by, as a test of their names; all by default.
        loss_reduction: under ``"sum"`` the gradient is divided by the number of examples.
        batch_dim: the batch dimension of the model's inputs.
    """

    name = "microbatch"
    whole_units = True

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Callable[[str], bool] | None = None,
        loss_reduction: str = "mean",
        batch_dim: int = 0,
    ) -> None:
        self._sum = check_reduction(loss_reduction) == "sum"
        self._model, self._batch_dim = model, batch_dim
        chosen = choose(model, params)
        self.dim = sum(p.numel() for p in chosen.values())
        self._params = list(chosen.values())
        self._sizes: list[int] = []
        self._grads: dict[Tensor, Tensor] = {}
        self._backwards = Backwards(self._finish)
        self.like = self._params[0].detach().new_empty(0)
        self._handles: list[Any] = []
        self.attach()

    def attach(self) -> None:
        if not self._handles:
            self._handles.append(self._model.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._handles += [p.register_hook(partial(self._arrive, p)) for p in self._params]  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> MicrobatchSource:
        """A copy of the model takes the hook along: it goes on to watch this one only."""
        return self

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model is self._model and torch.is_grad_enabled() and model.training:
            self._sizes.append(examples_in(args, kwargs, self._batch_dim))

    def _arrive(self, p: Tensor, grad: Tensor) -> None:
        if not self._sizes:
            return  # a backward of a forward that was not watched
        brought = self._backwards.here()
        brought[p] = brought[p] + grad if p in brought else grad.detach().clone()

    def _finish(self, brought: dict[Tensor, Tensor]) -> None:
        for p, grad in brought.items():
            self._grads[p] = self._grads[p] + grad if p in self._grads else grad

    def collect(self) -> list[Collected]:
        self._backwards.forget()
        if not self._grads:
            return []
        size = self._sizes[-1] if self._sizes else 0
        grads, self._grads, self._sizes = self._grads, {}, []
        row = torch.cat([grads.get(p, torch.zeros_like(p)).reshape(-1) for p in self._params])
        row = row.to(torch.promote_types(row.dtype, torch.float32))
        return [Collected(Dense([(row / size if self._sum and size else row).unsqueeze(0)]), size)]

    def drop(self, size: int | None = None) -> bool:
        """All of it in any case: a unit is stepped before the next begins."""
        self._backwards.forget()
        self._grads, self._sizes = {}, []
        return False

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._grads.clear()
        self._backwards.forget()
