"""The way out that a refusal names is one: it is taken here, and leads out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import Setting, check
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ordain import GraB
from ordain.errors import OrdainError, UnsupportedModuleError

N, BATCH = 8, 4
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))


class TwoPrecisions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).double())  # type: ignore[no-any-return]


class Centred(nn.Module):
    """Mixes the examples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return out - out.mean(dim=0)  # type: ignore[no-any-return]


class Branching(nn.Module):
    """Looks at its numbers, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2.0 if float(x.sum()) > 1e9 else 1.0)  # type: ignore[no-any-return]


def plain_loss(model: nn.Module, x: Tensor, order: GraB) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def train(model: nn.Module, loss: Callable[[Any, Tensor, GraB], Tensor] = plain_loss, **options: Any) -> None:
    order = GraB(model, N, **options)
    try:
        for _ in range(2):
            drawn = list(order.sampler)
            for at in range(0, N, BATCH):
                loss(model, X[drawn[at : at + BATCH]], order).backward()
                order.step()
    finally:
        order.detach()


CASES: list[tuple[Callable[[], nn.Module], str]] = [
    (TwoPrecisions, "exact"),
    (Centred, "exact"),
    (Centred, "func"),
    (Branching, "func"),
    (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), "func"),
]


@pytest.mark.parametrize(("build", "gradients"), CASES)
def test_the_way_out_that_is_named_leads_out(build: Any, gradients: str) -> None:
    with pytest.raises(OrdainError) as caught:
        train(build(), gradients=gradients)
    message = str(caught.value)
    named = set(re.findall(r"gradients='(\w+)'", message))
    assert named == {"microbatch"}, message
    train(build(), gradients="microbatch", group=BATCH)
    if "Leave gradients= out" in message:
        train(build())


def test_parameters_of_two_precisions_by_torch_func() -> None:
    train(TwoPrecisions(), gradients="func")


class Checkpointed(nn.Module):
    """In its second layer, and for a parameter of its own."""

    def __init__(self, *, reentrant: bool, own: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(2)) if own else None

    def inner(self, x: Tensor) -> Tensor:
        return self.second(x) if self.scale is None else self.scale * self.second(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("own", [False, True])
def test_reentrant_checkpoints_are_called_that(own: bool) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"reentrant checkpointing.*Pass use_reentrant=False") as caught:
        train(Checkpointed(reentrant=True, own=own))
    assert ("and leave the parameter out with params=lambda name: name != 'scale'" in str(caught.value)) == own
    train(Checkpointed(reentrant=False, own=own), params=lambda name: name != "scale")


class Selective(nn.Module):
    """A checkpoint that keeps products, or (``mended``) nothing, and a layer after it."""

    def __init__(self, *, mended: bool = False) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), nn.Linear(3, 2)
        keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        self.options = {} if mended else {"context_fn": keep}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=False, **self.options))  # type: ignore


@pytest.mark.parametrize(
    ("mended", "options"),
    [(True, {}), (False, {"params": "head"}), (False, {"group": BATCH, "gradients": "microbatch"})],
)
def test_selective_checkpoints_are_called_that(mended: bool, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"selective checkpoint.*params='head'.*gradients='microbatch'"):
        train(Selective())
    train(Selective(mended=mended), **options)


class Recursive(nn.Module):
    """Applies itself to its own output, or (``mended``) a method."""

    def __init__(self, *, mended: bool = False) -> None:
        super().__init__()
        self.layer, self.mended = nn.Linear(4, 4), mended

    def block(self, x: Tensor, depth: int = 2) -> Tensor:
        inner = self.block if self.mended else self
        return inner(self.layer(x).tanh(), depth - 1) if depth else x

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return self.block(x, depth)


@pytest.mark.parametrize("gradients", ["exact", "func", "microbatch"])
def test_a_forward_that_calls_its_own_model_is_called_that(gradients: str) -> None:
    group = BATCH if gradients == "microbatch" else 1
    with pytest.raises(UnsupportedModuleError, match=r"forward calls the model itself.*self\.block"):
        train(Recursive(), gradients=gradients, group=group)
    train(Recursive(mended=True), gradients=gradients, group=group)


def test_a_forward_that_was_interrupted_is_no_call_of_itself() -> None:
    """Torch calls no hook after a KeyboardInterrupt: nothing says that the first forward has ended."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    order, interrupts = GraB(model, N), [True]

    def interrupt(*_: Any) -> None:
        if interrupts and interrupts.pop():
            raise KeyboardInterrupt

    model[1].register_forward_hook(interrupt)
    drawn = list(order.sampler)
    with pytest.raises(KeyboardInterrupt):
        model(X[drawn[:BATCH]])
    model.eval()
    model(X)
    model.train()
    for at in range(0, N, BATCH):
        model(X[drawn[at : at + BATCH]]).square().mean().backward()
        order.step()
    order.detach()


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.square().sum(dim=1).mean()


def with_penalty(model: nn.Module, x: Tensor, order: GraB) -> Tensor:
    return plain_loss(model, x, order) + penalised(model, x)


def with_ignored_penalty(model: nn.Module, x: Tensor, order: GraB) -> Tensor:
    loss = plain_loss(model, x, order)
    with order.ignore():
        return loss + penalised(model, x)


def test_gradient_penalties_are_called_that() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))

    with pytest.raises(UnsupportedModuleError, match=r"create_graph=True.*order\.ignore\(\).*docs/orders\.md"):
        train(model(), with_penalty)
    train(model(), with_ignored_penalty)


class Bags(nn.Module):
    """Two ids an example, as one row of ids or (``offsets``) with where each example's begin, beside other features."""

    def __init__(self, *, offsets: bool) -> None:
        super().__init__()
        self.offsets = offsets
        self.bag, self.layer = nn.EmbeddingBag(7, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        bags = self.bag(ids.flatten(), offsets) if self.offsets else self.bag(ids)
        return self.layer(x) + bags  # type: ignore[no-any-return]


@pytest.mark.parametrize("offsets", [True, False])
def test_bags_with_offsets_are_called_that(offsets: bool) -> None:
    def loss(model: nn.Module, x: Tensor, order: GraB) -> Tensor:
        ids = torch.arange(2 * BATCH).reshape(BATCH, 2) % 7
        begin = torch.arange(0, 2 * BATCH, 2)
        return model(x, ids.flatten() if offsets else ids, begin).square().mean()  # type: ignore[no-any-return]

    if offsets:
        with pytest.raises(UnsupportedModuleError, match=r"offsets of an EmbeddingBag.*one tensor \[B, N\]"):
            train(Bags(offsets=True), loss)
    else:
        train(Bags(offsets=False), loss)


class Tempered(nn.Module):
    """Returns a temperature: the parameter, what is computed from it, or (``each``) one for each example."""

    def __init__(self, *, each: bool = False, computed: bool = False) -> None:
        super().__init__()
        self.each, self.computed = each, computed
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.scale.exp() if self.computed else self.scale
        return self.layer(x), scale * torch.ones(len(x), dtype=x.dtype) if self.each else scale


@pytest.mark.parametrize("computed", [False, True])
def test_a_parameter_among_the_outputs_is_called_that(computed: bool) -> None:
    def loss(model: nn.Module, x: Tensor, order: GraB) -> Tensor:
        out, scale = model(x)
        return (out * (scale[:, None] if scale.ndim else scale)).square().mean()  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedModuleError, match=r"'scale' among the outputs.*scale \* torch\.ones\(len\(x\)\)"):
        train(Tempered(computed=computed), loss)
    train(Tempered(each=True, computed=computed), loss)
    check(Setting("", lambda: Tempered(each=True, computed=computed), lambda b: (torch.randn(b, 4),)), 5, "mean")


class Ragged(nn.Module):
    """Sequences of several lengths, as a nested tensor or (``padded``) filled up."""

    def __init__(self, *, padded: bool) -> None:
        super().__init__()
        self.layer, self.padded = nn.Linear(1, 2), padded

    def forward(self, x: Tensor) -> Tensor:
        rows = [row[: 1 + int((row > 0).sum()), None] for row in x]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
        if self.padded:
            mask = torch.nested.to_padded_tensor(torch.ones_like(nested), 0.0)
            return (self.layer(torch.nested.to_padded_tensor(nested, 0.0)) * mask).sum(dim=1)  # type: ignore
        return torch.stack([row.sum(dim=0) for row in self.layer(nested).unbind()])


def test_nested_tensors_are_called_that() -> None:
    with pytest.raises(UnsupportedModuleError, match=r"'layer\.weight'.*nested tensors.*to_padded_tensor"):
        train(Ragged(padded=False))
    train(Ragged(padded=True))


class Picked(nn.Module):
    """A layer on some of the numbers of each example, or (``mended``) on all, of which the loss takes some."""

    def __init__(self, *, mended: bool) -> None:
        super().__init__()
        self.inner, self.last, self.mended = nn.Linear(1, 3), nn.Linear(3, 2), mended

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x[:, :, None]).tanh()
        return self.last(inner if self.mended else inner[x > 0])  # type: ignore[no-any-return]


def test_a_layer_on_picked_positions() -> None:
    def loss(model: nn.Module, x: Tensor, order: GraB) -> Tensor:
        out = model(x)
        return (out[x > 0] if out.ndim == 3 else out).square().sum() / len(x)

    with pytest.raises(UnsupportedModuleError, match=r"told apart at 'last'.*all positions.*startswith\('last\.'\)"):
        train(Picked(mended=False), loss)
    train(Picked(mended=False), loss, params=lambda name: not name.startswith("last."))
    train(Picked(mended=True), loss)


class Clip(torch.autograd.Function):
    """The gradient that it passes on is of norm 1 at most, which parts of it taken by themselves are too."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / grad.norm()


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * Clip.apply(self.scale))  # type: ignore


def test_a_gradient_that_the_examples_do_not_add_up_to_is_called_that() -> None:
    message = (
        r"'scale', whose per-example gradients could not be determined.*nor does the graph explain it.*name != 'scale'"
    )
    with pytest.raises(UnsupportedModuleError, match=message):
        train(Clipped())
    train(Clipped(), params=lambda name: name != "scale")


@pytest.mark.parametrize("change", [lambda g: g.clamp(-0.01, 0.01), lambda g: 3 * g, lambda g: g / g.norm()])
def test_a_hook_that_changes_a_gradient_is_called_that(change: Callable[[Tensor], Tensor]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))

    def accumulated(p: Tensor) -> None:
        p.grad = change(p.grad)  # type: ignore[arg-type]

    hooked = model()
    hooked[0].weight.register_hook(change)
    with pytest.raises(UnsupportedModuleError, match=r"'0\.weight' with a hook \(register_hook\).*name != '0\.weight'"):
        train(hooked)
    train(hooked, params=lambda name: name != "0.weight")
    mended = model()
    mended[0].weight.register_post_accumulate_grad_hook(accumulated)
    train(mended)
    watching = model()
    for p in watching.parameters():
        p.register_hook(lambda grad: None)
    train(watching)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_for_some_parameters_is_called_that(frozen: bool) -> None:
    """In turn for the two layers of a model, by inputs= or by freezing."""
    model, turns = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), itertools.cycle([True, False])

    def loss(model: Any, x: Tensor, order: GraB) -> Any:
        first = next(turns)
        if frozen:
            model[0].requires_grad_(first), model[2].requires_grad_(not first)
            return plain_loss(model, x, order)
        found = plain_loss(model, x, order)
        inputs = list((model[0] if first else model[2]).parameters())
        return SimpleNamespace(backward=lambda: found.backward(inputs=inputs))  # type: ignore[no-untyped-call]

    if frozen:
        train(model, loss)
    else:
        with pytest.raises(UnsupportedModuleError, match=r"'2\.weight'.*without inputs=.*requires_grad_\(False\)"):
            train(model, loss)
