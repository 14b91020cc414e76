"""What is said of a model before it trains: how each layer's gradients are found, what is refused, and the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ordain
from ordain import GraB
from ordain.errors import InputError, OrdainWarning, UnsupportedModuleError

N = 8


class Scale(nn.Module):
    """A parameter outside of any layer that has a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), Scale(), nn.Linear(3, 3), nn.Linear(3, 2))


def normalized() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_a_table_with_a_row_for_each_kind_of_module() -> None:
    found = ordain.validate(plain())
    assert [(row.name, row.kind) for row in found.rows] == [
        ("0 and 2 more", "Linear"),
        ("1", "LayerNorm"),
        ("2", "Scale"),
    ]
    assert ["rule" in row.how for row in found.rows] == [True, True, False]
    assert "graph" in found.rows[2].how
    assert not found.problems
    assert str(found).splitlines()[0].split() == ["module", "kind", "gradients"]
    assert len(str(found).splitlines()) == 4


def test_frozen_and_left_out_parameters_are_not_in_it() -> None:
    model = plain()
    model[0].requires_grad_(False)
    found = ordain.validate(model, params=lambda name: not name.startswith("1"))
    assert [row.name for row in found.rows] == ["2", "3 and 1 more"]
    assert [row.kind for row in ordain.validate(nn.Sequential(nn.MultiheadAttention(4, 2))).rows] == [
        "MultiheadAttention"
    ]


@pytest.mark.parametrize("gradients", ["exact", "func"])
def test_batch_norm_in_training_mode_is_a_problem_with_a_way_out(gradients: Any) -> None:
    model = normalized()
    (problem,) = ordain.validate(model, gradients=gradients).problems
    for words in ("BatchNorm1d at '1'", "eval()", "GraB(model, n, group=batch_size, gradients='microbatch')"):
        assert words in problem
    assert problem in str(ordain.validate(model, gradients=gradients))
    with pytest.warns(OrdainWarning, match=r"BatchNorm1d at '1' in training mode.*gradients='microbatch'\)"):
        order = GraB(model, N, gradients=gradients)
    order.detach()
    assert not ordain.validate(model, gradients="microbatch").problems
    GraB(model, N, group=4, gradients="microbatch").detach()
    model[1].eval()
    assert not ordain.validate(model, gradients=gradients).problems
    GraB(model, N, gradients=gradients).detach()


def test_the_way_that_fine_tuning_takes_stays_open() -> None:
    """Warned of at construction, refused by the loop only while the layer is in training mode."""
    model = normalized()
    with pytest.warns(OrdainWarning, match="BatchNorm1d"):
        order = GraB(model, N)
    x = torch.randn(N, 4)
    with pytest.raises(UnsupportedModuleError, match="BatchNorm1d at '1'"):
        model(x)
    model.train()
    model[1].eval()
    drawn = list(order.sampler)
    model(x[drawn]).square().mean().backward()
    order.step()


def test_statistics_over_all_ranks() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normalized())
    (problem,) = ordain.validate(model).problems
    assert "SyncBatchNorm at '1'" in problem


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "scale_grad_by_freq=False": ({"scale_grad_by_freq": True}, ["exact", "func"]),
    "max_norm=None": ({"max_norm": 1.0}, ["exact", "func"]),
    "sparse=False": ({"sparse": True}, ["exact", "func", "microbatch"]),
}


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("remedy", REFUSED)
def test_embeddings_that_are_refused_at_once(remedy: str, kind: Any) -> None:
    options, refused = REFUSED[remedy]
    model = nn.Sequential(kind(7, 4, **options), nn.Linear(4, 2))
    for gradients in ("exact", "func", "microbatch"):
        problems = ordain.validate(model, gradients=gradients).problems
        if gradients not in refused:
            assert not problems
            continue
        assert all(words in problems[0] for words in (f"{kind.__name__} at '0'", remedy, "not name.startswith('0.')"))
        with pytest.raises(UnsupportedModuleError, match=remedy):
            GraB(model, N, gradients=gradients)
    without = {"params": lambda name: not name.startswith("0.")}
    assert not ordain.validate(model, **without).problems
    GraB(model, N, **without).detach()
    model[0].requires_grad_(False)
    GraB(model, N).detach()


def test_an_example_batch_shows_what_is_found() -> None:
    model = plain()
    before = [p.clone() for p in model.parameters()]
    x, state = torch.randn(5, 4), torch.random.get_rng_state()
    found = ordain.validate(nn.Sequential(model, nn.Dropout(0.5)), inputs=x)
    assert not found.problems
    assert [(row.name, row.kind) for row in found.rows][:1] == [("0.0.weight", "[3, 4]")]
    assert len(found.rows) == 9
    how = {row.name: row.how for row in found.rows}
    assert "rule" in how["0.0.weight"]
    assert "graph" in how["0.2.scale"]
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert state.equal(torch.random.get_rng_state())


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        out = self.layer(x) + shift
        return out - out.mean(dim=0)


def test_an_example_batch_shows_what_mixes_examples() -> None:
    x = torch.randn(5, 4)
    assert not ordain.validate(Mixing()).problems
    (problem,) = ordain.validate(Mixing(), inputs={"x": x, "shift": torch.ones(5, 3)}).problems
    assert "examples" in problem
    assert "gradients='microbatch'" in problem
    assert ordain.validate(normalized(), inputs=(x,)).problems
    assert not ordain.validate(normalized().eval(), inputs=(x,)).problems
    assert not ordain.validate(normalized(), gradients="microbatch", inputs=x).problems


def test_a_watched_model_can_be_validated() -> None:
    model = plain()
    order = GraB(model, N)
    x = torch.randn(N, 4)
    assert not ordain.validate(model, inputs=x).problems
    drawn = list(order.sampler)
    model(x[drawn]).square().mean().backward()
    order.step()


def test_what_cannot_be_validated() -> None:
    with pytest.raises(InputError, match="gradients='magic'"):
        ordain.validate(plain(), gradients="magic")
    with pytest.raises(InputError, match="no trainable parameter"):
        ordain.validate(nn.Tanh())
    with pytest.raises(InputError, match="a model of type int"):
        ordain.validate(3)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_that_cannot_be_watched() -> None:
    scripted: Any = torch.jit.script(nn.Linear(4, 2))
    (problem,) = ordain.validate(scripted).problems
    assert "torch.jit" in problem
