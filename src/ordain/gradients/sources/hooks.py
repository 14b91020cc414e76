"""Hooks on a model that keep what each of its layers saw, until a backward pass makes a batch of it.

The model is not wrapped. Each module that owns a chosen parameter gets a forward hook, which keeps the call's inputs
and asks to be told the gradient that arrives at its outputs. A call belongs to the forward pass of the whole model that
it happened in; a pass becomes a batch when a backward reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves, tree_map

from ordain.errors import GradientError, StateError, StepError, UnsupportedModuleError
from ordain.gradients.layout import Layout, batch_size, batch_sizes, tensors_in
from ordain.gradients.rules import Use, watch_for
from ordain.gradients.sources.backward import Backwards, keep_out_of_compiled, running, send, sending
from ordain.gradients.sources.sharded import Sharded, is_split

_MOST_PASSES = 1024  # more than anybody accumulates; a loop that forgot step() must not fill the memory


@dataclass(slots=True)
class Pass:
    """One forward of the whole model. Only its graph holds it until a backward arrives.

    Attributes:
        number: of the forward.
        size: B; known when the forward ends.
        sizes: what B may be, from the inputs.
        calls: of each module so far.
        shapes: of the outputs of each call.
        reached: those that a backward has brought gradients to.
        due: whether it is to be inspected.
        inputs: of the forward, for as long as some of its examples may have to be run alone.
        own_layouts: whether its examples may lie in an order that other passes do not have.
        layouts: of its calls, as an inspection showed; None: those of earlier passes.
        alone: runs of some of the examples alone.
        inspection: of its graph, if there is one.
        weights: that the source will read again, and their versions when the backward came by.
        result: what the source made of it at the end of the backward, or the error that it met.
    """

    number: int
    sizes: list[int]
    size: int = 0
    calls: dict[nn.Module, int] = field(default_factory=dict)
    shapes: dict[tuple[nn.Module, int], dict[int, tuple[int, ...]]] = field(default_factory=dict)
    reached: dict[nn.Module, dict[int, Use]] = field(default_factory=dict)
    due: bool = False
    inputs: Any = None
    alone: Sequence[Any] = ()
    own_layouts: bool = False
    layouts: dict[Any, dict[int, Layout]] | None = None
    inspection: Any = None
    weights: Sequence[tuple[Tensor, int]] = ()
    result: Any = None

    def forget(self) -> None:
        """What backwards have brought; the graph may live on for another."""
        self.reached, self.result = {}, None
        if self.inspection is not None:
            self.inspection.finish(complete=False)


class Listener(Protocol):
    """What a source does with a pass."""

    def forward_began(self, record: Pass, inputs: Any) -> None:
        """The model is about to run."""

    def forward_ended(self, record: Pass, output: Any, outputs: list[tuple[Any, int]]) -> None:
        """The model has given its outputs, whose nodes (and output numbers) these are."""

    def backward_ended(self, record: Pass) -> None:
        """A backward has reached the pass and come to its end."""


class Hooks:
    """Records, by forward pass, the inputs and output gradients of the modules of ``model`` that own ``params``.

    Nothing is registered before :meth:`attach`.

    Args:
        model: called once for each batch.
        params: those to order by.
        batch_dim: the batch dimension of the model's inputs.
        listener: told of every pass.
        whole: watch the model as one module.

    Attributes:
        paths: the watched modules and their names.
        sharded: which parameter stands for which.
        read_again: the parameters that the source reads at the end of a backward, and why.
        coarse: has anything been computed in less than float32?
        twice: has a backward kept its own graph, to be differentiated again?
    """

    def __init__(
        self, model: nn.Module, params: Iterable[Tensor], *, batch_dim: int, listener: Listener, whole: bool = False
    ) -> None:
        self._model = model
        self._params = dict.fromkeys(params)  # a set that keeps their order
        self._batch_dim, self._whole, self._listener = batch_dim, whole, listener
        self._stand_for(next(iter(self._params)))
        self.coarse = self.twice = False
        self.read_again: dict[Tensor, str] = {}
        self._ignoring = False
        self._ignored = False  # has there been a forward since the last step() that does not count?
        self._count = 0
        self._pass: Pass | None = None  # the forward that is running
        self._open = 0  # forwards that have begun since none was running, and not ended
        self._ready: dict[int, Pass] = {}  # those that a backward has reached, and come to its end
        self._backwards = Backwards(self._finish, None if any(map(is_split, self._params)) else model)
        self._diverted: dict[Any, Any] | None = None  # where gradients of some examples alone go
        self._watching: dict[nn.Module, AbstractContextManager[Any]] = {}  # around the forwards that are running
        self._extras: dict[nn.Module, Any] = {}  # what those contexts gave
        self._arrived: dict[Tensor, Tensor] | None = None  # what autograd gave the parameters; None: not asked for
        self.paths = {
            module: path
            for path, module in ([("", model)] if whole else model.named_modules())
            # A rule that watches its module may answer for submodules that are never called; and a layer whose weight
            # is computed from others has those in a submodule.
            if any(
                p in self._params
                for p in module.parameters(whole or bool(watch_for(module)) or is_parametrized(module))
            )
        }
        self._watches = {} if whole else {module: watch for module in self.paths if (watch := watch_for(module))}
        self.sharded = Sharded(model, self._stand)
        self._handles: list[Any] = []
        self._arrival_handles: dict[Tensor, Any] = {}

    def attach(self) -> None:
        """Begin to watch; does nothing if it watches already."""
        if self._handles:
            return
        keep_out_of_compiled()
        self._handles += self.sharded.watch()
        self._handles.append(self._model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True))
        for module in self.paths:
            if module in self._watches:
                self._handles.append(module.register_forward_pre_hook(self._start, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._stop, always_call=True))
            self._handles.append(module.register_forward_hook(self._watch, with_kwargs=True))
        self._handles.append(self._model.register_forward_hook(self._end, always_call=True))

    def narrow(self, modules: Sequence[nn.Module], record: Pass) -> list[Tensor]:
        """Watch some modules alone from now on, before or after the forward of ``record``; returns their parameters."""
        while self._handles:
            self._handles.pop().remove()
        inside = {part for module in modules for part in module.modules()}  # of a parametrization, say
        self.paths = {module: path for module, path in self.paths.items() if module in inside}
        own = {self.sharded.part(p) for module in modules for p in module.parameters()}
        self._params = {p: None for p in self._params if p in own}
        if not self._params:
            raise UnsupportedModuleError(
                "params='head' with a model that runs with other tensors than its own parameters",
                expected="model(x), not torch.func.functional_call() with other tensors",
                remedy="Name the layer with params=, or run the model's own parameters.",
            )
        self._stand_for(next(iter(self._params)))
        record.calls = {module: count for module, count in record.calls.items() if module in inside}
        record.shapes = {key: shapes for key, shapes in record.shapes.items() if key[0] in inside}
        self.attach()
        return list(self._params)

    def _stand_for(self, p: Tensor) -> None:
        """The dtype and device of one parameter are those of all."""
        self._first, self._dtype, self._device = p, p.dtype, p.device

    def detach(self) -> None:
        """Leave the model exactly as it was found."""
        for handle in (*self._handles, *self._arrival_handles.values()):
            handle.remove()
        self._handles, self._arrival_handles = [], {}
        self._ready.clear()
        self._backwards.forget()
        self._pass = None
        self._leave_contexts()

    def ask(self) -> None:
        """Have autograd say what it gives each parameter, until the next batch has been compared with it."""
        if self._arrived is None and not self._ready and not self._ignored:
            self._arrived = {}
            self._stand_by()

    @contextmanager
    def ignore(self) -> Iterator[None]:
        """Forwards in here do not count; the loss may have summands then that nobody watches."""
        before, self._ignoring = self._ignoring, True
        try:
            yield
        finally:
            self._ignoring = before

    def _stand_by(self) -> None:
        for p in self._params:
            self._stand(p, p)

    def _stand(self, p: Tensor, whole: Tensor) -> None:
        """``whole`` is what autograd gives the gradient of ``p`` to."""
        if self._arrived is not None and p in self._params and p.requires_grad and whole not in self._arrival_handles:
            self._arrival_handles[whole] = whole.register_hook(partial(self._arrive, p))  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Hooks:
        """A copy of the model (a moving average, say) takes the hooks along: they go on to watch this one only."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A model that is pickled takes along hooks that do nothing, and whoever loads it needs nothing of ours."""
        return (
            SimpleNamespace,
            (),
            dict.fromkeys(("_begin", "_end", "_start", "_stop", "_watch"), nullcontext().__exit__),
        )

    # --- during a forward -------------------------------------------------------------------------

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model is not self._model or running() or not torch.is_grad_enabled():
            return
        if sending() or self._backwards.under_way or _in_torch_func():
            return  # a checkpoint of the whole model computes its forward again; torch.func has its own gradients
        nested, self._open, self._pass = self._open if self._pass is not None else 0, 0, None
        if self._ignoring:
            self._ignored = True
            return
        self._extras.clear()
        self._leave_contexts()
        if self._backwards.brought:
            # Its gradients cannot be told from those of complete backwards: compare with autograd another time.
            self._arrived = None if self._ready else self._arrived
            self._backwards.forget()
        if not model.training:
            return
        if self._first.dtype is not self._dtype or self._first.device != self._device:
            raise StateError(
                f"a model now of {self._first.dtype} on {self._first.device}",
                expected=f"{self._dtype} on {self._device}, as when the order was created",
                remedy="Move or convert the model first, then create the order.",
            )
        if not self._ready and self._arrived:
            self._arrived = {}  # of backwards that were not watched
        if self._arrived is not None:
            self._stand_by()  # what was frozen when it was asked for may not be any more
        if len(self._ready) >= _MOST_PASSES:
            raise StepError(
                f"{_MOST_PASSES} backward passes since the last step()",
                expected="order.step() after every backward, or after those that make up one optimizer step",
                remedy="Call order.step(), or order.detach() to stop ordering: what the layers of "
                "each pass saw is kept in memory until then.",
            )
        self._count += 1
        record = Pass(self._count, batch_sizes((args, kwargs), self._batch_dim))
        self._listener.forward_began(record, (args, kwargs))
        self._pass, self._open = record, nested + 1

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        record = self._pass
        if model is not self._model or running() or not torch.is_grad_enabled() or not self._open:
            return
        self._pass, self._open = None, self._open - 1
        if output is None:
            return  # the forward raised
        if record is None:  # a forward that began before the last one, and ends after it
            self._open = 0
            raise UnsupportedModuleError(
                "a model whose forward calls the model itself",
                expected="one call of the model for each batch",
                remedy="Move the repeated part to a submodule, or to a method that the forward calls (self.block(x)).",
            )
        found = (output,) if isinstance(output, Tensor) else tensors_in(output)
        leaves: list[Any] = [t for t in found if t.grad_fn is not None]
        record.size = batch_size(record.sizes, [leaf.shape for leaf in leaves], self._batch_dim)
        if not leaves and record.shapes:
            raise UnsupportedModuleError(
                f"a model whose output ({type(output).__name__}) has no tensor with a gradient",
                expected="tensors, in lists, dicts or fields of objects",
                remedy="Return the tensors that the loss is computed from, or call the model inside order.ignore().",
            )
        for leaf in leaves:
            leaf.grad_fn.register_prehook(partial(self._reach_output, record))
        self._listener.forward_ended(record, output, [(leaf.grad_fn, leaf.output_nr) for leaf in leaves])

    def _start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._pass is not None and module in self.paths and not running():
            context = self._watches[module](module, self.paths[module], args, kwargs)
            self._extras[module] = context.__enter__()
            self._watching[module] = context

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self._watching:
            self._watching.pop(module).__exit__(None, None, None)

    def _leave_contexts(self) -> None:
        """Of a forward that was interrupted: torch calls no hook after what is no ``Exception``."""
        while self._watching:
            self._watching.popitem()[1].__exit__(None, None, None)

    def _watch(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        record = self._pass
        # A copy of the model takes the hooks along, and an interrupted forward leaves its pass behind.
        if record is None or running() or not torch.is_grad_enabled() or module not in self.paths:
            return
        call = record.calls.get(module, 0)
        record.calls[module] = call + 1
        plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        use = Use(
            self.paths[module],
            0,
            (args[0].detach(),) if plain else tree_map(_detached, args),
            {} if plain else tree_map(_detached, kwargs),
            extra=self._extras.pop(module, None),
        )
        shapes = record.shapes[module, call] = {}
        leaves: list[tuple[int, Any]] = list(
            enumerate((output,) if isinstance(output, Tensor) else tree_leaves(output))
        )
        if further := getattr(use.extra, "outputs", None):
            leaves += [(Use.inner(number), tensor) for number, tensor in enumerate(further)]
            further.clear()
        for leaf, tensor in leaves:
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                # Rules know nothing of tensors inside torch.func, nor of nested ones: they are left to the graph.
                # Asked no earlier than here, where torch.compile has to stop in any case.
                if tensor.is_nested or _in_torch_func():
                    record.shapes.pop((module, call), None)
                    return
                shapes[leaf] = tensor.shape
                # On the node, not on the tensor: what changes the tensor in place later comes after it.
                tensor.grad_fn.register_prehook(
                    partial(self._reach, record, (module, call), use, leaf, tensor.output_nr)
                )

    # --- during a backward ------------------------------------------------------------------------

    def divert(self, uses: dict[Any, Any] | None) -> None:
        """Write what comes to the layers' outputs to ``uses``, by pass, module and call; None ends that."""
        self._diverted = uses
        send(uses is not None)

    def _reach(
        self, record: Pass, at: tuple[nn.Module, int], use: Use, leaf: int, number: int, grads: Sequence[Tensor | None]
    ) -> None:
        (module, call), grad = at, grads[number]
        if grad is None or module not in self.paths:
            return
        if sending():
            if self._diverted is None:
                return  # another order of the model does it
            _, found = self._diverted.setdefault((record.number, module, call), (use, {}))
            found[leaf] = found[leaf] + grad if leaf in found else grad.detach()
            return
        if not self._bring(record):
            return
        self.coarse |= grad.dtype in (torch.float16, torch.bfloat16)
        # With one example this may be the very tensor that becomes a parameter's gradient and is changed there.
        grad = grad.detach().clone() if record.size == 1 else grad.detach()
        uses = record.reached.setdefault(module, {})
        if call not in uses:
            use.size, use.grads = record.size, {}  # not what an earlier backward through this graph brought
            uses[call] = use
            leaves = use.args if not use.kwargs else tree_leaves((use.args, use.kwargs))
            use.versions = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
        use.grads[leaf] = use.grads[leaf] + grad if leaf in use.grads else grad

    def _reach_output(self, record: Pass, grads: tuple[Tensor | None, ...]) -> None:
        if not sending():
            self._bring(record)

    def _bring(self, record: Pass) -> bool:
        """The backward that is running has reached ``record``. Does it count?"""
        self.twice |= torch.is_grad_enabled()
        brought = self._here()
        if brought is not None and record.number not in brought:
            brought[record.number] = record
            record.weights = [(p, p._version) for p in self.read_again]
            if record.number not in self._ready:
                record.reached = {}  # an earlier backward may have broken off
        return brought is not None

    def _here(self) -> dict[Any, Any] | None:
        """What the backward that is running has brought so far; None if it does not count."""
        before, brought = self._backwards.accumulate, self._backwards.here()
        if not before and self._backwards.accumulate and self._ready:  # what waits is of torch.autograd.grad
            self.drop()
            brought = self._backwards.here()
        return brought

    def counts(self) -> bool:
        """Is the backward that is running one to learn from?"""
        return self._here() is not None

    def _arrive(self, p: Tensor, grad: Tensor) -> None:
        if self._arrived is not None and not sending() and self.counts():
            self._arrived[p] = self._arrived[p] + grad if p in self._arrived else grad.detach().clone()

    def _finish(self, brought: dict[int, Pass]) -> None:
        self._ready |= brought
        trained = any(p.requires_grad for p in self._params)
        for record in brought.values():
            changed = next((p for p, version in record.weights if p._version != version), None)
            if changed is not None:
                record.result = GradientError(
                    f"{self.read_again[changed]}, changed during the backward (by an optimizer in a hook, say)",
                    expected="weights that stay as they are until the backward has ended",
                    remedy="Call optimizer.step() after loss.backward(), or leave the layer out with params=.",
                )
            elif trained:
                self._listener.backward_ended(record)
            else:  # to be raised by step(), not out of the backward
                record.result = StateError(
                    "a backward that trains none of the order's parameters, which are all frozen now",
                    expected="at least one parameter that was trained when the order was created",
                    remedy="Call order.detach() and create an order for the parameters trained now (another "
                    "adapter, for example).",
                )

    # --- after it ---------------------------------------------------------------------------------

    def take(self) -> tuple[list[Pass], dict[Tensor, Tensor] | None]:
        """The passes that a backward has reached, the oldest first, and what autograd gave the parameters.

        The latter is None where it was not asked for, or cannot be told; it is not asked again before :meth:`ask`.
        Raises what the source met at the end of a backward.
        """
        if self._backwards.brought:
            self._backwards.forget()
        ready, self._ready = self._ready, {}
        arrived, self._arrived = None if self._ignored else self._arrived, None
        self._ignored = False
        while self._arrival_handles:
            self._arrival_handles.popitem()[1].remove()
        passes = [ready[number] for number in sorted(ready)]
        for record in passes:
            if isinstance(record.result, Exception):
                raise record.result
        return passes, arrived

    @staticmethod
    def check_inputs(passes: Sequence[Pass]) -> None:
        """Refuse inputs that are no longer what they were when the backward came by."""
        for use in [use for record in passes for uses in record.reached.values() for use in uses.values()]:
            if any(leaf._version != version for leaf, version in use.versions):
                raise GradientError(
                    f"an input of {use.path or 'the model'!r} that was changed in place after the backward",
                    expected="an unchanged batch until order.step() returns",
                    remedy="Call order.step() before reusing the batch's buffer.",
                )

    def passes_waiting(self) -> int:
        """How many forwards a backward has reached since the last step()."""
        return len(self._ready)

    def drop(self, size: int | None = None) -> bool:
        """Forget what waits: all of it, or the last forward's if it was of ``size`` examples. Does anything still?"""
        self._backwards.forget()
        self.divert(None)  # an interrupt may have fallen on the very line that ends it
        dropped = [one for one in self._ready.values() if size is None or (one.number, one.size) == (self._count, size)]
        for one in dropped:
            del self._ready[one.number]
            one.forget()
        if dropped:
            self._arrived = None  # which part of it came from which pass is not known
        return bool(self._ready)


def _in_torch_func() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
