"""Checks that every source makes first: how the loss reduces, layers that mix examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ordain.errors import InputError, UnsupportedModuleError
from ordain.gradients.rules.embedding import refuse_options
from ordain.gradients.sources.selection import Selection, choose
from ordain.gradients.sources.sharded import refuse_sharded, refuse_wrapped


def like(params: Iterable[Tensor]) -> Tensor:
    """An empty tensor with the dtype and device of gradients of these: float32 at least."""
    several = list(params)
    dtype = reduce(torch.promote_types, (p.dtype for p in several), torch.float32)
    return torch.empty(0, dtype=dtype, device=several[0].device)


def check_reduction(loss_reduction: str) -> str:
    """``"mean"`` or ``"sum"``."""
    if loss_reduction not in ("mean", "sum"):
        raise InputError(
            f"loss_reduction={loss_reduction!r}",
            expected="'mean' or 'sum'",
            remedy="Say how your loss reduces over the batch; torch's losses take the mean by default.",
        )
    return loss_reduction


def mixing_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that mix examples, in training mode at least."""
    return [(path, module) for path, module in model.named_modules() if isinstance(module, _BatchNorm)]


def refuse_mixing(modules: list[tuple[str, nn.Module]]) -> None:
    """Raise for the first module that mixes examples as it is set now."""
    for path, module in modules:
        if module.training or getattr(module, "running_mean", None) is None:
            raise UnsupportedModuleError(
                f"{type(module).__name__} at {path!r} in training mode",
                expected="layers that process each example independently",
                remedy="Order by the last linear layer, which works with BatchNorm before it: "
                "GraB(model, n, params='head'). Or use GroupNorm or LayerNorm, put the layer in eval() mode so that it "
                "uses its running statistics, or order whole batches: GraB(model, n, group=batch_size, "
                "gradients='microbatch').",
            )


def refuse_scripted(model: nn.Module) -> None:
    """Hooks do not see into what torch.jit has compiled."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModuleError(
            f"{type(model).__name__}, a model compiled by torch.jit",
            expected="a model whose layers run in Python",
            remedy="Write GraB(eager_model, n): train the eager model, and script it afterwards.",
        )


class Problem(NamedTuple):
    """What will be refused.

    Attributes:
        path: the module's name.
        error: as it will be raised.
        certain: False for a layer in training mode, which may be put in eval() mode before training begins.
    """

    path: str
    error: UnsupportedModuleError
    certain: bool = True


def problems(model: nn.Module, gradients: str, params: Selection) -> list[Problem]:
    """What a source will refuse; ``gradients`` is its name, or empty for one from elsewhere."""
    checks: list[tuple[str, Callable[..., None], tuple[Any, ...], bool]] = [
        ("", refuse_wrapped, (model,), True),
        ("", refuse_scripted, (model,), True),
    ]
    if gradients in ("func", "microbatch"):
        checks.append(("", refuse_sharded, (model, gradients), True))
    if gradients:
        options = ("sparse",) if gradients == "microbatch" else ("scale_grad_by_freq", "max_norm", "sparse")
        chosen = set(choose(model, params).values())
        for path, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.weight in chosen:
                checks.append((path, refuse_options, (module, path, options), True))
    if gradients == "func" or (gradients == "exact" and params is None):
        checks += [(path, refuse_mixing, ([(path, module)],), False) for path, module in mixing_modules(model)]
    found = [(path, _refusal(check, *args), certain) for path, check, args, certain in checks]
    return [Problem(path, error, certain) for path, error, certain in found if error is not None]


def _refusal(check: Callable[..., None], *args: Any) -> UnsupportedModuleError | None:
    try:
        check(*args)
    except UnsupportedModuleError as error:
        return error
    return None
