"""The training loop's contexts, which an order's own work must not feel."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

_NO_CONTEXT: AbstractContextManager[object] = nullcontext()


def undisturbed() -> AbstractContextManager[object]:
    """For work in an order's own numbers, whatever the training loop's context is.

    Autocast would take products in fewer digits; what is made in inference mode cannot be added to later.
    """
    mixed = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not mixed and not torch.is_inference_mode_enabled():
        return _NO_CONTEXT  # nearly always, and for nothing
    stack = ExitStack()
    for kind in mixed:
        stack.enter_context(torch.autocast(kind, enabled=False))
    stack.enter_context(torch.inference_mode(mode=False))
    return stack
