"""The pilot: a few short epochs with random reshuffling and with herding by the head; and what it recommends.

A heuristic: what it got right and wrong is in the results.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import process_time

from torch import nn
from torch.optim.swa_utils import AveragedModel

from ordain.study.runs.arms import BASELINE, build_order, parse
from ordain.study.runs.config import RunConfig
from ordain.study.runs.loop import epoch_of_steps, evaluate, has_finite_weights, make_decay, make_optimizer, may_diverge
from ordain.study.runs.probe import per_example_gradients, stale_fresh
from ordain.study.tasks import LoadedTask

ORDER = "herding-head"
STEPS, EPOCHS, SEEDS = 200, 3, 2
_STALE = 256  # examples whose gradients are compared between epochs
_MEMORY = 2 * 2**30
USE, DO_NOT, CANNOT_TELL = "use it", "do not use it", "cannot tell"
WORTH = 0.01  # the least gain, as a share of the training loss
_BEGUN = 0.02  # the least fall of RR's loss, as a share, that shows that training has begun
_CHEAP = 1.5  # above this cost, learn in every third epoch only
_SETTING = 'Herding(model, n, params="head", sketch=1024'


@dataclass(frozen=True)
class Pilot:
    """What was measured. Losses are training losses on the pilot's examples.

    Attributes:
        start: the loss before training.
        rr: the last losses of random reshuffling, by seed; not finite if training diverged.
        ordered: the same in the order that herding finds.
        noise: the share of RR's last loss that vanishes where the weights of all seeds are averaged: sampling noise.
        similarity: mean cosine similarity of an example's gradient (by the last linear layer) in consecutive epochs.
        cost: processor time of an epoch with ordering, over one without.
    """

    start: float
    rr: tuple[float, ...]
    ordered: tuple[float, ...]
    noise: float
    similarity: float | None
    cost: float


@dataclass(frozen=True)
class _Trained:
    model: nn.Module
    loss: float
    seconds: float  # the fastest epoch after the first, in which code is compiled
    similarity: float | None


def run_pilot(
    problem: LoadedTask,
    config: RunConfig,
    *,
    steps: int = STEPS,
    seeds: int = SEEDS,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Pilot:
    """Train at the first of ``config.rates`` for ``EPOCHS`` epochs of at most ``steps`` steps, with both orders.

    A decay of the rate is shortened to these epochs.
    """
    n = min(len(problem.train_x), steps * config.batch_size)
    problem = replace(problem, train_x=problem.train_x[:n], train_y=problem.train_y[:n])
    config = replace(config, epochs=EPOCHS)
    found: dict[str, list[_Trained]] = {BASELINE: [], ORDER: []}
    for seed in range(seeds):  # in turn, so that other load on the machine affects both alike
        for place, (arm, trained) in enumerate(found.items()):
            trained.append(_train(problem, config, arm, seed))
            report(2 * seed + place + 1, 2 * seeds)
    rr, ordered = found[BASELINE], found[ORDER]
    losses = tuple(one.loss for one in rr)
    middle = _loss(problem, _averaged([one.model for one in rr]))
    similar = [one.similarity for one in rr if one.similarity is not None]
    return Pilot(
        start=_loss(problem, problem.build(0)),
        rr=losses,
        ordered=tuple(one.loss for one in ordered),
        noise=noise_share(losses, middle),
        similarity=sum(similar) / len(similar) if similar else None,
        cost=min(one.seconds for one in ordered) / max(1e-9, min(one.seconds for one in rr)),
    )


def noise_share(losses: Sequence[float], middle: float) -> float:
    """The share of the losses that is noise, given the loss at the mean of their weights.

    Near a minimum the loss is a quadratic: the mean of k weights keeps 1/k of their noise. 0 where averaging does not
    help, as between two minima.

    >>> round(noise_share([1.0, 1.2], 1.0), 3)
    0.182
    """
    mean, k = sum(losses) / len(losses), len(losses)
    if not math.isfinite(mean) or k < 2 or mean <= 0:
        return 0.0
    return min(1.0, max(0.0, k / (k - 1) * (mean - middle) / mean))


def _train(problem: LoadedTask, config: RunConfig, arm: str, seed: int) -> _Trained:
    n, model = len(problem.train_x), problem.build(0).train()
    order = build_order(parse(arm), model, n, seed=seed, memory_limit=_MEMORY)
    optimizer = make_optimizer(model, config, config.rates[0])
    decay = make_decay(optimizer, config, n)
    few = replace(problem, train_x=problem.train_x[:_STALE], train_y=problem.train_y[:_STALE])
    times, before, similarity = [], None, None
    for epoch in range(EPOCHS):
        start = process_time()
        stepped = decay.step if decay else lambda: None
        with may_diverge(model):
            epoch_of_steps(problem, config, model, optimizer, order, defaultdict(float), seed=epoch, stepped=stepped)
        times.append(process_time() - start)
        if not has_finite_weights(model):
            break
        if arm == BASELINE:
            now = per_example_gradients(few, model, params="head")
            similarity, before = None if before is None else stale_fresh(before, now), now
    order.detach()
    return _Trained(model, _loss(problem, model), min(times[1:] or times), similarity)


def _loss(problem: LoadedTask, model: nn.Module) -> float:
    return evaluate(problem, model, problem.train_x, problem.train_y).loss


def _averaged(models: Sequence[nn.Module]) -> nn.Module:
    """A model whose weights, and statistics of normalisation, are the means over ``models``."""
    average = AveragedModel(models[0], use_buffers=True)
    for model in models:
        average.update_parameters(model)
    found: nn.Module = average.module
    return found


@dataclass(frozen=True)
class Advice:
    """A verdict, the reason in one sentence, and the order to use (empty unless the verdict is to use it)."""

    verdict: str  # USE, DO_NOT or CANNOT_TELL
    reason: str
    setting: str = ""


def gain(pilot: Pilot) -> float:
    """By how much the order's loss was lower than RR's, as a share of RR's: mean over seeds."""
    return 1 - sum(pilot.ordered) / sum(pilot.rr)


def advise(pilot: Pilot) -> Advice:
    """What to do, given a pilot."""
    if not all(map(math.isfinite, pilot.rr)):
        return Advice(DO_NOT, "training with random reshuffling diverged: lower the rate first.")
    if not all(map(math.isfinite, pilot.ordered)):
        return Advice(DO_NOT, "training diverged with the order, but not with random reshuffling.")
    fall = 1 - sum(pilot.rr) / len(pilot.rr) / pilot.start if pilot.start > 0 else 0.0
    if fall < _BEGUN:
        return Advice(
            CANNOT_TELL,
            f"in these steps the training loss fell by only {100 * fall:.1f} %; try again with more --steps.",
        )
    found = gain(pilot)
    said = f"the training loss ended {100 * abs(found):.1f} % {'lower' if found >= 0 else 'higher'} than RR's"
    if found < WORTH:
        noise = f"of it, {100 * pilot.noise:.1f} % is sampling noise, which an order can remove"
        return Advice(DO_NOT, f"{said}; {noise}." if pilot.noise < WORTH else f"{said}, and a gain of 1 % is needed.")
    if any(ours >= theirs for ours, theirs in zip(pilot.ordered, pilot.rr, strict=True)):
        return Advice(CANNOT_TELL, f"{said}, but not with every seed; try again with more --seeds.")
    more = "" if pilot.cost <= _CHEAP else ", learn=Every(3, after=2)"
    extra = 100 * max(0.0, pilot.cost - 1)
    weigh = f"it pays unless {extra:.0f} % more epochs of RR gain as much" if extra >= 1 else "at no measurable cost"
    return Advice(USE, f"{said}, with every seed; {weigh}.", f"{_SETTING}{more})")
