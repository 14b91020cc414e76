"""Exact per-example gradients out of an ordinary backward: hooks keep what each layer saw.

The model is not wrapped. Each module that owns a trainable parameter gets a forward hook, which keeps
the call's inputs and asks to be told the gradient that arrives at its outputs. A call belongs to the
forward pass of the whole model that it happened in; a pass becomes a batch when a backward reaches it.

Two checks stand between a model this does not understand and a wrong order: which dimension counts the
examples is found out, not guessed (``layout.py``), and the first gradients must add up to those that
autograd gives to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ordain.errors import StepError, UnsupportedModuleError
from ordain.gradients.base import Gradients
from ordain.gradients.factored import Factored
from ordain.gradients.forms import Biased, Form, total
from ordain.gradients.layout import Layout, examples_in
from ordain.gradients.params import check_reduction, choose
from ordain.gradients.rules import Use, Watch, rule_for, watch_for
from ordain.gradients.rules.fallback import fallback
from ordain.gradients.rules.mixing import mixing_modules, refuse_mixing

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
        self._layout = Layout(model, batch_dim)
        self._rerunning = False  # a forward of our own is not the user's
        self._mixing = mixing_modules(model)
        self._count = 0
        self._pass: _Pass | None = None  # the forward that is running
        self._ready: dict[int, _Pass] = {}  # those that a backward has reached
        self._watching: dict[nn.Module, AbstractContextManager[Any]] = {}  # around the forwards that are running
        self._extras: dict[nn.Module, Any] = {}  # what those contexts gave
        self._understood: set[tuple[tuple[str, int], ...]] = set()  # what has been checked, by the calls made
        self._left: dict[Tensor, Tensor | None] = {}  # the p.grad that the backward left
        self._arrived: dict[Tensor, Tensor] | None = {}  # what autograd gave the parameters; None: not asked for
        self._like = torch.empty(0, dtype=self._dtype, device=next(iter(self._offsets)).device)
        self._paths = {
            module: path
            for path, module in model.named_modules()
            # A rule that watches its module may answer for submodules that are never called.
            if any(p in self._offsets for p in module.parameters(recurse=watch_for(module) is not None))
        }
        self._rules = {module: rule_for(module) or fallback for module in self._paths}
        self._handles: list[Any] = [model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)]
        for module in self._paths:
            watch = watch_for(module)
            if watch is not None:
                start = partial(self._start, watch)
                self._handles.append(module.register_forward_pre_hook(start, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._stop, always_call=True))
            self._handles.append(module.register_forward_hook(self._watch, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._end, always_call=True))
        self._arrival_handles: list[Any] = []
        self._leave_handles = [p.register_post_accumulate_grad_hook(self._leave) for p in self._offsets]  # type: ignore[no-untyped-call]
        self._ask()

    def detach(self) -> None:
        for handle in (*self._handles, *self._arrival_handles, *self._leave_handles):
            handle.remove()
        self._handles, self._arrival_handles, self._leave_handles = [], [], []
        self._ready.clear()
        self._pass = None

    def forget_sums(self) -> None:
        """Nobody will ask a batch for its sum: spare the hooks that remember what a backward left in ``p.grad``."""
        for handle in self._leave_handles:
            handle.remove()
        self._leave_handles = []

    def _ask(self) -> None:
        """Have autograd say what it gives each parameter, until the next batch has been compared with it."""
        self._arrived = {}
        self._arrival_handles = [p.register_hook(partial(self._arrive, p)) for p in self._offsets]  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactSource:
        """A copy of the model (a moving average, say) takes the hooks along: they go on to watch this one only."""
        return self

    # --- during a forward -------------------------------------------------------------------------

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model is not self._model:
            return
        self._pass = None
        self._extras.clear()
        if self._rerunning or not torch.is_grad_enabled() or not model.training:
            return
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
        if not self._rerunning and model is self._model:
            self._pass = None
            if output is None:  # the forward raised
                self._layout.failed()

    def _start(self, watch: Watch, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._pass is not None:
            context = watch(module, self._paths[module], args, kwargs)
            self._extras[module] = context.__enter__()
            self._watching[module] = context

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self._watching:
            self._watching.pop(module).__exit__(None, None, None)

    def _watch(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        record = self._pass
        if record is None:
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
        # With one example this may be the very tensor that becomes a parameter's gradient and is changed there.
        grad = grad.detach().clone() if record.size == 1 else grad.detach()
        uses = record.reached.setdefault(module, {})
        if call not in uses:
            use.grads = {}  # not what an earlier backward through this graph brought, which has been collected
            uses[call] = use
        use.grads[leaf] = use.grads[leaf] + grad if leaf in use.grads else grad
        self._ready[record.number] = record

    def _leave(self, p: Tensor) -> None:
        self._left[p] = p.grad

    def _arrive(self, p: Tensor, grad: Tensor) -> None:
        if self._arrived is not None:
            self._arrived[p] = self._arrived[p] + grad if p in self._arrived else grad.detach().clone()

    # --- after it ---------------------------------------------------------------------------------

    def collect(self) -> list[Gradients]:
        ready, self._ready = self._ready, {}
        arrived, self._arrived = self._arrived, None
        for handle in self._arrival_handles:
            handle.remove()
        self._arrival_handles = []
        passes = [ready[number] for number in sorted(ready)]
        grads = self._whole_grads() if len(passes) == 1 else None
        self._left = {}
        self._rerunning = True  # a rule may run its module again
        try:
            batches = [self._factored(one, grads) for one in passes]
        finally:
            self._rerunning = False
        calls = {tuple(sorted((self._paths[m], len(uses)) for m, uses in one.reached.items())) for one in passes}
        if not calls <= self._understood:
            if arrived is None:
                self._ask()  # something new
            else:
                self._check(batches, arrived)
                self._understood |= calls
        for one in passes:
            one.reached = {}  # its graph may live on for another backward
        return list(batches)

    def _factored(self, record: _Pass, grads: list[tuple[int, Tensor]] | None) -> Factored:
        forms: dict[Tensor, list[Form]] = {}
        for module, uses in record.reached.items():
            rule = self._rules[module]
            made = rule(module, [uses[call] for call in sorted(uses)] if len(uses) > 1 else list(uses.values()))
            for name, form in made.items():
                p = module._parameters.get(name)
                p = module.get_parameter(name) if p is None else p
                if p in self._offsets:
                    forms.setdefault(p, []).append(form)
        placed = [(self._offsets[p][0], total(several)) for p, several in forms.items()]
        scale = float(record.size) if self._mean else 1.0
        if grads is not None:
            sparse = {offset for offset, form in placed if form.sparse}
            grads = [one for one in grads if one[0] not in sparse]
        return Factored(join_biases(placed), dim=self.dim, size=record.size, scale=scale, like=self._like, grads=grads)

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

    def _check(self, batches: list[Factored], arrived: dict[Tensor, Tensor]) -> None:
        """Per-example gradients must add up to what autograd gave each parameter."""
        explained = torch.zeros(1, self.dim, dtype=self._dtype, device=self._like.device)
        for batch in batches:
            ones = torch.full((1, batch.size), 1.0 / batch.scale, dtype=batch.dtype, device=batch.device)
            batch.weighted_sum(ones, out=explained)
        # A gradient that is zero but for rounding (a bias before a normalization, the bias of attention's
        # keys) has no digits to compare: it need only be small beside the whole.
        whole = float(explained.norm())
        for p, (offset, name) in self._offsets.items():
            mine = explained[0, offset : offset + p.numel()]
            theirs = arrived[p].reshape(-1).to(mine) if p in arrived else torch.zeros_like(mine)
            apart = float((mine - theirs).norm())
            tolerance = 1e-6 if p.dtype == torch.float64 else 1e-3 if p.dtype == torch.float32 else 5e-2
            if apart > tolerance * max(float(theirs.norm()), float(mine.norm()), 1e-2 * whole, 1e-12):
                raise UnsupportedModuleError(
                    f"parameter {name!r} with a gradient that the calls of its module do not explain",
                    expected="every parameter to be used by calling the module that owns it",
                    remedy=f"Leave it out with params=lambda name: name != {name!r}, or take gradients='func'.",
                )


def join_biases(placed: list[tuple[int, Form]]) -> list[tuple[int, Form]]:
    """Join each weight's form with that of the bias right behind it, where that saves work."""
    joined: list[tuple[int, Form]] = []
    for offset, form in sorted(placed, key=lambda one: one[0]):
        if joined and joined[-1][0] + joined[-1][1].numel == offset:
            both = Biased.join(joined[-1][1], form)
            if both is not None:
                joined[-1] = (joined[-1][0], both)
                continue
        joined.append((offset, form))
    return joined


def _repeated(tensor: Tensor, axis: int, size: int) -> Tensor:
    return tensor.expand(*(size if i == axis else -1 for i in range(tensor.ndim)))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
