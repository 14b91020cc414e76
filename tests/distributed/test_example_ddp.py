"""The example of data-parallel training, stopped and taken up again."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from launched import launched
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from ordain import GraB

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_mnist.py"
BATCH, RATE = 64, 0.01  # the example's own
LINE = re.compile(r"epoch (\d): loss (\d\.\d+), the order sent ([\d,]+) bytes a step")


def ran(folder: Path, *words: str) -> list[str]:
    options = ["--data-dir", folder / "no-data", "--checkpoint", folder / "run.pt"]
    ended = launched(EXAMPLE, *options, *words, ranks=2)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def one_process(epochs: int) -> list[float]:
    """What two ranks do: 1,797 examples, and the epoch's first once more so that both have as many."""
    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    torch.manual_seed(0)
    model = nn.Linear(x.shape[1], 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    order = GraB(model, len(x))
    losses = []
    for _ in range(epochs):
        drawn, total = list(order.sampler), 0.0
        for start in range(0, len(drawn), BATCH):
            rows = drawn[start : start + BATCH]
            twin = copy.deepcopy(model)  # the order sees each example once
            cross_entropy(model(x[rows]), y[rows]).backward()
            order.step()
            if len(rows) < BATCH:
                rows.append(drawn[0])
            loss = cross_entropy(twin(x[rows]), y[rows])
            grads = torch.autograd.grad(loss, list(twin.parameters()))
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(rows)
        losses.append(total / (len(x) + 1))
    return losses


def test_two_processes_and_resume(tmp_path: Path) -> None:
    first = ran(tmp_path, "--epochs", "1")
    rest = ran(tmp_path, "--epochs", "2", "--resume")
    assert first[0] == rest[0] == "digits: 1,797 examples, 2 ranks, 64 examples a step"
    told = [LINE.fullmatch(line) for line in (*first[1:], *rest[1:])]
    assert [match and match[1] for match in told] == ["1", "2"]
    assert [match and float(match[2]) for match in told] == pytest.approx(one_process(2), rel=1e-4)
    assert all(match and int(match[3].replace(",", "")) > 0 for match in told)
