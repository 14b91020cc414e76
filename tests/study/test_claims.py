"""The page of claims: every verdict from records whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from study.study_records import end, epoch, path_of, start, write_config, write_job, write_lines
from typer.testing import CliRunner

from ordain.study import cli
from ordain.study.claims import pays, practice, practice_page
from ordain.study.claims.claims_page import CLAIMS, write_claims
from ordain.study.claims.evidence import FAILS, HOLDS, OPEN, Evidence
from ordain.study.tasks import TASKS
from ordain.study.vectors import run_study

SHIFTS = [0.0, 0.03, -0.02, 0.01, -0.01]  # of a seed, shared by all orders


def write(folder: Path, name: str, finals: dict[str, float], *, seeds: int = 5, noise: float = 0.001) -> Path:
    """A run of four epochs at one rate, each order ending near a value; noise of its own decides what can be told."""
    write_config(folder / name, task=name if name != "granularity" else "mnist")
    for arm, final in finals.items():
        for seed in range(seeds):
            own = noise * float(np.random.default_rng((seed, *arm.encode())).standard_normal())
            losses = [2.3, *(final + SHIFTS[seed] + own + step for step in (0.9, 0.4, 0.1, 0.0))]
            write_job(folder / name, arm, 0.1, seed, losses)
    return folder


def verdicts(folder: Path, *titles: str) -> dict[str, str]:
    """On the claims of these titles, or on all."""
    evidence = Evidence(folder)
    return {claim.title: claim.find(evidence).verdict for claim in CLAIMS if claim.title in titles or not titles}


def found(folder: Path, title: str) -> tuple[str, str]:
    """The verdict on a claim and all that was measured."""
    [finding] = [claim.find(Evidence(folder)) for claim in CLAIMS if claim.title == title]
    return finding.verdict, " ".join(finding.measured)


FASTER = "GraB trains faster: logistic regression on MNIST"
VALIDATES = "GraB validates better: logistic regression on MNIST"
ONE_STEP, RETRAIN = "1-step GraB fails", "Retrain from GraB works on convex tasks only"
ONCE, FLIPFLOP = "Shuffle once is the worst", "FlipFlop is like RR"
FINER, TUNING = "Finer units order better", "No tuning beyond RR's"
GREEDY = "Greedy is comparable in epochs, at over 100 times the memory"


@pytest.mark.parametrize(
    ("grab", "noise", "seeds", "said"),
    [
        (0.45, 0.001, 5, HOLDS),
        (0.55, 0.001, 5, FAILS),
        (0.499, 0.05, 5, OPEN),
        (0.45, 0.001, 4, OPEN),  # as clear, but fewer than five seeds
        (0.5, 0.0, 5, OPEN),
    ],
)
def test_faster(grab: float, noise: float, seeds: int, said: str, tmp_path: Path) -> None:
    write(tmp_path, "mnist", {"rr": 0.5, "grab": grab}, seeds=seeds, noise=noise)
    assert verdicts(tmp_path, FASTER)[FASTER] == verdicts(tmp_path, VALIDATES)[VALIDATES] == said
    verdict, measured = found(tmp_path, FASTER)
    assert verdict == said
    assert f"{seeds} seeds" in measured
    reached = "is not reached" if grab == 0.55 else "is reached after 4"
    assert noise != 0.001 or f"reached by RR after 4 epochs, {reached}" in measured


def test_verdicts_account_for_the_number_of_orders(tmp_path: Path) -> None:
    """GraB's p is 0.005: significant where it is the only order, and inconclusive as one of three."""
    lower = [0.1, 0.05, 0.07, 0.03, 0.08]  # than RR's losses
    for others in ((), ("so", "flipflop")):
        write(tmp_path, "mnist", dict.fromkeys(("rr", *others), 0.5))
        rr = {seed: 0.5 + 0.01 * seed for seed in range(5)}
        for seed, base in rr.items():
            write_job(tmp_path / "mnist", "rr", 0.1, seed, [2.0, 1.0, 0.9, 0.8, base])
            write_job(tmp_path / "mnist", "grab", 0.1, seed, [2.0, 1.0, 0.9, 0.8, base - lower[seed]])
            for arm in others:
                write_job(tmp_path / "mnist", arm, 0.1, seed, [2.0, 1.0, 0.9, 0.8, base + (-1) ** seed * 0.01])
        said = OPEN if others else HOLDS
        assert verdicts(tmp_path, FASTER, VALIDATES) == {FASTER: said, VALIDATES: said}
        measured = found(tmp_path, FASTER)[1]
        assert "p = 0.0055" in measured
        assert ("Holm p = 0.016" in measured) == bool(others)


def test_the_last_epochs_are_told_beside(tmp_path: Path) -> None:
    """RR jumps, and ends below GraB by chance: over its last five epochs it is 0.42 against 0.4."""
    write_config(tmp_path / "mnist")
    for seed in range(5):
        shift = 0.001 * seed
        write_job(tmp_path / "mnist", "rr", 0.1, seed, [2.0, 1.0, 0.39, 0.46, 0.46, 0.4, 0.39 + shift])
        write_job(tmp_path / "mnist", "grab", 0.1, seed, [2.0, 1.0, 0.4, 0.4, 0.4, 0.4, 0.4])
    verdict, measured = found(tmp_path, FASTER)
    assert verdict == FAILS
    assert "Mean over the last 5 epochs: 4.9 % lower than RR's" in measured


def test_overfitting_later_is_not_validating_better(tmp_path: Path) -> None:
    """RR ends far above GraB in validation, after an epoch in which it was as low: one would keep that one."""
    write_config(tmp_path / "mnist")
    for seed in range(5):
        shift = 0.001 * seed
        write_job(tmp_path / "mnist", "rr", 0.1, seed, [2.0, 0.5, 0.4 + shift, 0.8 + shift])
        write_job(tmp_path / "mnist", "grab", 0.1, seed, [2.0, 0.5, 0.4 + 0.001 * (4 - seed), 0.6])
    verdict, measured = found(tmp_path, VALIDATES)
    assert verdict == OPEN
    assert "25 %" in measured  # told all the same
    assert "The lowest validation loss of an epoch" in measured


def test_a_claim_on_all_tasks_needs_them_all(tmp_path: Path) -> None:
    tasks = ("mnist", "cifar10", "wikitext2", "sst2")
    for task in tasks:
        assert verdicts(write(tmp_path, task, {"rr": 0.5, "grab": 0.4, "so": 0.6}), TUNING)[TUNING] == (
            HOLDS if task == tasks[-1] else OPEN
        )
    assert verdicts(tmp_path, ONCE)[ONCE] == HOLDS
    assert "sst2: not run." not in found(tmp_path, ONCE)[1]
    assert "mnist*: final" in found(tmp_path, ONCE)[1]  # the only rate
    for rate, loss in ((0.3, 0.7), (0.03, 0.8)):
        for seed in range(2):
            write_job(tmp_path / "mnist", "rr", rate, seed, [2.3, 1.0, 0.9, 0.8, loss])
    assert "mnist: final" in found(tmp_path, ONCE)[1]
    write(tmp_path, "qnli", {"rr": 0.5, "grab": 0.6, "so": 0.4})
    assert (verdicts(tmp_path, TUNING)[TUNING], verdicts(tmp_path, ONCE)[ONCE]) == (FAILS, FAILS)


def test_alike_is_more_than_no_difference_found(tmp_path: Path) -> None:
    tasks = ("mnist", "cifar10", "wikitext2", "sst2")
    for task in tasks:
        write(tmp_path, task, {"rr": 0.5, "flipflop": 0.5}, noise=0.0005)
    assert verdicts(tmp_path, FLIPFLOP)[FLIPFLOP] == HOLDS
    write(tmp_path, "sst2", {"rr": 0.5, "flipflop": 0.5}, noise=0.05)  # nothing found, and nothing ruled out
    assert verdicts(tmp_path, FLIPFLOP)[FLIPFLOP] == OPEN
    write(tmp_path, "sst2", {"rr": 0.5, "flipflop": 0.497}, noise=0.0001)  # small, and clear
    assert verdicts(tmp_path, FLIPFLOP)[FLIPFLOP] == FAILS


@pytest.mark.parametrize(
    ("mnist", "cifar10", "one_step", "retrain"),
    [
        ((0.5, 0.4), (0.6, 0.5), HOLDS, HOLDS),
        ((0.4, 0.4), (0.6, 0.4), OPEN, OPEN),
        ((0.35, 0.6), (0.5, 0.5), FAILS, FAILS),
    ],
)
def test_fixed_orders(
    mnist: tuple[float, float], cifar10: tuple[float, float], one_step: str, retrain: str, tmp_path: Path
) -> None:
    """(1-step, retrain) on each task; RR ends at 0.5 and GraB at 0.4."""
    for task, (once, again) in (("mnist", mnist), ("cifar10", cifar10)):
        write(tmp_path, task, {"rr": 0.5, "grab": 0.4, "grab-1step": once, "retrain": again})
    assert (verdicts(tmp_path, ONE_STEP)[ONE_STEP], verdicts(tmp_path, RETRAIN)[RETRAIN]) == (one_step, retrain)


@pytest.mark.parametrize(("fine", "said"), [(0.4, HOLDS), (0.45, OPEN), (0.5, FAILS)])
def test_units(fine: float, said: str, tmp_path: Path) -> None:
    write(tmp_path, "granularity", {"rr@1": 0.5, "rr@64": 0.5, "grab@1": fine, "grab@64": 0.45})
    assert verdicts(tmp_path, FINER)[FINER] == said
    assert "against 64's 0.45" in found(tmp_path, FINER)[1]


@pytest.mark.parametrize(
    ("greedy", "times", "said"), [(0.4, 200, HOLDS), (0.4, 99, FAILS), (0.3, 200, FAILS), (0.5, 200, OPEN)]
)
def test_greedy(greedy: float, times: int, said: str, tmp_path: Path) -> None:
    name = "mnist-units-of-64"
    write(tmp_path, name, {"rr": 0.5, "grab": 0.4, "greedy": greedy})
    for seed in range(5):
        path = path_of(tmp_path / name, "greedy", 0.1, seed)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        write_lines(path, [line | ({"order_bytes": 8 * times} if "order_bytes" in line else {}) for line in lines])
    assert verdicts(tmp_path, GREEDY)[GREEDY] == said
    assert f"{times} times" in found(tmp_path, GREEDY)[1]


def test_what_was_not_run_cannot_be_told(tmp_path: Path) -> None:
    write(tmp_path, "digits", {"rr": 0.5, "grab": 0.4})
    said = verdicts(tmp_path)
    known = said.pop("Greedy runs out of memory on the larger tasks")  # from n and d alone
    assert known == HOLDS
    assert set(said.values()) == {OPEN}
    assert "Not run." in found(tmp_path, FASTER)[1]


def test_vector_studies(tmp_path: Path) -> None:
    for name in ("toy-herding", "statement1", "balancing"):
        run_study(name, tmp_path / name, report=lambda done, total: None, quick=True)
    said = verdicts(tmp_path)
    assert said["Balancing and reordering shortens prefix sums (Figure 1b)"] == HOLDS
    assert said["Greedy can be far worse than random (Statement 1)"] == OPEN  # Algorithm 1 as printed is not
    assert said["Algorithm 5 is like Algorithm 6 after ten rounds"] == FAILS
    assert said["The rates' exponents"] == OPEN


@pytest.mark.parametrize(("exponent", "said"), [(-2.0, HOLDS), (-1.0, OPEN), (0.0, OPEN)])
def test_exponents_on_data(exponent: float, said: str, tmp_path: Path) -> None:
    """RR's gaps fall like 1 / n, GraB's as told."""
    run_study("convex", tmp_path / "convex", report=lambda done, total: None, quick=True)
    path = tmp_path / "convex" / "records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["order"] in ("rr", "grab") and "gap" in record:
            gap = record["examples"] ** (exponent if record["order"] == "grab" else -1.0 + 0.01 * record["seed"])
            record["gap"] = [[gap] * 6] * 2
    write_lines(path, records)
    title = "The exponent of n, on regularised logistic regression"
    verdict, measured = found(tmp_path, title)
    assert verdict == said
    assert f"GraB n^({exponent:.2f} ± 0.00) (bound: n^-2)" in measured


def gain_of(tmp_path: Path, ours: list[float], theirs: list[float], **more: Any) -> pays.Gain:
    """GraB's training losses after each epoch against RR's, over two seeds."""
    write_config(tmp_path / "mnist")
    for arm, losses in (("rr", theirs), ("grab", ours)):
        for seed in range(2):
            cost = 3.0 if arm == "grab" else 2.0
            lines = [epoch(at, loss, **({"cpu_seconds": cost * (at > 0)} | more)) for at, loss in enumerate(losses)]
            write_lines(
                path_of(tmp_path / "mnist", arm, 0.1, seed), [start(arm, 0.1, seed), *lines, end(len(losses) - 1)]
            )
    [gain] = pays.gains(Evidence(tmp_path), ["mnist", "absent"])
    return gain


def test_gains_in_epochs_and_seconds(tmp_path: Path) -> None:
    """RR is at its lowest after four epochs and GraB there after two, each half as long again."""
    gain = gain_of(tmp_path, [2.0, 0.5, 0.2, 0.2, 0.19], [2.0, 0.8, 0.5, 0.3, 0.2])
    assert (gain.epochs, gain.best, gain.rate) == ((2.0, 2.0), True, 0.1)
    assert gain.seconds == pytest.approx([8 / 6] * 2)
    assert gain.relative == pytest.approx(-0.05)


def test_gains_that_are_none(tmp_path: Path) -> None:
    never = gain_of(tmp_path / "a", [2.0, 0.5, 0.4], [2.0, 0.5, 0.2])
    assert (never.epochs, never.seconds) == ((0.0, 0.0), (0.0, 0.0))
    near = gain_of(tmp_path / "b", [2.0, 0.5, 0.2001], [2.0, 0.5, 0.2])  # within a thousandth
    assert near.epochs == (1.0, 1.0)
    untimed = gain_of(tmp_path / "c", [2.0, 0.5, 0.2], [2.0, 0.5, 0.2], cpu_seconds=None)
    assert (untimed.epochs, untimed.seconds) == ((1.0, 1.0), ())


def test_reasons(tmp_path: Path) -> None:
    """The trend of a loss that falls evenly is left by nothing; that of one that jumps by half its jumps."""
    for arm, jump in (("rr", 0.1), ("grab", 0.0)):
        losses = [2.0, *(1.0 + jump * (-1) ** at for at in range(6))]
        for lr in (0.1, 0.01):
            for seed in range(5):
                write_job(tmp_path / "mnist", arm, lr, seed, losses)
    write_config(tmp_path / "mnist")
    evidence = Evidence(tmp_path)
    rate, wander = pays.reasons(evidence, ["mnist"], pays.gains(evidence, ["mnist"]))
    assert "0.01: 11 % higher (significant); 0.1 (RR's best): 11 % higher (significant)" in rate  # 1 against 0.9
    assert "by 0.00 % under GraB and 10.00 % under RR" in wander
    assert "lowest of RR's epochs is 10 % lower than the lowest of GraB's" in wander


def test_the_page(tmp_path: Path) -> None:
    write(tmp_path, "mnist", {"rr": 0.5, "grab": 0.4, "so": 0.6})
    evil = "ordain run <script>alert(1)</script>"
    config = json.loads((tmp_path / "mnist" / "config.json").read_text())
    (tmp_path / "mnist" / "config.json").write_text(json.dumps(config | {"command": evil}))
    (tmp_path / "note.md").write_text("All of it was run on a Tuesday.\n")
    (tmp_path / "mnist" / "note.md").write_text("Of the [first](a.png) thousand images.\n")
    result = CliRunner().invoke(cli.app, ["claims", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"- {FASTER}: {HOLDS}" in result.output
    text, page = ((tmp_path / name).read_text() for name in ("README.md", "index.html"))
    for told in ("on a Tuesday", "thousand images", "REDUCED to 900 of 54,000", FASTER):
        assert told in text
        assert told in page
    assert "[first](a.png) thousand" in text
    assert "first thousand" in page
    assert "<script>" not in page
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    counts = {line.replace(r"\|", "").count("|") for line in rows if "**" in line}
    assert counts == {6}  # five cells, whatever was measured
    assert (tmp_path / "when-it-pays.png").read_bytes().startswith(b"\x89PNG")
    before = text
    write_claims(tmp_path)
    assert (tmp_path / "README.md").read_text() == before  # the same records, the same page


def test_no_runs(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["claims", str(tmp_path)])
    assert result.exit_code == 2
    assert "no run" in result.output
    assert list(tmp_path.iterdir()) == []


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tuned() -> list[practice.Point]:
    """The orders of the README: those of full size, as the protocol runs them."""
    problems = {"gpt": ("gpt", "16", "12000"), "sst2": ("sst2", "32", "3000")}
    found = practice.points(ROOT / "results")
    sizes = {task: str(TASKS[task].defaults.batch_size) for task in TASKS}
    return [p for p in found if p.problem == problems.get(p.problem[0], (p.problem[0], sizes[p.problem[0]], "None"))]


def test_the_readme_has_the_numbers_of_the_records(tuned: list[practice.Point]) -> None:
    tasks = {
        "cifar10": "LeNet, CIFAR-10",
        "cifar10-augmented": "the same, with crops and flips",
        "gpt": "character GPT, AdamW",
        "sst2": "small BERT, fine-tuned on SST-2",
        "mnist": "logistic regression, MNIST",
    }
    orders = {
        "rr": "reshuffle",
        "herding-head": '`Herding(model, n, params="head", sketch=1024)`',
        "grab-pair": '`GraB(model, n, centering="pair")`',
        "stratified": "`Stratified(labels)`",
    }
    lines = [line.strip("|") for line in (ROOT / "README.md").read_text().splitlines()]
    table = [[cell.strip() for cell in line.split("|")] for line in lines if line.count("|") == 5][2:]
    assert {row[0] for row in table} == {"", *tasks.values()}
    name, first = "", 0.0
    for row in table:
        name = row[0] or name
        task = next(task for task in tasks if tasks[task] == name)
        arm = next(arm for arm in orders if orders[arm] == row[1])
        mine = [point for point in practice.at_best_schedule(tuned) if point.problem[0] == task]
        (point,) = (point for point in mine if (point.arm, str(point.epochs)) == (arm, row[2]))
        loss, accuracy = (point.values[measure].mean() for measure in ("test", "accuracy"))
        first = point.seconds if row[0] else first
        assert row[3:] == [f"{point.seconds / first:.2f}", f"{loss:.3f}", f"{accuracy:.1f} %"]
        assert len(point.values["test"]) >= 5


def test_the_readme_says_what_the_records_say(tuned: list[practice.Point]) -> None:
    told = " ".join((ROOT / "README.md").read_text().split())
    at_best = practice.at_best_schedule(tuned)
    point = {(point.problem[0], point.arm, point.epochs): point for point in at_best}
    herding, stratified = point["cifar10", "herding-head", 8], point["cifar10", "stratified", 8]
    test, accuracy = herding.equal["test"], herding.equal["accuracy"]
    assert f"a test loss {-100 * test.relative:.1f} % below the best" in told
    assert f"(p = {test.holm:.2g}); no clear difference in accuracy (p = {accuracy.holm:.2g})" in told
    free = stratified.equal["test"]
    assert f"`Stratified(labels)` is {-100 * free.relative:.1f} % below (p = {free.holm:.2g})" in told
    better = {
        key: practice_page.better(point[key].equal.get("test"), "test") for key in point if key[1] == "herding-head"
    }
    assert better["cifar10", "herding-head", 8] is True
    assert practice_page.better(accuracy, "accuracy") is None
    for task in ("cifar10-augmented", "gpt", "sst2"):
        assert not any(won for key, won in better.items() if key[0] == task), task
    # At a constant rate, GraB gains on MNIST what a decaying rate or averaged weights gain.
    mnist = {(p.arm, p.decay): p for p in tuned if (p.problem[0], p.epochs) == ("mnist", 20)}
    assert practice_page.better(mnist["grab", "constant"].same["test"], "test") is True
    assert practice_page.better(mnist["grab", "constant"].equal["test"], "test") is None
    assert practice_page.better(mnist["rr-ema", "constant"].same["test"], "test") is True
    assert mnist["rr", "cosine"].values["test"].mean() < 1.005 * mnist["grab", "constant"].values["test"].mean()
