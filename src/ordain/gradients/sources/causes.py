"""Why per-example gradients do not explain a parameter's: the likeliest cause, and a way out that works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ordain.errors import UnsupportedModuleError
from ordain.gradients.sources.graph import Graph
from ordain.gradients.sources.saved_tensors import COMPILED

_REENTRANT = "CheckpointFunctionBackward"  # runs a part of the forward again, in a backward of its own


class Causes:
    """What has been seen of a model that a refusal should name.

    Args:
        params: those to order by, and the offset and name of each.
    """

    def __init__(self, params: Mapping[Tensor, tuple[int, str]]) -> None:
        self._params, self._reentrant, self._nested, self._compiled = params, False, False, False
        self._returned: set[Tensor] = set()  # parameters that are outputs, or all that an output is computed from

    def look_at(self, graph: Graph, outputs: Sequence[Tensor]) -> None:
        """Note what the graph of a pass, and the tensors that the model returned, show."""
        self._reentrant |= _REENTRANT in graph.names
        self._nested |= any("Nested" in name for name in graph.names)
        self._compiled |= COMPILED in graph.names
        self._returned |= {p for p in map(_only_parameter, outputs) if p is not None and p in self._params}

    def of_a_sum(self, p: Tensor, *, asked: bool, twice: bool) -> UnsupportedModuleError:
        """The gradients of a batch do not add up to what autograd gave ``p``.

        Args:
            p: the parameter.
            asked: whether autograd gave it any.
            twice: whether a backward has kept its own graph (``create_graph=True``).
        """
        name = self._params[p][1]
        out = f"leave the parameter out with params=lambda name: name != {name!r}."
        if self._reentrant:
            return self._checkpointed(name, f"or {out}")
        if _has_hook(p):
            return self._hooked(name, out)
        if self._nested:
            return UnsupportedModuleError(
                f"parameter {name!r} in a model that computes with nested tensors",
                expected="tensors in which the examples are rows",
                remedy=f"Pad sequences to one length (torch.nested.to_padded_tensor) and mask the padding; or {out}",
            )
        if p in self._returned:
            return UnsupportedModuleError(
                f"parameter {name!r} among the outputs of the model",
                expected="outputs with a row for each example: the loss uses this one for all examples at once",
                remedy=f"Return it once per example, as in self.scale * torch.ones(len(x)), or {out}",
            )
        if not asked:
            return UnsupportedModuleError(
                f"parameter {name!r}, which received no gradient although the backward passed through its layer",
                expected="loss.backward() without inputs=",
                remedy=f"Freeze what a step should not train (requires_grad_(False)), and unfreeze it after; or {out}",
            )
        if twice:
            return UnsupportedModuleError(
                f"parameter {name!r} with a gradient that goes through another gradient (create_graph=True)",
                expected="a loss computed from outputs only, without a penalty on gradients",
                remedy="Run the forward whose gradient is penalised inside order.ignore(), in addition to the one that "
                f"the rest of the loss is computed from (docs/orders.md, 'gradient penalties'); or {out}",
            )
        if self._compiled:
            return UnsupportedModuleError(
                f"parameter {name!r} of a compiled model, whose code does not call the order's hooks",
                expected="code compiled after the order was created",
                remedy="Call torch._dynamo.reset() after creating the order: this model, or another of its class, was "
                f"compiled before. If the loss has a penalty on the weights, move it to the optimizer; or {out}",
            )
        return UnsupportedModuleError(
            f"parameter {name!r} with a gradient that the calls of its module do not explain",
            expected="parameters used only in forwards that the order watches, and a loss computed from outputs only",
            remedy="If the loss has a penalty on the weights, move it to the optimizer's weight_decay=; if a "
            f"forward should not count, run it inside order.ignore(); or {out}",
        )

    def of_a_row(self, p: Tensor, reason: str, more: str = "") -> UnsupportedModuleError:
        """No example's own gradient is known."""
        name = self._params[p][1]
        out = f"leave the parameter out with params=lambda name: name != {name!r}"
        if self._reentrant:
            return self._checkpointed(name, f"and {out}: it needs the graph, which a checkpoint keeps only once.")
        if _has_hook(p):
            return self._hooked(name, f"{out}.")
        return UnsupportedModuleError(
            f"parameter {name!r}, whose per-example gradients could not be determined: {reason}"
            f"{f' ({more})' if more else ''}",
            expected="a model that processes each example independently",
            remedy="Look for what mixes the examples of a batch (statistics over the batch, a permutation of it), "
            f"{out}, or order whole batches with group=batch_size and gradients='microbatch'.",
        )

    @staticmethod
    def of_selective_checkpoints() -> UnsupportedModuleError:
        """Nothing can be sent down the graph: the training loop's own backward would then raise."""
        return UnsupportedModuleError(
            "parameters in a selective checkpoint (context_fn=), through which torch allows only one backward",
            expected="torch.utils.checkpoint.checkpoint(..., use_reentrant=False) without context_fn=",
            remedy="Leave context_fn= out; or order by layers after the checkpoint, as in GraB(model, n, "
            "params='head'); or order whole batches with group=batch_size and gradients='microbatch'.",
        )

    @staticmethod
    def _hooked(name: str, out: str) -> UnsupportedModuleError:
        return UnsupportedModuleError(
            f"parameter {name!r} with a hook (register_hook) and a gradient that its layer does not explain",
            expected="hooks on parameters that leave the gradient as it is",
            remedy="If the hook changes the gradient, change p.grad instead, in a hook of "
            f"register_post_accumulate_grad_hook or before optimizer.step(); or {out}",
        )

    @staticmethod
    def _checkpointed(name: str, out: str) -> UnsupportedModuleError:
        return UnsupportedModuleError(
            f"parameter {name!r} in a model with reentrant checkpointing, whose layers run again during the backward",
            expected="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            remedy="Pass use_reentrant=False (gradient_checkpointing_kwargs={'use_reentrant': False} in transformers), "
            + out,
        )


def _has_hook(p: Tensor) -> bool:
    """Has anybody but us registered a hook on a parameter?"""
    hooks = (p._backward_hooks or {}).values()
    return any(not getattr(getattr(hook, "func", hook), "__module__", "").startswith("ordain.") for hook in hooks)


def _only_parameter(output: Tensor) -> Tensor | None:
    """The parameter that an output is, or that it is computed from and from nothing else."""
    if not output.requires_grad:
        return None
    node: Any = output.grad_fn
    if node is None:
        return output
    while len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    variable: Tensor | None = getattr(node, "variable", None)
    return variable
