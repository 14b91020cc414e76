"""Every learned order against its word-for-word twin."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers import BALANCERS, build, gradient_field, reference_orders, run

from ordain import Every, FixedOrder, GraB, Greedy, Herding, Schedule, SelfBalancingWalk, Until, reference
from ordain.errors import OrdainWarning, StepError
from ordain.herding import herd


@pytest.mark.parametrize("balancer", BALANCERS)
@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("n", [1, 2, 40, 41])
@pytest.mark.parametrize("batch_size", [1, 2, 7, "n"])
def test_grab_is_the_reference(balancer: str, centering: str, n: int, batch_size: int | str) -> None:
    d, epochs, seed = 6, 4, 3
    field = gradient_field(n, d)
    order = GraB(None, n, centering=centering, balancer=BALANCERS[balancer], seed=seed)
    found = run(order, field, epochs, batch_size=n if batch_size == "n" else int(batch_size))
    wanted = reference_orders(
        field, found[0], d, epochs, paired=centering == "pair", balancer=BALANCERS[balancer], seed=seed
    )
    assert found == wanted


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_other_dtypes_find_orders_as_good(centering: str, dtype: torch.dtype) -> None:
    n, d = 400, 8
    field = gradient_field(n, d)
    z = np.stack([field(i, 0) for i in range(n)])
    order = GraB(None, n, centering=centering)
    orders = run(order, lambda i, epoch: field(i, 0), 8, batch_size=16, dtype=dtype)
    worst = [reference.herding_objective(z, one) for one in orders]
    assert worst[-1] < worst[0] / 4


@pytest.mark.parametrize("group", [2, 3, 8, 50])
@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("batch_size", [1, 4, 5, 41])
def test_units_are_ordered_by_their_mean_gradient(group: int, centering: str, batch_size: int) -> None:
    n, d, epochs = 41, 4, 3
    field = gradient_field(n, d)
    order = GraB(None, n, centering=centering, group=group, seed=5)
    found = run(order, field, epochs, batch_size=batch_size)
    assert found[0] == GraB(None, n, seed=5).history(0).tolist()
    units = [found[0][i : i + group] for i in range(0, n, group)]
    wanted = reference_orders(
        lambda u, epoch: np.mean([field(i, epoch) for i in units[u]], axis=0),
        list(range(len(units))),
        d,
        epochs,
        paired=centering == "pair",
        balancer=BALANCERS["deterministic"],
    )
    assert found == [[i for u in one for i in units[u]] for one in wanted]


@pytest.mark.parametrize("batch_size", [1, 2, 7, 20])
@pytest.mark.parametrize("kind", ["herding", "greedy"])
def test_stored_gradients_are_herded(kind: str, batch_size: int) -> None:
    n, d, epochs = 20, 3, 3
    field = gradient_field(n, d)
    found = run(build(kind, n), field, epochs, batch_size=batch_size)
    routine = reference.greedy if kind == "greedy" else partial(reference.herd, tolerance=0.2)
    for epoch in range(epochs):
        z = np.stack([field(i, epoch) for i in found[epoch]])  # Alg. 2: z_t in visiting order
        assert found[epoch + 1] == [found[epoch][t] for t in routine(z)]


def test_any_routine_can_herd() -> None:
    order = Herding(None, 6, routine=lambda z: torch.argsort(z[:, 0]))
    values = np.random.default_rng(0).normal(size=6)
    found = run(order, lambda i, epoch: values[i : i + 1], 1, batch_size=4)
    assert found[1] == np.argsort(values).tolist()


def test_units_can_be_herded_too() -> None:
    n, group = 11, 3
    field = gradient_field(n, 2)
    found = run(Herding(None, n, group=group), field, 1, batch_size=4)
    units = [found[0][i : i + group] for i in range(0, n, group)]
    z = np.stack([np.mean([field(i, 0) for i in unit], axis=0) for unit in units])
    assert found[1] == [i for u in reference.herd(z, tolerance=0.2) for i in units[u]]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_gradient_that_is_not_finite_changes_no_other(dtype: torch.dtype, group: int) -> None:
    n = 8
    order = Herding(None, n, group=group)
    indices = list(order.sampler)
    rows = torch.randn(n, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[2, 1] = torch.nan
    with pytest.warns(OrdainWarning, match="not finite"):
        order.observe(rows.clone())
    units = rows.view(n // group, group, 3).mean(1)
    known = [unit for unit in range(len(units)) if units[unit].isfinite().all()]
    herded = [known[t] for t in reference.herd(units[known].double().numpy(), tolerance=0.2)]
    half = len(herded) // 2
    wanted = [*herded[:half], 2 // group, *herded[half:]]
    assert list(order.sampler) == [indices[group * unit + i] for unit in wanted for i in range(group)]


def test_an_epoch_after_a_rehearsal_is_resumed_where_it_stopped() -> None:
    n, z = 8, np.random.default_rng(0).normal(size=(8, 2))

    def rehearsed(order: Herding) -> None:
        with order.rehearsal():
            order.observe(z[list(order.sampler)])

    order = Herding(None, n, fresh=True)
    rehearsed(order)
    drawn = list(order.sampler)
    order.observe(z[drawn[:4]], indices=drawn[:4])
    resumed = Herding(None, n, fresh=True)
    resumed.load_state_dict(order.state_dict())
    assert resumed.resume() == 0
    with pytest.raises(StepError, match="in the middle of an epoch that is resumed"):
        rehearsed(resumed)
    assert list(resumed.sampler) == drawn[4:]


def test_fresh_gradients_decide_the_coming_epoch() -> None:
    n = 12
    field = gradient_field(n, 3)
    order = Herding(None, n, fresh=True, tolerance=0.0)
    for epoch in range(3):
        before = order.history(order.epoch).tolist()
        with order.rehearsal():
            for index in order.sampler:
                order.observe(field(index, epoch)[None])
        seen = []
        for index in order.sampler:
            order.observe(np.full((1, 3), 7.0))  # the epoch's own gradients have no say
            seen.append(index)
        assert order.epoch == epoch
        z = np.stack([field(i, epoch) for i in before])
        assert seen == [before[t] for t in herd(z)] == order.history(epoch).tolist()


def test_a_failed_rehearsal_keeps_the_order() -> None:
    order = Greedy(None, 5, fresh=True)
    before = order.history(0).tolist()

    def rehearse() -> None:
        with order.rehearsal():
            for index in order.sampler:
                order.observe(np.full((1, 2), float(index)))
                _ = 1 / (index - 3)

    with pytest.raises(ZeroDivisionError):
        rehearse()
    assert list(order.sampler) == before


def test_one_step_grab_learns_one_epoch() -> None:
    n = 20
    field = gradient_field(n, 4)
    once = run(GraB(None, n, freeze_after=1), field, 4, batch_size=3)
    always = run(GraB(None, n), field, 4, batch_size=3)
    assert once[:2] == always[:2]
    assert once[1] == once[2] == once[3] == once[4] != always[2]


LEARN: dict[str, Schedule] = {
    "every second": Every(2),
    "every third after two": Every(3, after=2),
    "the first two": Until(2),
    "some": lambda epoch: epoch in (1, 4),
    "none": lambda epoch: False,
}


@pytest.mark.parametrize("learn", LEARN)
@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("balancer", ["deterministic", "walk-tight"])
def test_a_learned_epoch_goes_on_from_the_last_learned_one(balancer: str, centering: Any, learn: str) -> None:
    """Epochs between keep the order; the stale mean is that of the last epoch that was learned."""
    n, d, epochs = 21, 4, 7
    field = gradient_field(n, d)
    options: dict[str, Any] = {"balancer": BALANCERS[balancer], "learn": LEARN[learn]}
    order = GraB(None, n, centering=centering, seed=2, **options)
    found = run(order, field, epochs, batch_size=4)
    assert found == reference_orders(field, found[0], d, epochs, paired=centering == "pair", seed=2, **options)
    assert found == [order.history(epoch).tolist() for epoch in range(epochs + 1)]
    changed = [one != other for one, other in pairwise(found)]
    assert changed == [LEARN[learn](epoch) for epoch in range(epochs)]


@pytest.mark.parametrize("learn", LEARN)
def test_stored_gradients_are_herded_after_learned_epochs(learn: str) -> None:
    n, epochs = 12, 6
    field = gradient_field(n, 3)
    order = Herding(None, n, learn=LEARN[learn])
    found = run(order, field, epochs, batch_size=5)
    for epoch in range(epochs):
        z = np.stack([field(i, epoch) for i in found[epoch]])
        herded = [found[epoch][t] for t in reference.herd(z, tolerance=0.2)]
        assert found[epoch + 1] == (herded if LEARN[learn](epoch) else found[epoch])
    assert found == [order.history(epoch).tolist() for epoch in range(epochs + 1)]


def test_history_and_retraining() -> None:
    n = 15
    for name in (
        "grab",
        "grab-pair",
        "grab-1step",
        "grab-lazy",
        "greedy",
        "herding",
        "rr",
        "flipflop",
        "so",
        "replacement",
    ):
        order = build(name, n)
        orders = run(order, gradient_field(n, 4), 5, batch_size=4)
        assert [order.history(epoch).tolist() for epoch in range(6)] == orders, name  # never off by one
        assert order.epoch == 5
    grab = build("grab", n)
    orders = run(grab, gradient_field(n, 4), 3, batch_size=4)
    again = FixedOrder.from_(grab)
    assert [list(again.sampler) for _ in range(3)] == [orders[-1]] * 3
    assert list(FixedOrder.from_(grab, 1).sampler) == orders[1]


def test_the_walk_counts_what_it_could_not_decide() -> None:
    n = 60
    order = GraB(None, n, balancer=SelfBalancingWalk(c=0.2))
    run(order, gradient_field(n, 3), 2, batch_size=5)
    assert order.failures > 0
    assert GraB(None, n, balancer=SelfBalancingWalk()).failures == 0
