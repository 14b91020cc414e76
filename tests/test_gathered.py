"""Batches that wait for each other: the orders, the states and the faults of batches that do not."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from helpers import BALANCERS
from settings_models import wide
from torch import nn

from ordain import GraB
from ordain.errors import OrdainWarning, StateError
from ordain.gradients.forms import Biased, Outer

N, SIZE = 97, 7  # of 47 rows that there is room for
CENTERINGS = pytest.mark.parametrize("centering", ["mean", "pair"])


def build():
    torch.manual_seed(1)
    return wide().double()


def data():
    made = torch.Generator().manual_seed(2)
    return torch.randn(N, 24, generator=made, dtype=torch.float64), torch.randint(7, (N,), generator=made)


class Run:
    """Training steps, one batch at a time."""

    def __init__(self, *, size=SIZE, gathers=True, **options):
        self.model, self.size = build(), size
        self.x, self.y = data()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.reduction = options.get("loss_reduction", "mean")
        self.order = GraB(self.model, N, seed=3, **options)
        if not gathers:
            self.order._gathered.takes = lambda batch: False
        self.drawn = []

    def begin(self):
        self.drawn = list(self.order.sampler)

    def batches(self):
        return [self.drawn[at : at + self.size] for at in range(0, len(self.drawn), self.size)]

    def backward(self, batch, factor=1.0):
        x = self.x[batch] * factor
        nn.functional.cross_entropy(self.model(x), self.y[batch], reduction=self.reduction).backward()
        return x

    def step(self, batch, factor=1.0):
        x = self.backward(batch, factor)
        self.order.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        x.fill_(1e3)  # the next batch may be read into the same place

    def epoch(self):
        self.begin()
        for batch in self.batches():
            self.step(batch)

    def waiting(self):
        return self.order._gathered.rows


@CENTERINGS
def test_a_state_in_between_goes_on_to_the_last_bit(centering):
    """Saving changes nothing, and what is loaded is where it was: the sums are the same bits, not just the orders."""
    whole = Run(centering=centering)
    whole.epoch()
    whole.begin()
    first, second = whole.batches()[:3], whole.batches()[3:]
    for batch in first:
        whole.step(batch)
    assert whole.waiting()
    file = io.BytesIO()
    torch.save(whole.order.state_dict(), file)
    again = Run(centering=centering)
    again.order.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    again.model.load_state_dict(whole.model.state_dict())
    assert again.order.resume() == 1
    assert again.waiting() == whole.waiting()
    again.drawn = list(again.order.sampler)
    assert again.drawn == [i for batch in second for i in batch]
    for batch in second:
        whole.step(batch)
        again.step(batch)
    for name, vector in whole.order.state_dict()["vectors"].items():
        assert torch.equal(vector, again.order.state_dict()["vectors"][name])
    assert list(whole.order.sampler) == list(again.order.sampler)


@CENTERINGS
def test_a_small_state_lets_what_waits_keep_the_middle(centering):
    run = Run(centering=centering)
    run.begin()
    for batch in run.batches()[:3]:
        run.step(batch)
    state = run.order.state_dict(vectors=False)
    assert "gathered" not in state
    again = Run(centering=centering)
    again.order.load_state_dict(state)
    assert again.order.resume() == 0
    assert again.waiting() == 0
    for batch in run.batches()[3:]:
        again.drawn = list(again.order.sampler) if not again.drawn else again.drawn
        again.step(batch)
    assert sorted(again.order.sampler) == list(range(N))


def alike(train, *, epochs=3, **options):
    """Train with batches that wait and with batches that do not: the same orders. Returns the most rows that waited."""
    runs = Run(**options), Run(gathers=False, **options)
    most = 0
    for _ in range(epochs):
        for run in runs:
            run.begin()
            for k, batch in enumerate(run.batches()):
                train(run, k, batch)
                most = max(most, runs[0].waiting())
        assert runs[1].waiting() == 0
        assert runs[0].drawn == runs[1].drawn
        assert runs[0].order.set_aside == runs[1].order.set_aside
    assert list(runs[0].order.sampler) == list(runs[1].order.sampler)
    assert runs[0].order.failures == runs[1].order.failures
    return most


@CENTERINGS
@pytest.mark.parametrize("balancer", BALANCERS)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_whatever_the_balancer_and_the_loss(centering, balancer, loss_reduction):
    options = {"centering": centering, "balancer": BALANCERS[balancer], "loss_reduction": loss_reduction}
    assert alike(lambda run, k, batch: run.step(batch), **options) == 42


def _cut_short(run, k, batch):
    if k < 2:
        run.step(batch)


def _skipping(run, k, batch):
    run.order.skip(len(batch)) if k in (2, 9) else run.step(batch)


def _last_dropped(run, k, batch):
    if len(batch) == SIZE:
        run.step(batch)
        small = run.order.state_dict(vectors=False)  # at the end of what comes, all signs are given
        assert k != N // SIZE - 1 or int((small["places"].abs() == 1).sum()) >= N - N % SIZE - 1


def _accumulating(run, k, batch):
    run.backward(batch)
    if k % 2 or len(batch) < SIZE:
        run.order.step()
        run.optimizer.step()
        run.optimizer.zero_grad()


def _given(run, k, batch):
    """Some batches' gradients are the user's own, and once they come by name."""
    if k not in (3, 4, 10):
        run.step(batch)
        return
    rows = torch.stack([_row(run, i) for i in batch])
    run.order._source.drop()
    run.order.observe(rows, indices=batch if k == 10 else None)


def _row(run, i):
    run.backward([i])
    row = torch.cat([p.grad.reshape(-1) for p in run.model.parameters()])
    run.optimizer.zero_grad()
    return row


def _thawing(run, k, batch):
    run.model[4].bias.requires_grad_(k not in (2, 3, 8))
    run.step(batch)


def _spoiled(run, k, batch):
    factor = torch.ones(len(batch), 1, dtype=torch.float64)
    factor[3] = float("nan") if k in (4, 5) else 1.0
    if k not in (4, 5):
        run.step(batch, factor)
        return
    run.backward(batch, factor)
    run.order.step()
    run.optimizer.zero_grad()


def _looking(run, k, batch):
    run.model.eval()
    with torch.no_grad():
        run.model(run.x[:3])
    run.model.train()
    run.step(batch)


def _of_other_sizes(run, k, batch):
    if k % 3:
        run.step(batch)
        return
    for part in (batch[:2], batch[2:]):
        run.step(part) if part else None


TRAINED = {
    "cut short": _cut_short,
    "skipping": _skipping,
    "the last batch dropped": _last_dropped,
    "accumulating": _accumulating,
    "given": _given,
    "frozen and thawed": _thawing,
    "looking": _looking,
    "of other sizes": _of_other_sizes,
}


@CENTERINGS
@pytest.mark.parametrize("how", TRAINED)
def test_however_one_trains(how, centering):
    assert alike(TRAINED[how], centering=centering) >= 2 * SIZE


@pytest.mark.filterwarnings("ignore:1 example:ordain.errors.OrdainWarning")
@CENTERINGS
def test_gradients_that_are_not_finite(centering):
    assert alike(_spoiled, centering=centering) >= 2 * SIZE


@pytest.mark.parametrize("context", [lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode])
def test_a_draw_in_a_context_of_its_own(context):
    """The next epoch's first draw learns what waited: with all digits, and into what can be added to."""
    run, single = Run(), Run(gathers=False)
    for one in (run, single):
        one.epoch()
        one.begin()
        for batch in one.batches()[:3]:
            one.step(batch)
        with context():
            one.begin()
        for batch in one.batches():
            one.step(batch)
    assert run.drawn == single.drawn
    assert list(run.order.sampler) == list(single.order.sampler)


def test_steps_under_autocast():
    """A step() inside the block takes its products in float32, as one behind it does."""
    found = []
    for inside in (True, False):
        torch.manual_seed(1)
        model = build().float()
        x, y = (part.float() if part.is_floating_point() else part for part in data())
        order = GraB(model, N)
        for _ in range(2):
            drawn = list(order.sampler)
            for at in range(0, N, 50):  # too many to wait
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    nn.functional.cross_entropy(model(x[drawn[at : at + 50]]), y[drawn[at : at + 50]]).backward()
                    if inside:
                        order.step()
                if not inside:
                    order.step()
        found.append(list(order.sampler))
    assert found[0] == found[1]


def test_parameters_thawed_while_autograd_is_asked():
    run = Run()
    run.begin()
    first, second, third, *_ = run.batches()
    run.step(first)
    one, other = run.model[4].bias, run.model[0].weight
    one.requires_grad_(False)
    other.requires_grad_(False)
    run.step(second)
    one.requires_grad_(True)
    run.step(third)
    assert run.order.state_dict()["taken"] == 3 * SIZE


def test_many_rows():
    """So many that the sums are taken by sign: the order is that of smaller batches, which are taken as they are."""
    torch.manual_seed(0)
    x = torch.randn(300, 40, dtype=torch.float64)
    found = []
    for size, gathers in ((50, True), (20, False)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(40, 600), nn.Tanh(), nn.Linear(600, 600)).double()
        order = GraB(model, 300)
        if not gathers:
            order._gathered.takes = lambda batch: False
        for _ in range(2):
            drawn = list(order.sampler)
            for at in range(0, 300, size):
                (model(x[drawn[at : at + size]]) ** 2).mean(dim=1).mean().backward()
                order.step()
                assert not gathers or order._gathered.rows == (at + size if at + size < 200 else order._gathered.rows)
        found.append(list(order.sampler))
    assert found[0] == found[1]


def test_loading_into_an_order_with_batches_waiting():
    run, other = Run(), Run()
    empty = other.order.state_dict()
    for one, many in ((run, 3), (other, 2)):
        one.begin()
        for batch in one.batches()[:many]:
            one.step(batch)
    state = run.order.state_dict()
    kept = [part.clone() for form in state["gathered"]["forms"] for part in form["parts"]]
    other.order.load_state_dict(state)
    assert other.waiting() == run.waiting() == 3 * SIZE
    other.order.load_state_dict(empty)
    assert other.waiting() == 0
    run.step(run.batches()[3])  # and what was saved stays as it was
    after = [part for form in state["gathered"]["forms"] for part in form["parts"]]
    assert all(torch.equal(one, another) for one, another in zip(kept, after, strict=True))


def test_going_back_to_examples_that_wait():
    """A state that was saved later loads: no slot is in it twice."""
    run = Run()
    run.begin()
    for batch in run.batches()[:3]:
        run.step(batch)
    again = Run()
    again.order.load_state_dict(run.order.state_dict())
    assert again.order.resume(SIZE) == 0
    again.drawn = list(again.order.sampler)
    again.step(again.batches()[0])
    Run().order.load_state_dict(again.order.state_dict())
    for batch in again.batches()[1:]:
        again.step(batch)
    assert sorted(again.order.sampler) == list(range(N))


def test_memory_that_runs_out_as_room_is_made(monkeypatch):
    run, other = Run(), Run()
    other.epoch()
    run.begin()
    empty = np.empty
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return empty(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("ordain.orders.gathered.np.empty", failing)
        run.step(run.batches()[0])
    assert calls
    for batch in run.batches()[1:]:
        run.step(batch)
    assert list(run.order.sampler) == list(other.order.sampler)


def test_what_is_not_finite_is_set_aside_at_once():
    run = Run()
    run.epoch()
    run.begin()
    batches = run.batches()
    run.step(batches[0])
    assert run.waiting()
    factor = torch.ones(SIZE, 1, dtype=torch.float64)
    factor[3] = float("nan")
    run.backward(batches[1], factor)
    with pytest.warns(OrdainWarning, match="1 example"):
        run.order.step()
    run.optimizer.zero_grad()
    assert run.order.set_aside == 1
    assert run.waiting() == 0
    for batch in batches[2:]:
        run.step(batch)
    after = list(run.order.sampler)
    assert sorted(after) == list(range(N))


def test_an_error_while_learning_what_waited_loses_no_example(monkeypatch):
    run = Run()
    run.begin()
    batches = run.batches()
    for batch in batches[:2]:
        run.step(batch)
    rows = run.waiting()
    assert rows == 2 * SIZE
    with monkeypatch.context() as patch:
        patch.setattr(run.order, "_learn", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.order._settle()
    assert run.waiting() == 0
    for batch in batches[2:]:
        run.step(batch)
    after = list(run.order.sampler)
    assert sorted(after) == list(range(N))
    # In the middle, in the order in which they came.
    places = [after.index(i) for batch in batches[:2] for i in batch]
    assert places == list(range(places[0], places[0] + rows))


def _interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def test_memory_that_runs_out_once_is_tried_again(monkeypatch):
    run, other = Run(), Run()
    other.epoch()
    run.begin()
    calls = []
    learn = run.order._learn

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        learn(*args, **kwargs)

    monkeypatch.setattr(run.order, "_learn", failing)
    for batch in run.batches():
        run.step(batch)
    assert len(calls) > 1
    assert list(run.order.sampler) == list(other.order.sampler)


@pytest.mark.parametrize("options", [{"group": 2}, {"sketch": 8}, {"gradients": "func"}])
def test_what_does_not_gather(options):
    run = Run(**options)
    run.begin()
    run.step(run.batches()[0])
    assert run.waiting() == 0


def test_layers_that_a_gram_matrix_costs_more_than_do_not_gather():
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 7))
    order = GraB(model, 40)
    list(order.sampler)
    nn.functional.cross_entropy(model(torch.randn(4, 24)), torch.zeros(4, dtype=torch.int64)).backward()
    order.step()
    assert order._gathered.rows == 0


def _without(state, key):
    return {name: value for name, value in state.items() if name != key}


def _with_forms(state, change):
    forms = [dict(one) for one in state["forms"]]
    change(forms)
    return state | {"forms": forms}


BROKEN = {
    "no dict": lambda s: 3,
    "no slots": lambda s: _without(s, "slots"),
    "slots out of range": lambda s: s | {"slots": s["slots"] + N},
    "slots twice": lambda s: s | {"slots": torch.zeros_like(s["slots"])},
    "fewer slots": lambda s: s | {"slots": s["slots"][:-1]},
    "no scale": lambda s: s | {"scale": float("nan")},
    "another dtype": lambda s: s | {"dtype": 7},
    "no forms": lambda s: s | {"forms": []},
    "an unknown form": lambda s: _with_forms(s, lambda f: f[0].update(kind="os.system")),
    "a part missing": lambda s: _with_forms(s, lambda f: f[0].update(parts=f[0]["parts"][:1])),
    "a part of whole numbers": lambda s: _with_forms(s, lambda f: f[0].update(parts=[p.long() for p in f[0]["parts"]])),
    "a part that is spread": lambda s: _with_forms(
        s, lambda f: f[0].update(parts=[p[:1].expand(len(p), *p.shape[1:]) for p in f[0]["parts"]])
    ),
    "beyond the end": lambda s: _with_forms(s, lambda f: f[-1].update(offset=10**9)),
    "before the start": lambda s: _with_forms(s, lambda f: f[0].update(offset=-1)),
    "one over another": lambda s: _with_forms(s, lambda f: f[1].update(offset=0)),
    "more steps in one factor": lambda s: _with_forms(
        s, lambda f: f[0].update(parts=[f[0]["parts"][0], f[0]["parts"][1].repeat(1, 3, 1)])
    ),
    "two dtypes": lambda s: _with_forms(s, lambda f: f[0].update(parts=[f[0]["parts"][0].float(), f[0]["parts"][1]])),
    "no columns": lambda s: _with_forms(s, lambda f: f[0].update(parts=[p[:, :, :0] for p in f[0]["parts"]])),
    "a part with a history": lambda s: _with_forms(
        s, lambda f: f[0].update(parts=[p.clone().requires_grad_() for p in f[0]["parts"]])
    ),
    "another dtype than the sums'": lambda s: s | {"dtype": 0},
    "more rows than there is room for": lambda s: (
        s
        | {
            "slots": torch.arange(90),
            "forms": [one | {"parts": [p.repeat(5, 1, 1)[:90] for p in one["parts"]]} for one in s["forms"]],
        }
    ),
    "half an offset": lambda s: _with_forms(s, lambda f: f[0].update(offset=0.5)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_state_is_refused_and_changes_nothing(how):
    run = Run()
    run.begin()
    for batch in run.batches()[:3]:
        run.step(batch)
    state = run.order.state_dict()
    again = Run()
    before = again.order.state_dict()
    with pytest.raises(StateError, match="gathered"):
        again.order.load_state_dict(state | {"gathered": BROKEN[how](state["gathered"])})
    after = again.order.state_dict()
    assert before.keys() == after.keys()
    assert again.waiting() == 0
    again.order.load_state_dict(state)
    assert again.waiting() == run.waiting()


@pytest.mark.parametrize("form", [Outer, Biased])
def test_sums_of_many_rows_by_sign(form):
    """Over either sign's rows and in blocks, against the weighted sums of all."""
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.normal(size=(150, 1, width))) for width in (700, 900))
    one = form(a, b)
    for signs in (np.sign(rng.normal(size=150)), np.ones(150), -np.ones(150)):
        each = 2.5 * torch.from_numpy(signs)
        found = [one.view(torch.ones(1, one.numel, dtype=torch.float64)) for _ in range(2)]
        wanted = [part.clone() for part in found]
        one.add_signed(each, 2.5, *found)
        one.add_weighted(each[None], wanted[0])
        one.add_weighted(torch.full((1, 150), 2.5, dtype=torch.float64), wanted[1])
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-9)
