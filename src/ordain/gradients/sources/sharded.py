"""Parameters that are shared out over ranks (FSDP2): which of them stands where, and what cannot be done with them.

``fully_shard`` replaces each parameter by its part. The whole of it stands in the module only while the module runs,
and is what autograd gives a gradient to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ordain.errors import UnsupportedModuleError

_REMEDY = "Leave it out with params=, use DistributedDataParallel, or pass model=None and observe(your_own_gradients)."


def is_split(p: Any) -> bool:
    """Whether this is a DTensor, told by an attribute because importing the class takes a second."""
    return hasattr(p, "to_local")


def refuse_wrapped(model: nn.Module) -> None:
    """FSDP1 flattens parameters: what belongs to which layer is lost."""
    for path, module in model.named_modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise UnsupportedModuleError(
                f"FullyShardedDataParallel{f' at {path!r}' if path else ''}",
                expected="DistributedDataParallel, or a model after torch.distributed.fsdp.fully_shard",
                remedy="Shard with fully_shard (FSDP2), which keeps parameters separate, then create the order.",
            )


def refuse_sharded(model: nn.Module, gradients: str) -> None:
    """For sources that need every weight at hand, or see each parameter's gradient by itself."""
    if any(is_split(p) for p in model.parameters()):
        raise UnsupportedModuleError(
            f"a model with sharded parameters and gradients={gradients!r}",
            expected="gradients='exact', which needs only the inputs and output gradients of layers",
            remedy="Leave gradients= out, or use DistributedDataParallel.",
        )


class Sharded:
    """Knows the part of a parameter from the whole that stands in its place while its module runs.

    Args:
        model: after ``fully_shard``; any other has nothing here.
        stands: called before each forward of a module with (part, whole) for each of its parameters.
    """

    def __init__(self, model: nn.Module, stands: Callable[[Tensor, Tensor], None]) -> None:
        self._stands = stands
        self._parts: dict[Tensor, Tensor] = {}  # by what stood in its place
        self._own: dict[nn.Module, dict[str, Tensor]] = {}
        for module in model.modules():
            own: dict[str, Tensor] = {name: p for name, p in module.named_parameters(recurse=False) if is_split(p)}
            if own:
                self._own[module] = own
        self._modules = [one for one in model.modules() if any(inner in self._own for inner in one.modules())]

    def watch(self) -> list[Any]:
        """The handles of hooks: behind those of ``fully_shard``, which were there before."""
        return [module.register_forward_pre_hook(self._begin) for module in self._modules]

    def part(self, p: Tensor) -> Tensor:
        """The parameter of the order that ``p`` is, or stands for."""
        return self._parts.get(p, p)

    def refuse_reading(
        self, rules: Mapping[nn.Module, Any], paths: Mapping[nn.Module, str], reading: Iterable[Any]
    ) -> None:
        """Rules that look at weights after the backward would find a part of them."""
        needs = set(reading)
        for module, rule in rules.items():
            if rule in needs and any(is_split(p) for p in module.parameters()):
                raise UnsupportedModuleError(
                    f"{type(module).__name__} at {paths[module]!r} with sharded parameters",
                    expected="layers whose gradients follow from their inputs and outputs alone (Linear, Conv, "
                    "Embedding, norms, MultiheadAttention)",
                    remedy=_REMEDY,
                )

    def _begin(self, module: nn.Module, args: Any) -> None:
        # A module may use the parameters of a submodule without calling it.
        for inner in module.modules():
            for name, part in self._own.get(inner, {}).items():
                whole = inner._parameters.get(name)
                if whole is None or (whole is part and inner is not module):
                    continue  # its own turn comes
                if is_split(whole):
                    raise UnsupportedModuleError(
                        f"{type(inner).__name__} with parameters that stay sharded while it runs (tensor parallelism)",
                        expected="whole parameters on every rank of the order",
                        remedy=_REMEDY,
                    )
                self._parts[whole] = part
                self._stands(part, whole)
