"""Which parameters to order by: all, some that are named, or those of the last linear layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ordain.errors import InputError, did_you_mean
from ordain.gradients.layout import tensors_in
from ordain.gradients.rules import rule_for
from ordain.gradients.rules.linear import linear, transposed_linear
from ordain.gradients.sources.independence import untouched

HEAD: Literal["head"] = "head"
Selection = Callable[[str], bool] | Literal["head"] | None  # a test of names; the last linear layer; all
_WRAPPERS = r"(_orig_mod|_checkpoint_wrapped_module)\."  # in names, of torch.compile and of checkpointing
_VOCABULARY = 4  # an output layer is one over a vocabulary if it is so many times wider than its input


def plain(name: str) -> str:
    """A parameter's name as it is without torch.compile or checkpointing around a layer."""
    return re.sub(_WRAPPERS, "", name)


def is_head(params: Any) -> bool:
    """Whether this is ``"head"``; arrays, say, are compared element by element."""
    return isinstance(params, str) and params == HEAD


def selection(model: nn.Module, params: Any) -> Selection:
    """What a user passes as ``params=``: see :class:`~ordain.Order`."""
    if params is None or is_head(params) or (callable(params) and not isinstance(params, nn.Module)):
        return params  # type: ignore[no-any-return]
    several = [params] if isinstance(params, (str, nn.Module)) else params
    if not isinstance(several, Sequence) or {isinstance(one, (str, nn.Module)) for one in several} != {True}:
        raise InputError(
            f"params={params!r}",
            expected="'head', names of parameters or modules, modules, or a function of a parameter's name",
            remedy="Write params='fc', params=['fc1', 'fc2'], params=model.fc or "
            "params=lambda name: name.startswith('fc'), for example.",
        )
    return frozenset(name for one in several for name in _named(model, one)).__contains__


def _named(model: nn.Module, one: str | nn.Module) -> list[str]:
    """The names of the parameters that a name, or a module, stands for."""
    if isinstance(one, nn.Module):
        own = set(one.parameters())
        found = [name for name, p in model.named_parameters() if p in own]
        came, names = f"params= with a {type(one).__name__} that has no parameter of the model", []
    else:
        prefix = one.rstrip(".")
        found = [name for name, _ in model.named_parameters() if f"{plain(name)}.".startswith(prefix + ".")]
        came, names = f"params={one!r}, which the model does not have", [name for name, _ in model.named_modules()]
        names += [HEAD, *(name for name, _ in model.named_parameters())]
    if not found:
        raise InputError(
            came,
            expected="a parameter's or module's name, as in model.named_modules()",
            remedy=did_you_mean(str(one), names, otherwise="Print [name for name, _ in model.named_modules()]."),
        )
    return found


def choose(model: nn.Module, params: Selection) -> dict[str, nn.Parameter]:
    """The trainable parameters to order by, by name; for the head, those of all layers that it may be."""
    params = selection(model, params)
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter) or p.is_complex():
            raise InputError(
                f"parameter {name!r}, which is {'complex' if p.is_complex() else 'not initialised yet'}",
                expected="real parameters with a shape",
                remedy="Run one batch through a lazy module first; complex parameters are not supported.",
            )
    if params == HEAD:
        return _of_linear_layers(model)
    test = params if callable(params) else None
    chosen = {name: p for name, p in model.named_parameters() if p.requires_grad and (test is None or test(name))}
    if not chosen:
        raise InputError(
            "a model with no trainable parameter to order by",
            expected="at least one parameter with requires_grad",
            remedy="Check params= and requires_grad, or pass model=None and call observe().",
        )
    return chosen


def _of_linear_layers(model: nn.Module) -> dict[str, nn.Parameter]:
    own = {p for module in model.modules() if is_linear(module) for p in module.parameters()}
    chosen = {name: p for name, p in model.named_parameters() if p.requires_grad and p in own}
    if not chosen:
        raise InputError(
            "params='head' with a model that has no trainable linear layer",
            expected="a torch.nn.Linear with requires_grad",
            remedy="Leave params= out to order by all trainable parameters, or name some: params='conv2', for example.",
        )
    return chosen


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer with a weight to train, which may be computed from others (weight norm)."""
    return rule_for(module) in (linear, transposed_linear) and any(p.requires_grad for p in module.parameters())


def calls_of(
    modules: Iterable[nn.Module], model: nn.Module, inputs: Any
) -> tuple[list[tuple[nn.Module, dict[int, torch.Size]]], list[torch.Size]]:
    """Run ``model`` and leave no trace: the calls of ``modules``, with their output shapes, and the model's own.

    Nothing if it raises: it will again, where its user can see it.
    """
    calls: list[tuple[nn.Module, dict[int, torch.Size]]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            calls.append((module, {0: output.shape}))

    args, kwargs = inputs
    handles = [module.register_forward_hook(note) for module in modules]
    try:
        with untouched(model, parameters=False):
            return calls, [leaf.shape for leaf in tensors_in(model(*args, **kwargs)) if leaf.grad_fn is not None]
    except Exception:
        return [], []
    finally:
        for handle in handles:
            handle.remove()


def head_of(
    model: nn.Module, calls: Iterable[tuple[nn.Module, Mapping[int, Sequence[int]]]], size: int
) -> list[nn.Module]:
    """The last linear layer that was called, of these calls with their output shapes, in a batch of ``size``.

    A language model's output layer (a row for each word and position, often tied to the embedding) is the dearest of
    all: the layer before it is taken instead. The matrices of one low-rank adapter are one layer.
    """
    tied = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    adapted = _adapted(model)
    layers: dict[nn.Module, dict[nn.Module, Mapping[int, Sequence[int]]]] = {}
    for module, shapes in ((module, shapes) for module, shapes in calls if is_linear(module)):
        key = adapted.get(module, module)
        layers[key] = {**layers.pop(key, {}), module: shapes}  # it comes where its last call was
    for layer in reversed(layers.values()):
        cols, rows = _width(next(iter(layer)))[0], _width(next(reversed(layer)))[1]
        positions = any(len(shape) > 2 or shape[0] > size for shapes in layer.values() for shape in shapes.values())
        if not any(module.weight in tied for module in layer) and not (positions and rows > _VOCABULARY * cols):
            return list(layer)
    return list(next(reversed(layers.values())))


def _adapted(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """The modules inside of an adapted layer, and that layer: PEFT's have the layer they adapt as ``base_layer``."""
    found = {}
    for outer in model.modules():
        base = getattr(outer, "base_layer", None)
        if isinstance(base, nn.Module):
            found.update(dict.fromkeys(set(outer.modules()) - set(base.modules()), outer))
    return found


def _width(module: nn.Module) -> tuple[int, int]:
    """The sizes of a linear layer's input and output."""
    rows, cols = module.weight.shape  # type: ignore[misc]
    return (cols, rows) if rule_for(module) is linear else (rows, cols)


def described(chosen: Mapping[str, Tensor]) -> list[str]:
    """Names and shapes, for a state to say what it belongs to."""
    return [f"{plain(name)} {list(p.shape)}" for name, p in chosen.items()]


def places(chosen: Mapping[str, Tensor]) -> dict[Tensor, tuple[int, str]]:
    """Each parameter's offset in the flat gradient, and its name."""
    found: dict[Tensor, tuple[int, str]] = {}
    offset = 0
    for name, p in chosen.items():
        found[p] = offset, name
        offset += p.numel()
    return found
