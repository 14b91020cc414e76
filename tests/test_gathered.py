"""Batches that wait for each other: the orders, the states and the faults of batches that do not."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from helpers import BALANCERS, reference_rule
from torch import nn

from ordain import GraB, _rng, reference
from ordain.errors import OrdainWarning, StateError
from ordain.gradients import per_example_loop
from ordain.gradients.forms import Biased, Outer

N, SIZE = 41, 7
CENTERINGS = pytest.mark.parametrize("centering", ["mean", "pair"])


def build():
    torch.manual_seed(1)
    layers = [nn.Linear(24, 256), nn.LayerNorm(256), nn.Linear(256, 256, bias=False), nn.Tanh(), nn.Linear(256, 7)]
    return nn.Sequential(*layers).double()


def data(n=N):
    made = torch.Generator().manual_seed(2)
    return torch.randn(n, 24, generator=made, dtype=torch.float64), torch.randint(7, (n,), generator=made)


class Run:
    """Training steps, one batch at a time."""

    def __init__(self, *, n=N, size=SIZE, seed=3, **options):
        self.model, self.n, self.size = build(), n, size
        self.x, self.y = data(n)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.order = GraB(self.model, n, seed=seed, **options)
        self.drawn = []

    def begin(self):
        self.drawn = list(self.order.sampler)

    def batches(self):
        return [self.drawn[at : at + self.size] for at in range(0, len(self.drawn), self.size)]

    def step(self, batch):
        x = self.x[batch].clone()
        nn.functional.cross_entropy(self.model(x), self.y[batch]).backward()
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


def word_for_word(run, twin, *, paired, balancer, epochs):
    """The same training with one gradient at a time."""
    parameters = list(twin.model.parameters())
    d = sum(p.numel() for p in parameters)
    book = (reference.PairGraB if paired else reference.GraB)(run.order.history(0).tolist(), d)
    for epoch in range(epochs):
        book.rule = reference_rule(balancer, N // 2 if paired else N, d)
        u = _rng.uniforms(N, seed=3, stream=epoch)
        for at in range(0, N, SIZE):
            batch = book.sigma[at : at + SIZE]
            x, y = twin.x[batch], twin.y[batch]

            def loss(i, x=x, y=y):
                return nn.functional.cross_entropy(twin.model(x[i : i + 1]), y[i : i + 1])

            for t, row in enumerate(per_example_loop(loss, len(batch), parameters).numpy(), at):
                book.see(row, float(u[t // 2 if paired else t]))
            nn.functional.cross_entropy(twin.model(x), y).backward()
            twin.optimizer.step()
            twin.optimizer.zero_grad()
        yield book.next_order()


@pytest.mark.parametrize("balancer", ["deterministic", "walk"])
@CENTERINGS
def test_orders_are_those_of_one_gradient_at_a_time(centering, balancer):
    run, twin = Run(centering=centering, balancer=BALANCERS[balancer]), Run()
    twin.order.detach()
    wanted = word_for_word(run, twin, paired=centering == "pair", balancer=BALANCERS[balancer], epochs=3)
    run.begin()
    for order in wanted:
        most = 0
        for batch in run.batches():
            run.step(batch)
            most = max(most, run.waiting())
        assert most > 2 * SIZE  # they did wait
        assert run.waiting() == 0  # and at the epoch's end all is known
        run.begin()
        assert run.drawn == order


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


def test_a_pass_that_is_cut_short_learns_what_it_saw():
    """The next draw is the end of the epoch: what waited is learned then, as it would have been in smaller batches."""
    run, single = Run(), Run(size=1)
    run.begin()
    single.begin()
    for batch in run.batches()[:2]:
        nn.functional.cross_entropy(run.model(run.x[batch]), run.y[batch]).backward()
        run.order.step()
        single.order._gathered.takes = lambda batch: False
        for i in batch:
            nn.functional.cross_entropy(single.model(single.x[[i]]), single.y[[i]]).backward()
            single.order.step()
    assert run.waiting() == 2 * SIZE
    assert single.waiting() == 0
    assert list(run.order.sampler) == list(single.order.sampler)


def test_skipped_examples_between_those_that_wait():
    run, single = Run(), Run()
    single.order._gathered.takes = lambda batch: False
    for one in (run, single):
        one.begin()
        for k, batch in enumerate(one.batches()):
            if k == 2:
                one.order.skip(len(batch))
            else:
                one.step(batch)
    assert list(run.order.sampler) == list(single.order.sampler)


def test_what_is_not_finite_is_set_aside_at_once():
    run = Run()
    run.epoch()
    run.begin()
    batches = run.batches()
    run.step(batches[0])
    assert run.waiting()
    nn.functional.cross_entropy(run.model(run.x[batches[1]] * _spoiled(3)), run.y[batches[1]]).backward()
    with pytest.warns(OrdainWarning, match="1 example"):
        run.order.step()
    run.optimizer.zero_grad()
    assert run.order.set_aside == 1
    assert run.waiting() == 0
    for batch in batches[2:]:
        run.step(batch)
    after = list(run.order.sampler)
    assert sorted(after) == list(range(N))


def _spoiled(row):
    factor = torch.ones(SIZE, 1, dtype=torch.float64)
    factor[row] = float("nan")
    return factor


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
