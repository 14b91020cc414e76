"""Ordering by sketches instead of gradients: how much worse the orders are, and what a step costs.

Quality: GraB over the gradients of the digits task at one set of weights (five epochs of SGD), ten epochs, the herding
objective (l2) of the order it ends with. Cost: as in ``step``, beside the same steps under random reshuffling.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import torch

from benchmarks.step import CASES, ROUNDS, job
from benchmarks.timing import interleaved, median_ratio
from ordain import GraB, RandomReshuffling, herding
from ordain.study.runs.probe import per_example_gradients
from ordain.study.tasks import TASKS, LoadedTask

LENGTHS = (16, 64, 256, 512)  # of 650 numbers
EPOCHS, SEEDS, BATCH = 10, 5, 32
TIMED = ("logistic", "mlp", "lenet", "bert")


def trained(problem: LoadedTask) -> torch.nn.Module:
    model = problem.build(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for rows in torch.randperm(len(problem.train_x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            problem.loss(model(problem.train_x[rows]), problem.train_y[rows]).backward()
            optimizer.step()
    return model


def objective(problem: LoadedTask, model: torch.nn.Module, z: np.ndarray, **options: object) -> float:
    """Of the order after ``EPOCHS`` epochs at these weights."""
    order = GraB(model, len(z), **options)
    for _ in range(EPOCHS):
        for rows in torch.tensor(list(order.sampler)).split(BATCH):
            model.zero_grad()
            problem.loss(model(problem.train_x[rows]), problem.train_y[rows]).backward()
            order.step()
    last = list(order.sampler)
    order.detach()
    return herding.herding_objective(z, last, norm=2)


def quality() -> dict[str, float]:
    problem = TASKS["digits"].load(Path("data"))
    model = trained(problem)
    z = per_example_gradients(problem, model).numpy()
    shuffled = [herding.herding_objective(z, np.random.default_rng(s).permutation(len(z)), norm=2) for s in range(20)]
    print(f"  digits, {len(z):,} gradients of {z.shape[1]} numbers: a random order {statistics.mean(shuffled):.2f}")
    results = {}
    for centering in ("mean", "pair"):
        found = {
            k: statistics.mean(
                objective(problem, model, z, sketch=k, centering=centering, seed=seed) for seed in range(SEEDS)
            )
            for k in (None, *LENGTHS)
        }
        said = ", ".join(f"k={k} {found[k]:.2f}" for k in LENGTHS)
        print(f"  {centering}: exact {found[None]:.2f}; {said}")
        results |= {f"quality, {centering}, k={k}": found[k] / found[None] for k in LENGTHS}
        results[f"quality, {centering}, random"] = statistics.mean(shuffled) / found[None]
    return results


def cost() -> dict[str, float]:
    results = {}
    for name in TIMED:
        jobs = {"rr": job(CASES[name], lambda model, n: RandomReshuffling(n))}
        for centering in ("mean", "pair"):
            for k in (None, 256, 4096):
                jobs[f"{centering}, {f'k={k}' if k else 'exact'}"] = job(
                    CASES[name], lambda model, n, c=centering, k=k: GraB(model, n, centering=c, sketch=k)
                )
        seconds = interleaved(jobs, rounds=ROUNDS)
        ratios = {what: median_ratio(seconds[what], seconds["rr"]) for what in jobs if what != "rr"}
        print(f"  {name}: " + "; ".join(f"{what} {ratio:.2f}x" for what, ratio in ratios.items()))
        results |= {f"cost, {name}, {what}": ratio for what, ratio in ratios.items()}
    return results


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    return quality() | cost()
