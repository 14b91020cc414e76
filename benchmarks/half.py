"""How many signs half precision changes: ``python -m benchmarks half``.

A model trains in float32. At every step the same weights also give gradients in bfloat16: under autocast, and from a
model whose weights are rounded to bfloat16 as well. All three are balanced from the same sums, those of float32, so
that a sign that differs is due to the rounding of this batch and to nothing before it.

Rows that ``Herding`` stores are also rounded: how much worse the herded order of the exact rows becomes, and how long
ten rounds take if every round converts the rows that it reads.
"""

from __future__ import annotations

import copy
import statistics
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.sketch import trained
from benchmarks.step import loss_of
from benchmarks.timing import interleaved, median_ratio
from ordain import Deterministic, herding
from ordain.balancing import BalanceState, balance
from ordain.gradients import ExactSource, Gradients
from ordain.study.runs.probe import per_example_gradients
from ordain.study.tasks import TASKS
from ordain.study.tasks.images import lenet

N, SIZE, EPOCHS = 1024, 32, 3
MODELS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
        (784,),
    ),
    "lenet": (lenet, (3, 32, 32)),
}


class Precision:
    """A copy of the model that computes in its own precision."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, autocast: bool) -> None:
        self._model = copy.deepcopy(model).to(dtype)
        self._dtype, self._autocast = dtype, autocast
        self._source = ExactSource(self._model)

    def gradients(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Gradients:
        self._model.load_state_dict(weights)
        self._model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._autocast):
            output = self._model(x.to(self._dtype))
        loss_of(output.float(), y).backward()
        (batch,) = self._source.collect()
        return batch.gradients


def flips(name: str, *, paired: bool) -> dict[str, float]:
    """The share of signs, after the first epoch, that differ from float32's."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    y = torch.randint(0, 10, (N,))
    x = torch.randn(10, *shape)[y] + 2.0 * torch.randn(N, *shape)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    full = Precision(model, torch.float32, autocast=False)
    others = {
        "autocast": Precision(model, torch.float32, autocast=True),
        "bfloat16": Precision(model, torch.bfloat16, autocast=False),
    }
    state = BalanceState(Deterministic(), paired=paired, count=N // 2 if paired else N, seed=0)
    differ: dict[str, list[float]] = {kind: [] for kind in others}
    for epoch in range(EPOCHS):
        for rows in torch.randperm(N).split(SIZE):
            slots, weights = np.arange(len(rows)), model.state_dict()
            before = copy.deepcopy(state)
            signs = balance(state, full.gradients(weights, x[rows], y[rows]), slots).places
            for kind, precision in others.items():
                rounded = precision.gradients(weights, x[rows], y[rows])
                found = balance(copy.deepcopy(before), rounded, slots).places
                if epoch:  # the first has no mean, and s begins at zero
                    differ[kind].append(float(np.mean(found != signs)))
            optimizer.zero_grad()
            loss_of(model(x[rows]), y[rows]).backward()
            optimizer.step()
        state.next_pass()
    return {kind: float(np.mean(shares)) for kind, shares in differ.items()}


def stored() -> dict[str, float]:
    """On gradients of the digits task: the objective (l2) of herding rounded rows, over that of herding exact ones."""
    problem = TASKS["digits"].load(Path("data"))
    z = per_example_gradients(problem, trained(problem))
    orders = [torch.randperm(len(z), generator=torch.Generator().manual_seed(seed)) for seed in range(10)]

    def objective(rows: Tensor, order: Tensor) -> float:
        return herding.herding_objective(z, order[herding.herd(rows[order])], norm=2)

    half = z.bfloat16()
    over = [objective(half.float(), order) / objective(z, order) for order in orders]

    def converting() -> None:
        for _ in range(10):
            herding.herd(half.float(), rounds=1)

    seconds = interleaved({"float32": lambda: herding.herd(z, tolerance=0), "bfloat16": converting}, rounds=9)
    slower = median_ratio(seconds["bfloat16"], seconds["float32"])
    print(
        f"  herding of {len(z):,} rows of {z.shape[1]} numbers stored in bfloat16: {statistics.mean(over):.3f} "
        f"({min(over):.3f} to {max(over):.3f}) of float32's objective, ten rounds take {slower:.2f} times as long"
    )
    return {"stored rows, objective": statistics.mean(over)}


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    results = stored()
    for name in MODELS:
        for centering in ("mean", "pair"):
            found = flips(name, paired=centering == "pair")
            results |= {f"{name}, {centering}, {kind}": share for kind, share in found.items()}
            said = ", ".join(f"{kind} {share:.2%}" for kind, share in found.items())
            print(f"  {name}, {centering}: signs that differ from float32's: {said}")
    return results
