"""Why per-example gradients do not explain a parameter's: the likeliest cause, and a way out that works."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from torch import Tensor

from ordain.errors import UnsupportedModuleError
from ordain.gradients.sources.graph import Graph

_COMPILED = "CompiledFunctionBackward"
_REENTRANT = "CheckpointFunctionBackward"  # runs a part of the forward again, in a backward of its own


class Causes:
    """What has been seen of a model that a refusal should name.

    Args:
        params: those to order by.
    """

    def __init__(self, params: Container[Tensor]) -> None:
        self._params, self._reentrant, self._nested, self._compiled = params, False, False, False
        self._returned: set[Tensor] = set()  # parameters that are outputs, or all that an output is computed from

    def look_at(self, graph: Graph, outputs: Sequence[Tensor]) -> None:
        """Note what the graph of a pass, and the tensors that the model returned, show."""
        self._reentrant |= _REENTRANT in graph.names
        self._nested |= any("Nested" in name for name in graph.names)
        self._compiled |= _COMPILED in graph.names
        self._returned |= {p for p in map(_only_parameter, outputs) if p is not None and p in self._params}

    def of_a_sum(self, p: Tensor, name: str, *, asked: bool, twice: bool) -> UnsupportedModuleError:
        """The gradients of a batch do not add up to what autograd gave ``p``.

        Args:
            p: the parameter.
            name: of it.
            asked: whether autograd gave it any.
            twice: whether a backward has kept its own graph (``create_graph=True``).
        """
        out = f"leave the parameter out with params=lambda name: name != {name!r}."
        if self._reentrant:
            return self._checkpointed(name, f"or {out}")
        if self._nested:
            return UnsupportedModuleError(
                f"parameter {name!r} in a model that computes with nested tensors",
                expected="tensors in which the examples are rows",
                remedy=f"Fill sequences up to one length (torch.nested.to_padded_tensor) and mask the rest; or {out}",
            )
        if p in self._returned:
            return UnsupportedModuleError(
                f"parameter {name!r} among the outputs of the model",
                expected="outputs with a row for each example: what the loss does with this one is for all at once",
                remedy=f"Return it once for each example, as in self.scale * torch.ones(len(x)), or {out}",
            )
        if not asked:
            return UnsupportedModuleError(
                f"parameter {name!r}, to which the backward gave no gradient, in a layer that it went through",
                expected="loss.backward(), without inputs=",
                remedy=f"Freeze what a step shall not train: requires_grad_(False), and (True) after it; or {out}",
            )
        if twice:
            return UnsupportedModuleError(
                f"parameter {name!r} with a gradient that goes through another gradient (create_graph=True)",
                expected="a loss of outputs only, without a penalty on gradients",
                remedy="Run the forward whose gradient is penalised inside order.ignore(), beside the one that the "
                f"rest of the loss is computed from (docs/orders.md, 'gradient penalties'); or {out}",
            )
        if self._compiled:
            return UnsupportedModuleError(
                f"parameter {name!r} of a compiled model, whose code does not call the order's hooks",
                expected="code that torch.compile has made since the order is there",
                remedy="Call torch._dynamo.reset() after making the order: this model, or another of its class, was "
                f"compiled before. If the loss has a penalty on the weights, move it to the optimizer; or {out}",
            )
        return UnsupportedModuleError(
            f"parameter {name!r} with a gradient that the calls of its module do not explain",
            expected="parameters that only forwards which the order watches use, and a loss of outputs only",
            remedy="If the loss has a penalty on the weights, move it to the optimizer's weight_decay=; if a "
            f"forward shall not count, run it inside order.ignore(); or {out}",
        )

    def of_a_row(self, name: str, reason: str, more: str = "") -> UnsupportedModuleError:
        """No example's own gradient is known."""
        out = f"leave the parameter out with params=lambda name: name != {name!r}"
        if self._reentrant:
            return self._checkpointed(name, f"and {out}: it needs the graph, which a checkpoint keeps only once.")
        return UnsupportedModuleError(
            f"parameter {name!r}, of which no example's own gradient is known: {reason}{f' ({more})' if more else ''}",
            expected="a model that treats each example by itself",
            remedy="Look for what mixes the examples of a batch (statistics over the batch, a permutation of it), "
            f"{out}, or order whole batches with group=batch_size and gradients='microbatch'.",
        )

    @staticmethod
    def of_selective_checkpoints() -> UnsupportedModuleError:
        """Nothing can be sent down the graph: the training loop's own backward would then raise."""
        return UnsupportedModuleError(
            "parameters in a selective checkpoint (context_fn=), through which torch allows one backward only",
            expected="torch.utils.checkpoint.checkpoint(..., use_reentrant=False) without context_fn=",
            remedy="Leave context_fn= out; or order by layers after the checkpoint, as in GraB(model, n, "
            "params='head'); or order whole batches with group=batch_size and gradients='microbatch'.",
        )

    @staticmethod
    def _checkpointed(name: str, out: str) -> UnsupportedModuleError:
        return UnsupportedModuleError(
            f"parameter {name!r} in a model with reentrant checkpointing, whose layers run again during the backward",
            expected="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            remedy="Pass use_reentrant=False (gradient_checkpointing_kwargs={'use_reentrant': False} in transformers), "
            + out,
        )


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
