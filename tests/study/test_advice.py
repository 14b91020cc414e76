"""The advice: known cases, the rule on made-up pilots, and the check against records."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from study.study_records import write_run
from torch import nn
from typer.testing import CliRunner

from ordain.study.advice import CANNOT_TELL, DO_NOT, USE, Pilot, advise, noise_share, run_pilot
from ordain.study.claims import write_claims
from ordain.study.claims.advice_check import FILE, checked, outcomes, read_pilots, run_pilots
from ordain.study.cli import app
from ordain.study.runs.config import Decay, RunConfig
from ordain.study.tasks import LoadedTask
from ordain.study.tasks.task import seeded

GOOD = Pilot(start=2.0, rr=(1.0, 1.1), ordered=(0.9, 0.95), noise=0.2, similarity=0.9, cost=1.1)


def problem(x: torch.Tensor, y: torch.Tensor) -> LoadedTask:
    return LoadedTask(
        train_x=x,
        train_y=y,
        valid_x=x,
        valid_y=y,
        test_x=x,
        test_y=y,
        build=seeded(lambda: nn.Linear(x.shape[1], 2)),
        forward=nn.Module.__call__,
        loss=nn.functional.cross_entropy,
    )


def config(lr: float, decay: Decay = "constant", *, batch_size: int = 8) -> RunConfig:
    return RunConfig(
        task="digits",
        arms=("rr",),
        rates=(lr,),
        seeds=(0,),
        epochs=100,
        batch_size=batch_size,
        momentum=0.9,
        weight_decay=0.0,
        decay=decay,
    )


@pytest.fixture(scope="module")
def noisy() -> LoadedTask:
    """Two classes that overlap: the gradients of examples differ much, also at the minimum."""
    random = torch.Generator().manual_seed(0)
    y = torch.arange(1600) % 2
    x = torch.randn(1600, 10, generator=random)
    x[:, 0] += y * 1.5
    return problem(x, y)


def test_a_high_constant_rate_on_logistic_regression_is_worth_ordering(noisy: LoadedTask) -> None:
    pilot = run_pilot(noisy, config(0.08))
    assert pilot.noise > 0.05
    assert sum(pilot.ordered) < sum(pilot.rr)
    assert advise(pilot).verdict == USE
    assert advise(pilot).setting.startswith('Herding(model, n, params="head"')


@pytest.mark.parametrize(("lr", "decay"), [(0.002, "constant"), (0.05, "cosine")])
def test_a_small_or_decaying_rate_leaves_little_to_gain(noisy: LoadedTask, lr: float, decay: Decay) -> None:
    pilot = run_pilot(noisy, config(lr, decay))
    assert pilot.noise < 0.01
    found = advise(pilot)
    assert found.verdict == DO_NOT
    assert not found.setting


def test_equal_examples_have_no_noise() -> None:
    same = problem(torch.ones(400, 3), torch.zeros(400, dtype=torch.int64))
    pilot = run_pilot(same, config(0.1))
    assert pilot.noise == pytest.approx(0, abs=1e-6)
    assert pilot.rr == pytest.approx(pilot.ordered)
    assert pilot.similarity == pytest.approx(1, abs=1e-5)
    assert advise(pilot).verdict == DO_NOT


def test_noise_is_that_of_a_quadratic() -> None:
    """Weights w_k = c + e_k near the minimum c of 1 + w^2: the noise is the mean of e_k^2 in expectation."""
    random = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(2000):
        e = 0.5 * torch.randn(2, generator=random, dtype=torch.float64)
        losses = (1 + e**2).tolist()
        shares.append(noise_share(losses, float(1 + e.mean() ** 2)) * sum(losses) / 2)
    assert sum(shares) / len(shares) == pytest.approx(0.25, rel=0.1)
    assert noise_share([1.0, 1.0], 1.5) == 0  # a barrier between two minima
    assert noise_share([math.nan, 1.0], 1.0) == 0


def test_the_rule() -> None:
    assert advise(GOOD).verdict == USE
    assert "10 % more epochs" in advise(GOOD).reason
    assert "learn=" not in advise(GOOD).setting
    assert "learn=Every(3, after=2)" in advise(replace(GOOD, cost=2.0)).setting
    assert advise(replace(GOOD, ordered=(1.0, 1.095))).verdict == DO_NOT
    assert advise(replace(GOOD, ordered=(1.01, 0.9))).verdict == CANNOT_TELL  # not with every seed
    assert advise(replace(GOOD, start=1.06)).verdict == CANNOT_TELL  # training has hardly begun
    assert advise(replace(GOOD, ordered=(math.nan, 0.9))).verdict == DO_NOT
    assert "lower the rate" in advise(replace(GOOD, rr=(math.inf, 1.0))).reason


def test_a_rate_at_which_training_diverges(noisy: LoadedTask) -> None:
    pilot = run_pilot(replace(noisy, train_x=noisy.train_x * 1e20), config(1e19), steps=20)
    assert advise(pilot).verdict == DO_NOT


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """At rate 1 GraB ends well below RR; at rate 0.1 nothing has happened yet."""
    wanted = asdict(config(1.0)) | {"arms": ["rr", "grab"], "rates": [1.0, 0.1], "seeds": [0, 1, 2, 3, 4], "epochs": 3}
    write_run(tmp_path / "run", {"rr": 1.0, "grab": 2.0}, rates=(1.0,), config=wanted)
    write_run(tmp_path / "run", {"rr": 1.0, "grab": 1.0}, rates=(0.1,), config=wanted)
    return tmp_path


def test_hits_and_misses_are_counted(runs: Path) -> None:
    found = {outcome.config.rates[0]: outcome for outcome in outcomes(runs)}
    assert found[1.0].paid
    assert not found[0.1].paid
    bad = replace(GOOD, ordered=GOOD.rr)
    keys = [found[rate].key for rate in (1.0, 0.1)]
    assert keys == ["digits 1 8 constant sgd", "digits 0.1 8 constant sgd"]
    every = list(found.values())
    for said, hits in (((GOOD, bad), 2), ((GOOD, GOOD), 1), ((bad, GOOD), 0)):
        headline, table = checked(every, dict(zip(keys, said, strict=True)))
        assert headline == f"The advice was right in {hits} of 2 settings."
        assert [row[2] for row in table.rows].count("hit") == hits
    headline, table = checked(every, {keys[0]: replace(GOOD, start=1.06)})
    assert headline == "The advice was right in 0 of 0 settings; in 1 more it could not tell."
    assert [row[2] for row in table.rows] == ["no advice"]


def test_the_command_checks_a_folder_of_runs_and_keeps_its_pilots(runs: Path) -> None:
    keys = [outcome.key for outcome in outcomes(runs)]
    kept = {key: asdict(replace(GOOD, rr=(math.inf, 1.0))) for key in keys}
    (runs / FILE).write_text(json.dumps({"pilots": kept}))
    result = CliRunner().invoke(app, ["advise", str(runs)])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if not line.startswith("pilots")]
    assert lines[0] == "The advice was right in 1 of 2 settings."
    assert read_pilots(runs).pilots[keys[0]].rr[0] == math.inf
    assert read_pilots(runs).commands == ()  # none was run
    text = (write_claims(runs) and runs / "README.md").read_text()
    assert text.index(lines[0]) < text.index("| run: digits 1 8 constant sgd | do not use it | miss |")


def test_pilots_are_kept_with_what_ran_them(runs: Path) -> None:
    counts: list[tuple[int, int]] = []
    ran = run_pilots(runs, runs, verify=True, command="ordain advise runs", report=lambda *of: counts.append(of))
    assert counts == [(1, 2), (2, 2)]
    assert read_pilots(runs) == ran
    assert set(ran.pilots) == {outcome.key for outcome in outcomes(runs)}
    (made,) = ran.commands
    assert (made.command, set(made.machine)) == ("ordain advise runs", {"platform", "cpu", "logical_cpus"})
    assert "torch" in made.versions
    again = run_pilots(runs, runs, verify=True, command="again", report=lambda done, total: None)
    assert again == ran


def test_the_command() -> None:
    result = CliRunner().invoke(app, ["advise", "digits", "--limit", "300", "--lr", "1", "--steps", "5"])
    assert result.exit_code == 0, result.output
    first, *rest = [line for line in result.output.splitlines() if not line.startswith("pilot")]
    assert first.startswith(("Use it: ", "Do not use it: ", "Cannot tell: "))
    assert any("sampling noise" in line for line in rest)
    assert "heuristic" in result.output


@pytest.mark.parametrize(
    ("words", "said"), [(["nothing"], "the task 'nothing'"), (["digits", "--lr", "-1"], "rates above 0")]
)
def test_wrong_input(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["advise", *words])
    assert result.exit_code == 2
    assert said in result.output
