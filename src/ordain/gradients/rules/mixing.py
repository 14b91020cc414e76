"""Layers that mix the examples of a batch: no example has a gradient of its own."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ordain.errors import UnsupportedModuleError


def mixing_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that mix examples, in training mode at least."""
    return [(path, module) for path, module in model.named_modules() if isinstance(module, _BatchNorm)]


def refuse_mixing(modules: list[tuple[str, nn.Module]]) -> None:
    """Raise for the first module that mixes examples as it is set now."""
    for path, module in modules:
        if module.training or getattr(module, "running_mean", None) is None:
            raise UnsupportedModuleError(
                f"{type(module).__name__} at {path!r} in training mode",
                expected="layers that treat each example by itself",
                remedy="Use GroupNorm or LayerNorm, put the layer in eval() mode so that it uses its running "
                "statistics, or order whole batches with group=batch_size and gradients='microbatch'.",
            )
