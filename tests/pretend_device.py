"""A device that is not there: tensors that say they are elsewhere, with their numbers on the CPU.

Under :class:`PretendDevice` operations that take tensors of both places fail, as they do on a GPU, and whatever makes
the host wait for a number is counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

ELSEWHERE = torch.device("meta")  # the one device type that every build of torch knows and that needs no start-up
_WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim")


class Elsewhere(Tensor):
    """A tensor on the device, around one on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=ELSEWHERE
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the device, outside of PretendDevice")


class PretendDevice(TorchDispatchMode):
    """Runs what happens to tensors of the device.

    Attributes:
        waits: what made the host wait, by the operation's name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def put(self, tensor: Tensor) -> Tensor:
        return Elsewhere(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        name = func.overloadpacket.__name__
        wrapped: dict[int, Tensor] = {}
        places = set()

        def unwrap(leaf: Any) -> Any:
            if isinstance(leaf, Elsewhere):
                places.add("device")
                wrapped[id(leaf.inner)] = leaf
                return leaf.inner
            if isinstance(leaf, Tensor) and leaf.ndim:  # numbers may come from anywhere
                places.add("cpu")
            return leaf

        plain_args, options = tree_map(unwrap, (args, options))
        assert name in ("copy_", "_to_copy") or len(places) < 2, f"{name} of tensors on both devices"
        asked = options.pop("device", None)
        here = "device" in places if asked is None else torch.device(asked) == ELSEWHERE
        if asked is not None:
            options["device"] = torch.device("cpu")
        if "device" in places and (name in _WAITS or (name == "_to_copy" and not here)):
            self.waits.append(name)
        if name == "index" and any(isinstance(i, Tensor) and i.dtype is torch.bool for i in plain_args[1]):
            self.waits.append("index by a mask")
        found = func(*plain_args, **options)

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not here:
                return leaf
            return wrapped[id(leaf)] if id(leaf) in wrapped else Elsewhere(leaf)

        return tree_map(wrap, found)
