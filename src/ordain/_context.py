"""A context for work in an order's own numbers, whatever the training loop's context is."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

_NO_CONTEXT: AbstractContextManager[object] = nullcontext()


def undisturbed() -> AbstractContextManager[object]:
    """Autocast would take products in fewer digits; tensors created in inference mode cannot be added to later."""
    mixed = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not mixed and not torch.is_inference_mode_enabled():
        return _NO_CONTEXT  # nearly always, and for nothing
    stack = ExitStack()
    for kind in mixed:
        stack.enter_context(torch.autocast(kind, enabled=False))
    stack.enter_context(torch.inference_mode(mode=False))
    return stack
