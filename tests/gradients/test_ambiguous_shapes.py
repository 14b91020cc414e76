"""Models whose shapes do not say which dimension is the batch, or say it only later: equal to the loop all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ordain.errors import GradientError, OrdainWarning, UnsupportedModuleError
from ordain.gradients import ExactSource

B = T = 6


class Model(nn.Module):
    """A forward as a function of the module and its input."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleDict(layers), forward

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.layers, *inputs)


def compare(
    model: nn.Module, batches: list[Any], losses: Callable[[Any], Tensor], *, only: str = "", **options: Any
) -> None:
    """Rows against the gradient of each example's own loss, on the forward of a twin; ``only`` of these parameters."""
    model = model.double()
    source = ExactSource(model, **options)
    parameters = list(model.parameters())
    for inputs in batches:
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        twin = copy.deepcopy(model)
        each = losses(twin(*inputs))
        wanted = []
        for one in each:
            own = [p for name, p in twin.named_parameters() if name.startswith(only)]
            grads = torch.autograd.grad(one, own, retain_graph=True, allow_unused=True, materialize_grads=True)
            wanted.append(torch.cat([g.reshape(-1) for g in grads]))
        losses(model(*inputs)).mean().backward()
        ((batch, size),) = source.collect()
        assert size == len(each)
        rows = batch.rows()
        if torch.isfinite(rows).all():  # else set aside
            torch.testing.assert_close(rows, torch.stack(wanted), rtol=1e-7, atol=1e-12)
        with torch.no_grad():
            for p in parameters:
                p -= 0.1 * p.grad if p.grad is not None else 0.0
        model.zero_grad()


def numbers(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def by_example(out: Tensor) -> Tensor:
    return out.sin().reshape(len(out), -1).sum(1)


def steps_first(layers: Any, x: Tensor) -> Tensor:
    return layers["o"](layers["e"](x.transpose(0, 1)).tanh())  # type: ignore[no-any-return]


def interleaved(layers: Any, x: Tensor) -> Tensor:
    size, steps, _ = x.shape
    h = layers["e"](x.transpose(0, 1).reshape(steps * size, -1)).tanh()
    return layers["o"](h).view(steps, size, -1).transpose(0, 1)  # type: ignore[no-any-return]


def test_as_many_classes_as_examples_behind_steps_first() -> None:
    model = Model(lambda layers, x: layers["o"](layers["r"](x)[0][-1]), r=nn.LSTM(4, 5), o=nn.Linear(5, B))
    compare(model, numbers(*[(3, B, 4)] * 8), by_example, batch_dim=1)


def test_steps_first_inside_as_many_as_examples() -> None:
    model = Model(steps_first, e=nn.Linear(4, 5), o=nn.Linear(5, 3))
    compare(model, numbers(*[(B, T, 4)] * 8), lambda out: by_example(out.transpose(0, 1)))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("params", ["head", "layers.o"])
def test_a_part_of_a_model_that_returns_steps_first(params: str, flat: bool) -> None:
    """As many steps as examples: their dimension is shown by some of the examples alone."""

    def forward(layers: Any, x: Tensor) -> Tensor:
        hidden = layers["r"](x.transpose(0, 1))[0]
        return layers["o"](hidden.flatten(0, 1) if flat else hidden)  # type: ignore[no-any-return]

    def losses(out: Tensor) -> Tensor:
        return by_example(out.view(T, -1, 3).transpose(0, 1))

    model = Model(forward, r=nn.LSTM(4, 5), o=nn.Linear(5, 3))
    compare(model, numbers(*[(B, T, 4)] * 6, (2, T, 4)), losses, only="layers.o", params=params)


@pytest.mark.parametrize("scalar", [False, True])
def test_positions_and_examples_in_one_dimension_and_as_many_classes(scalar: bool) -> None:
    def forward(layers: Any, x: Tensor) -> Tensor:
        out = interleaved(layers, x).flatten(0, 1)
        return out.sin().sum(1).view(len(x), -1).sum(1).mean() * len(x) if scalar else out

    def losses(out: Tensor) -> Tensor:
        return out.expand(1) if scalar else by_example(out.view(-1, 3 * B))

    model = Model(forward, e=nn.Linear(4, 5), o=nn.Linear(5, B))
    if not scalar:
        compare(model, numbers(*[(B, 3, 4)] * 8), losses)
        return
    # Only the loss comes out: its parts are those of a twin that returns the outputs.
    twin = copy.deepcopy(model).double()
    twin.function = interleaved
    model = model.double()
    source = ExactSource(model, loss_reduction="sum")
    for x in numbers(*[(B, 3, 4)] * 8):
        model(x).backward()
        ((batch, _),) = source.collect()
        each = by_example(twin(x))
        wanted = [torch.autograd.grad(one, list(twin.parameters()), retain_graph=True) for one in each]
        torch.testing.assert_close(batch.rows(), torch.stack([torch.cat([g.reshape(-1) for g in w]) for w in wanted]))


@dataclass
class Found:
    y: Tensor


@pytest.mark.parametrize("wrap", [Found, lambda y: torch.distributions.Normal(y, 1.0, validate_args=False)])
def test_outputs_in_objects(wrap: Callable[[Tensor], Any]) -> None:
    model = Model(lambda layers, x: wrap(interleaved(layers, x)), e=nn.Linear(4, 5), o=nn.Linear(5, 2))
    compare(
        model,
        numbers(*[(B, 3, 4)] * 6, (5, 3, 4)),
        lambda out: by_example(getattr(out, "y", getattr(out, "loc", None))),
    )


def test_an_output_that_is_kept_aside_is_refused() -> None:
    class Keeps(Model):
        aside: Tensor

        def forward(self, x: Tensor) -> Any:
            self.aside = interleaved(self.layers, x)
            return self.layers["main"](x.mean(1))

    model = Keeps(interleaved, e=nn.Linear(4, 5), o=nn.Linear(5, 2), main=nn.Linear(4, 2)).double()
    source = ExactSource(model)
    (x,) = numbers((B, 3, 4))
    out = model(x)
    (by_example(out) + by_example(model.aside)).mean().backward()
    with pytest.raises(UnsupportedModuleError, match="Return everything that the loss"):
        source.collect()


def test_one_step_at_first_and_several_later() -> None:
    model = Model(interleaved, e=nn.Linear(4, 5), o=nn.Linear(5, 2))
    compare(model, numbers(*[(B, 1, 4)] * 7, *[(B, 3, 4)] * 3), by_example)


def test_a_head_without_a_gradient_for_a_long_time() -> None:
    def forward(layers: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return layers["main"](x.mean(1)), interleaved(layers, x) * weight

    model = Model(forward, e=nn.Linear(4, 5), o=nn.Linear(5, 7), main=nn.Linear(4, 2))
    weights = [torch.zeros(()).double()] * 45 + [torch.ones(()).double()] * 4
    batches = list(zip(numbers(*[(B, 3, 4)] * 49), weights, strict=True))
    with pytest.warns(OrdainWarning, match="next pass is inspected"):
        compare(model, batches, lambda out: by_example(out[0]) + by_example(out[1]))


def test_examples_that_a_list_puts_in_another_order_later() -> None:
    def forward(layers: Any, x: Tensor, order: list[int]) -> Tensor:
        rows = layers["o"](layers["e"](pad_sequence([x[i] for i in order], batch_first=True)).tanh().sum(1))
        return torch.stack([rows[order.index(i)] for i in range(len(order))])

    model = Model(forward, e=nn.Linear(4, 5), o=nn.Linear(5, 2))
    orders = [list(range(B))] * 6 + [[3, 1, 0, 2, 5, 4]] * 4
    compare(model, list(zip(numbers(*[(B, 3, 4)] * 10), orders, strict=True)), by_example)


def test_inputs_of_two_sizes_with_outputs_of_both() -> None:
    model = Model(lambda layers, p, x: (layers["i"](x) @ p.T, layers["i"](p)), i=nn.Linear(5, 5)).double()
    ExactSource(model)
    p, x = numbers((3, 5), (4, 5))
    with pytest.raises(GradientError, match="inputs of 3 and 4 rows"):
        model(p, x)


def test_rows_chosen_by_a_mask() -> None:
    def forward(layers: Any, x: Tensor) -> Tensor:
        z = layers["a"](x)
        go = x[:, 0] > 0
        z[go] = layers["b"](x[go])
        return z  # type: ignore[no-any-return]

    compare(Model(forward, a=nn.Linear(4, 2), b=nn.Linear(4, 2)), numbers(*[(B, 4)] * 8), by_example)


class Remembers(nn.Module):
    """State of every kind, changed in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 3)
        self.slow = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("mu", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))
        self.log: list[int] = []
        self.seen: dict[str, int] = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.mu = 0.9 * self.mu + 0.1 * x.detach().mean(0)
        self.calls.data.add_(1)
        self.slow.data = self.slow.data + 1
        self.log.append(len(x))
        self.seen["calls"] += 1
        return self.f(x)  # type: ignore[no-any-return]


def test_state_of_every_kind_is_put_back() -> None:
    torch.manual_seed(0)
    model = Remembers().double()
    twin = copy.deepcopy(model)
    source = ExactSource(model)
    for x in numbers(*[(B, 4)] * 6):
        for one in (model, twin):
            F.mse_loss(one(x), torch.zeros(B, 3).double()).backward()
        source.collect()
    for name, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert (model.log, model.seen) == (twin.log, twin.seen)


def flat_tagger(layers: Any, x: Tensor) -> Tensor:
    return layers["o"](layers["e"](x).tanh().flatten(0, 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(B, B, B, B), (B + 2, B + 2, B)], ids=["every batch", "the last batch"])
def test_as_many_classes_as_examples_before_a_head(sizes: tuple[int, ...], bias: bool) -> None:
    """Nothing is known of what comes before the head, so no part of the batch is run alone."""

    def losses(out: Tensor) -> Tensor:
        return by_example(out.unflatten(0, (-1, 3)))

    model = Model(flat_tagger, e=nn.Linear(4, 5), o=nn.Linear(5, B, bias=bias)).double()
    twin = copy.deepcopy(model)
    source = ExactSource(model, params="head")
    own = list(twin.layers["o"].parameters())  # type: ignore[union-attr]
    for x in numbers(*((size, 3, 4) for size in sizes)):
        losses(model(x)).mean().backward()
        ((batch, _),) = source.collect()
        each = [torch.autograd.grad(one, own, retain_graph=True) for one in losses(twin(x))]
        wanted = torch.stack([torch.cat([grad.reshape(-1) for grad in one]) for one in each])
        torch.testing.assert_close(batch.rows(), wanted, rtol=1e-7, atol=1e-12)
