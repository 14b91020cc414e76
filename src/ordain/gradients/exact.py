"""Exact per-example gradients out of an ordinary backward: hooks keep what each layer saw.

The model is not wrapped. Each module that owns a trainable parameter gets a forward hook, which keeps
the call's inputs and asks to be told the gradient that arrives at its outputs. A call belongs to the
forward pass of the whole model that it happened in; a pass becomes a batch when a backward reaches it.

Two checks stand between a model this does not understand and a wrong order: which dimension counts the
examples is found out, not guessed (``layout.py``), and the first gradients must add up to those that
autograd gives to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ordain.errors import StateError, StepError
from ordain.gradients.backward import Backwards
from ordain.gradients.base import Gradients
from ordain.gradients.check import check_sums
from ordain.gradients.composed import join_biases, total
from ordain.gradients.factored import Factored
from ordain.gradients.forms import Form
from ordain.gradients.layout import Layout, examples_in
from ordain.gradients.memory import shrinking
from ordain.gradients.params import check_reduction, choose
from ordain.gradients.rules import Use, Watch, rule_for, watch_for
from ordain.gradients.rules.fallback import fallback
from ordain.gradients.rules.mixing import mixing_modules, refuse_mixing
from ordain.gradients.rules.recurrent import cell, recurrent
from ordain.gradients.sharded import Sharded

_TRIES = 32  # batches in which a parameter may have no gradient before that counts as its habit
_MOST_PASSES = 1024  # more than anybody accumulates; a loop that forgot step() must not fill the memory


@dataclass(slots=True)
class _Pass:
    """One forward of the whole model. Only its graph holds it until a backward arrives."""

    number: int
    size: int
    calls: dict[nn.Module, int] = field(default_factory=dict)  # of each module so far
    reached: dict[nn.Module, dict[int, Use]] = field(default_factory=dict)


class ExactSource:
    """Watch ``model`` and give its per-example gradients as forms.

    Args:
        model: called once for each batch.
        params: which trainable parameters to order by, as a test of their names; all by default.
        loss_reduction: how the loss reduces over the examples of a batch, ``"mean"`` or ``"sum"``.
        batch_dim: the dimension of the model's inputs that counts the examples.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Callable[[str], bool] | None = None,
        loss_reduction: str = "mean",
        batch_dim: int = 0,
    ) -> None:
        self._model = model
        self._mean = check_reduction(loss_reduction) == "mean"
        self._batch_dim = batch_dim
        chosen = choose(model, params)
        self._offsets: dict[Tensor, tuple[int, str]] = {}
        self.dim = 0
        for name, p in chosen.items():
            self._offsets[p] = (self.dim, name)
            self.dim += p.numel()
        dtypes = [p.dtype for p in chosen.values()]
        common = torch.float32
        for dtype in dtypes:
            common = torch.promote_types(common, dtype)
        self._dtype = common
        self._others = {p for p in model.parameters() if p not in self._offsets}  # left out, or not trainable at first
        self._first = next(iter(self._offsets))
        self._first_dtype = self._first.dtype
        self._coarse = False  # has anything been computed in less than float32?
        self._tries = 0
        self._layout = Layout(model, batch_dim)
        self._rerunning = False  # a forward of our own is not the user's
        self._mixing = mixing_modules(model)
        self._count = 0
        self._size = 0
        self._pass: _Pass | None = None  # the forward that is running
        self._ready: dict[int, _Pass] = {}  # those that a backward has reached, and come to its end
        self._backwards = Backwards(self._finish)
        self._watching: dict[nn.Module, AbstractContextManager[Any]] = {}  # around the forwards that are running
        self._extras: dict[nn.Module, Any] = {}  # what those contexts gave
        self._understood: set[tuple[Any, ...]] = set()  # what has been checked, by its signature
        self._left: dict[Tensor, Tensor | None] = {}  # the p.grad that the backward left
        self._arrived: dict[Tensor, Tensor] | None = {}  # what autograd gave the parameters; None: not asked for
        self._like = torch.empty(0, dtype=self._dtype, device=self._first.device)
        self._paths = {
            module: path
            for path, module in model.named_modules()
            # A rule that watches its module may answer for submodules that are never called.
            if any(p in self._offsets for p in module.parameters(recurse=watch_for(module) is not None))
        }
        self._rules = {module: rule_for(module) or fallback for module in self._paths}
        self._handles: list[Any] = []
        self._sharded = Sharded(model, self._stand)
        self._sharded.refuse_reading(self._rules, self._paths, (fallback, recurrent, cell))
        self._handles += self._sharded.watch()
        self._handles.append(model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True))
        for module in self._paths:
            watch = watch_for(module)
            if watch is not None:
                start = partial(self._start, watch)
                self._handles.append(module.register_forward_pre_hook(start, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._stop, always_call=True))
            self._handles.append(module.register_forward_hook(self._watch, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._end, always_call=True))
        self._arrival_handles: dict[Tensor, Any] = {}
        self._leave_handles = [p.register_post_accumulate_grad_hook(self._leave) for p in self._offsets]  # type: ignore[no-untyped-call]
        if self._sharded:
            self.forget_sums()  # theirs is a sum over ranks
        self._ask()

    def detach(self) -> None:
        for handle in (*self._handles, *self._arrival_handles.values(), *self._leave_handles):
            handle.remove()
        self._handles, self._arrival_handles, self._leave_handles = [], {}, []
        self._ready.clear()
        self._backwards.forget()
        self._pass = None
        self._leave_contexts()

    def forget_sums(self) -> None:
        """Nobody will ask a batch for its sum: spare the hooks that remember what a backward left in ``p.grad``."""
        for handle in self._leave_handles:
            handle.remove()
        self._leave_handles = []

    def _ask(self) -> None:
        """Have autograd say what it gives each parameter, until the next batch has been compared with it."""
        self._arrived = {}
        for p in self._offsets:
            self._stand(p, p)

    def _stand(self, p: Tensor, whole: Tensor) -> None:
        """``whole`` is what autograd gives the gradient of ``p`` to."""
        if self._arrived is not None and p in self._offsets and p.requires_grad and whole not in self._arrival_handles:
            self._arrival_handles[whole] = whole.register_hook(partial(self._arrive, p))  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactSource:
        """A copy of the model (a moving average, say) takes the hooks along: they go on to watch this one only."""
        return self

    # --- during a forward -------------------------------------------------------------------------

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model is not self._model or self._rerunning or not torch.is_grad_enabled():
            return
        self._pass = None
        self._extras.clear()
        self._leave_contexts()
        if self._backwards.broken():
            # What it gave some of the parameters cannot be told from what whole ones gave: compare another time.
            self._arrived = None if self._ready else self._arrived
            self._backwards.forget()
        if not model.training:
            return
        if self._first.dtype is not self._first_dtype or self._first.device != self._like.device:
            raise StateError(
                f"a model now of {self._first.dtype} on {self._first.device}",
                expected=f"{self._first_dtype} on {self._like.device}, as when the order was made",
                remedy="Move or convert the model first, then make the order.",
            )
        if not self._ready and self._arrived:
            self._arrived = {}  # of backwards that were not watched
        if self._mixing:
            refuse_mixing(self._mixing)
        if len(self._ready) >= _MOST_PASSES:
            raise StepError(
                f"{_MOST_PASSES} backward passes since the last step()",
                expected="order.step() after every backward, or after the few that make one optimizer step",
                remedy="Call order.step(), or order.detach() to stop ordering: what each pass saw is kept until then.",
            )
        size = examples_in(args, kwargs, self._batch_dim)
        if not self._layout.probed:
            self._rerunning = True
            try:
                self._layout.probe(self._paths, args, kwargs, size)
            finally:
                self._rerunning = False
        self._count += 1
        self._pass = _Pass(self._count, size)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._rerunning and model is self._model and torch.is_grad_enabled():
            size = self._pass.size if self._pass is not None else 0
            self._pass = None
            if output is None:  # the forward raised
                self._layout.failed()
            elif size:
                self._layout.compare(output, size)

    def _start(self, watch: Watch, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._pass is not None and module in self._paths:
            context = watch(module, self._paths[module], args, kwargs)
            self._extras[module] = context.__enter__()
            self._watching[module] = context

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self._watching:
            self._watching.pop(module).__exit__(None, None, None)

    def _leave_contexts(self) -> None:
        """Of a forward that was interrupted: torch calls no hook after what is no ``Exception``."""
        while self._watching:
            self._watching.popitem()[1].__exit__(None, None, None)

    def _watch(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        record = self._pass
        # A copy of the model takes the hooks along, and an interrupted forward leaves its pass behind.
        if record is None or not torch.is_grad_enabled() or module not in self._paths:
            return None
        call = record.calls.get(module, 0)
        record.calls[module] = call + 1
        changed = None
        axes = self._layout.axes(module, call, (args, kwargs), output, record.size)
        if isinstance(module, nn.Embedding) and record.size > 1 and axes.get(("in", 0)) is None:
            ids, axis = args[0] if args else kwargs["input"], self._batch_dim
            if ids.ndim > max(axis, 1) and ids.shape[axis] == 1:
                # One row of positions for all examples. As many rows as examples have the same values and
                # bring each example's gradient back by itself.
                args, kwargs = (_repeated(ids, axis, record.size),), {}
                changed = output = _repeated(output, axis, record.size)
                axes = {("in", 0): axis, ("out", 0): axis}
        plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        use = Use(
            self._paths[module],
            record.size,
            (args[0].detach(),) if plain else tree_map(_detached, args),
            {} if plain else tree_map(_detached, kwargs),
            axes=axes,
            extra=self._extras.pop(module, None),
        )
        for leaf, tensor in enumerate((output,) if isinstance(output, Tensor) else tree_leaves(output)):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                # On the node, not on the tensor: what changes the tensor in place later comes after it.
                reach = partial(self._reach, record, module, call, use, leaf, tensor.output_nr)
                tensor.grad_fn.register_prehook(reach)
        return changed

    # --- during a backward ------------------------------------------------------------------------

    def _reach(
        self,
        record: _Pass,
        module: nn.Module,
        call: int,
        use: Use,
        leaf: int,
        number: int,
        grads: tuple[Tensor | None, ...],
    ) -> None:
        grad = grads[number]
        if grad is None:
            return
        self._coarse |= grad.dtype in (torch.float16, torch.bfloat16)
        # With one example this may be the very tensor that becomes a parameter's gradient and is changed there.
        grad = grad.detach().clone() if record.size == 1 else grad.detach()
        brought = self._backwards.here()
        if record.number not in brought:
            brought[record.number] = record
            if record.number not in self._ready:
                record.reached = {}  # an earlier backward may have broken off
        uses = record.reached.setdefault(module, {})
        if call not in uses:
            use.grads = {}  # not what an earlier backward through this graph brought, which has been collected
            uses[call] = use
            use.note_versions()
        use.grads[leaf] = use.grads[leaf] + grad if leaf in use.grads else grad

    def _finish(self, brought: dict[int, _Pass]) -> None:
        self._ready |= brought

    def _leave(self, p: Tensor) -> None:
        self._left[p] = p.grad

    def _arrive(self, p: Tensor, grad: Tensor) -> None:
        if self._arrived is not None:
            self._arrived[p] = self._arrived[p] + grad if p in self._arrived else grad.detach().clone()

    # --- after it ---------------------------------------------------------------------------------

    def collect(self) -> list[Gradients]:
        self._backwards.forget()
        ready, self._ready = self._ready, {}
        arrived, self._arrived = self._arrived, None
        for handle in self._arrival_handles.values():
            handle.remove()
        self._arrival_handles = {}
        passes = [ready[number] for number in sorted(ready)]
        self._size = passes[-1].size if passes else 0  # of the last batch
        grads = self._whole_grads() if len(passes) == 1 and self._left else None
        self._left = {}
        self._rerunning = True  # a rule may run its module again
        try:
            batches = [shrinking(partial(self._factored, one, grads)) for one in passes if one.size]
        finally:
            self._rerunning = False
        self._layout.refuse_mixed()
        calls = {self._signature(one) for one in passes if one.size}
        if not calls <= self._understood:
            # Something new: compare it with what autograd says, or ask it to say so next time.
            self._refuse_new(self._model.parameters())
            self._tries += arrived is not None
            compared = partial(check_sums, batches, arrived or {}, self._offsets, coarse=self._coarse)
            if arrived is not None and (shrinking(compared) or self._tries >= _TRIES):
                self._understood |= calls
                self._tries = 0
            else:
                self._ask()
        for one in passes:
            one.reached = {}  # its graph may live on for another backward
        empty = [Factored([], dim=self.dim, size=0, scale=1.0, like=self._like)]  # of batches without an example
        return [*batches, *(empty if len(batches) < len(passes) else [])]

    def sum_left(self, out: Tensor, ranks: int) -> bool:
        """``out`` ``[d]`` = the sum of the last batch's gradients over all ranks, where p.grad is their average."""
        scale = (self._size if self._mean else 1) * ranks
        for p, (offset, _) in self._offsets.items():
            if p.grad is None or p.grad.is_sparse:
                return False
            torch.mul(p.grad.detach().flatten(), scale, out=out[offset : offset + p.numel()])
        return True

    def drop(self, size: int | None = None) -> bool:
        self._backwards.forget()
        self._rerunning = False  # an interrupt may have fallen on the very line that ends it
        dropped = [one for one in self._ready.values() if size is None or (one.number, one.size) == (self._count, size)]
        for one in dropped:
            del self._ready[one.number]
            one.reached = {}
        if dropped:
            self._arrived, self._left = None, {}  # which part of them was whose is not known
        return bool(self._ready)

    def _signature(self, record: _Pass) -> tuple[Any, ...]:
        """Which modules were called how often, and which parameters were trainable: what a check was made of."""
        calls = sorted((self._paths[module], len(uses)) for module, uses in record.reached.items())
        return (*calls, *(p.requires_grad for p in self._offsets))

    def _factored(self, record: _Pass, grads: list[tuple[int, Tensor]] | None) -> Factored:
        forms: dict[int, list[Form]] = {}  # by offset
        for module, uses in record.reached.items():
            for use in uses.values():
                use.check_versions()
            rule = self._rules[module]
            made = rule(module, [uses[call] for call in sorted(uses)] if len(uses) > 1 else list(uses.values()))
            for name, form in made.items():
                p = _parameter(module, name)
                if p is None:
                    continue
                place = self._offsets.get(self._sharded.part(p) if self._sharded else p)
                if place is None:
                    self._refuse_new([p])
                elif p.requires_grad:
                    forms.setdefault(place[0], []).append(form)
        placed = [(offset, total(several)) for offset, several in forms.items()]
        scale = float(record.size) if self._mean else 1.0
        if grads is not None:
            sparse = {offset for offset, form in placed if form.sparse}
            grads = [one for one in grads if one[0] not in sparse]
        return Factored(join_biases(placed), dim=self.dim, size=record.size, scale=scale, like=self._like, grads=grads)

    def _refuse_new(self, parameters: Iterable[Tensor]) -> None:
        """Parameters that were not there when the order was made have no place in its vectors."""
        known = self._offsets.keys() | self._others
        if any(self._sharded.part(p) not in known for p in parameters):
            raise StateError(
                "a model with parameters that were not there when the order was made",
                expected="the same parameters, frozen or not",
                remedy="Replace layers, and load weights with assign=True, first; then make the order.",
            )

    def _whole_grads(self) -> list[tuple[int, Tensor]] | None:
        """What the backward left in the parameters, if that is this backward's gradient and nothing else.

        Not so if it has been replaced or changed, by this backward (accumulation) or since (clipping, unscaling),
        which a tensor's version counts. What that misses, the batch will see in the sum's square.
        """
        found = []
        for p, grad in self._left.items():
            if (
                grad is None
                or p.grad is not grad
                or grad._version
                or not grad.is_contiguous()
                or grad.dtype != self._dtype
            ):
                return None
            found.append((self._offsets[p][0], grad))
        return found


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """A parameter of the module or of a submodule; None where the name is something else (a parametrization)."""
    found = module._parameters.get(name)
    if found is None and "." in name:
        path, _, last = name.rpartition(".")
        found = module.get_submodule(path)._parameters.get(last)
    return found


def _repeated(tensor: Tensor, axis: int, size: int) -> Tensor:
    return tensor.expand(*(size if i == axis else -1 for i in range(tensor.ndim)))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
