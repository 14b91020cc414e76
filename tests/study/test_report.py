from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from study.study_records import CONFIG, end, epoch, path_of, start, write_config, write_job, write_lines, write_run
from typer.testing import CliRunner

from ordain.study import cli, style, vectors
from ordain.study.report import page, training_content, write_report, write_reports
from ordain.study.report.page import Content, Table
from ordain.study.report.views import views

EVIL = "<img src=x onerror=alert(1)>|`*_[a](b)_*`$x^$ & <script>alert(2)</script>"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="560" height="400"><circle r="200"/></svg>'
FIGURES = [
    *(
        f"{view}-{what}"
        for view in ("own", "rr")
        for what in (
            "difference",
            *(
                f"{metric}-{by}"
                for metric in ("train-loss", "valid-loss", "test-accuracy")
                for by in ("epochs", "time")
            ),
            "herding",
            "stale-fresh",
        )
    ),
    *("goal", "memory", "rates", "time", "valid-rates"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of figure and of trouble; GraB does best at 0.1 and RR at 0.03, since GraB diverges there."""
    folder = tmp_path_factory.mktemp("runs") / "mnist"
    speeds = {"rr": 1.0, "so": 0.5, "grab@16": 3.0, "flipflop": 1.0}
    asked = {
        "epochs": 3,
        "arms": [*speeds, "greedy", "grab"],
        "rates": [0.03, 0.1],
        "seeds": list(range(5)),
        "limit": 900,
    }
    problem = CONFIG["problem"] | {"notes": [EVIL]}
    write_run(folder, speeds, rates=(0.03, 0.1), config=asked, problem=problem, command=f"ordain run {EVIL}")
    for seed in range(5):
        for arm, rate in (("rr", 0.03), ("grab@16", 0.1)):  # so that the best rates differ
            path = path_of(folder, arm, rate, seed)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            lines[-2]["valid_loss"] = 0.1
            write_lines(path, lines)
        write_lines(
            path_of(folder, "greedy", 0.03, seed),
            [start("greedy", 0.03, seed, label=EVIL), end(0, "refused", EVIL, needed_bytes=1 << 40)],
        )
    write_lines(
        path_of(folder, "flipflop", 0.1, 0), [start("flipflop", 0.1, 0), epoch(0, 2.0), end(0, "diverged", "inf")]
    )
    return folder


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made but not painted, which takes most of a report's time."""
    monkeypatch.setattr(style, "png", lambda figure, dpi: b"png")
    monkeypatch.setattr(style, "svg", lambda figure: SVG)


@pytest.fixture(scope="module")
def made(run: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "png", lambda figure, dpi: b"png")
        patch.setattr(style, "svg", lambda figure: SVG)
        write_report(run)
    return run / "report"


def test_folder_holds_the_page_the_figures_and_the_table(made: Path) -> None:
    names = {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    assert {path.name for path in made.iterdir()} == names | {"index.html", "report.md"}


def test_every_kind_of_figure_can_be_painted(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        training_content, "views", lambda run: views(run)[:1]
    )  # the second view's differ in numbers alone
    write_report(run, tmp_path)
    for name in (name for name in FIGURES if not name.startswith("rr-")):
        assert imread(tmp_path / f"{name}.png").std() > 0
        painted = (tmp_path / f"{name}.svg").read_bytes()
        assert painted.startswith(b"<?xml")
        assert b"<script" not in painted


def test_page_needs_nothing_else(made: Path) -> None:
    page = (made / "index.html").read_text()
    assert not re.search(r"https?://|file:|<script|<link|@import|url\(", page)
    assert set(re.findall(r'src="([^:]*:[^;]*);', page)) == {"data:image/svg+xml"}
    assert page.count("<img ") == page.count(" alt=") == len(FIGURES)


def test_page_says_it_all(made: Path) -> None:
    page = html.unescape((made / "index.html").read_text()).replace("\u00a0", " ")
    for text in (
        "GraB, units of 16 helps",
        "Shuffle once is worse",
        "Each at its own best rate",
        "All at RR's best rate, 0.03",
        "rate 0.1, RR at 0.03",
        "Holm p =",
        "Reduced: at most 900 examples of each set",
        "not started",
        "diverged",
        "refused",
        "1,099,511,627,776 bytes",
        "Final test accuracy",
        "corrected for the number of orders",
        *("2025-01-02T03:04:05+00:00", "0123456789abcdef", "a processor", "torch 2.6.0", "seeds 0-4"),
    ):
        assert text in page, text


def test_html_in_records_is_inert(made: Path) -> None:
    page = (made / "index.html").read_text()
    assert "<img src=x" not in page
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(2)") >= 4  # the command, the notes, the label, the reason
    text = (made / "report.md").read_text()
    assert "<" not in text
    assert r"\|\`\*\_\[a\](b)\_\*\`\$x^\$ &amp; &lt;script&gt;" in text


def test_markdown_tables_are_whole(made: Path) -> None:
    lines = [line for line in (made / "report.md").read_text().splitlines() if line.startswith("|")]
    widths = [len(re.findall(r"(?<!\\)\|", line)) - 1 for line in lines]
    # Two tables of six arms, one of their two rates, and what is not compared.
    assert widths == [15] * 16 + [3] * 8 + [5] * (len(lines) - 24)
    assert len(lines) > 26


def test_markdown_escapes() -> None:
    assert page.markdown_line("a\n# b") == r"a \# b"
    assert page.markdown_line("- x") == r"\- x"
    assert page.markdown_line("1. x") == r"1\. x"
    assert page.markdown_line("10 x. y-z") == "10 x. y-z"


def test_markdown_tables() -> None:
    tables = [Table("one", ("a",), [("613.6 MiB",), ("-",)]), Table("two", ("a", "b"), [("x|y", "-0.1 ± 2")])]
    text = page.render("report.md", content=Content("", "", [], [], [], tables, [])).decode()
    assert "\n| a |\n| --- |\n| 613.6 MiB |\n| - |\n\n" in text
    assert "\n| a | b |\n| --- | ---: |\n| x\\|y | -0.1 ± 2 |\n\n" in text


def test_figures_are_the_same_bytes_every_time() -> None:
    def one() -> Figure:
        figure = Figure(figsize=(3, 2), layout="constrained")
        figure.subplots().plot([1, 2, 3], label="a")
        figure.legend(loc="outside lower center")
        return figure

    assert style.draw("a", "b", one()) == style.draw("a", "b", one())


def test_nothing_recorded_yet(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_report(tmp_path)
    assert "There is no order to compare" in (tmp_path / "report" / "index.html").read_text()
    write_lines(path_of(tmp_path, "rr", 0.1, 0), [start("rr", 0.1, 0)])
    write_report(tmp_path)
    assert "0 epochs so far" in (tmp_path / "report" / "index.html").read_text()


@pytest.mark.usefixtures("unpainted")
def test_overview(tmp_path: Path) -> None:
    for name in ("b&b", "mnist"):
        write_config(tmp_path / name, task=f"{name} <i>")
        for arm in ("rr", "grab"):
            write_job(tmp_path / name, arm, 0.1, 0, [2.0, 1.0])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("<b>")
    failures = write_reports(tmp_path)
    assert list(failures) == [tmp_path / "bad"]
    page = (tmp_path / "report" / "index.html").read_text()
    links = re.findall(r'href="([^"]*)"', page)
    assert set(links) == {"b%26b/index.html", "mnist/index.html"}
    assert (tmp_path / "report" / "b&b" / "index.html").exists()
    assert "mnist &lt;i&gt;" in page
    assert "not JSON" in page
    assert page.count("<img ") == 2
    assert write_reports(tmp_path) == failures  # its own folder is not taken for a run


class Stub:
    """A study as ``ordain.study.vectors`` has them."""

    kind = SimpleNamespace(title="Vectors <i>")

    def saved(self, folder: Path) -> SimpleNamespace:
        return SimpleNamespace(points=lambda: range(3))

    def figures(self, folder: Path) -> dict[str, Figure]:
        figure = Figure(figsize=(8, 2))
        figure.subplots().plot([1, 2])
        return {"curve": figure}

    def table(self, folder: Path) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        return ("n", "norm"), [("10", "<b>3.5")]

    def sentences(self, folder: Path) -> list[str]:
        return ["Herding <b>halves</b> it."]


def test_studies_of_vectors_show_what_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "STUDIES", {"stub": Stub()})
    write_config(tmp_path, kind="stub")
    (tmp_path / "records.jsonl").write_text("{}\n{}\n")
    write_report(tmp_path)
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Herding &lt;b&gt;halves&lt;/b&gt; it." in page
    assert "Vectors &lt;i&gt;" in page
    assert "&lt;b&gt;3.5" in page
    assert '<figure id="curve" class="wide"' in page
    assert (tmp_path / "report" / "curve.svg").exists()
    assert "| 10 | &lt;b&gt;3.5 |" in (tmp_path / "report" / "report.md").read_text()
    write_config(tmp_path, kind="other")
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "training, stub" in result.stderr


@pytest.mark.usefixtures("unpainted")
def test_command(tmp_path: Path) -> None:
    write_config(tmp_path / "runs" / "one")
    for seed in range(2):
        write_job(tmp_path / "runs" / "one", "rr", 0.1, seed, [2.0, 1.0])
        write_job(tmp_path / "runs" / "one", "grab", 0.1, seed, [2.0, 0.5])
    out = tmp_path / "made" / "here"
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "runs" / "one"), "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    assert "GraB is inconclusive (needs 5 seeds): final training loss 0.5000" in result.stdout
    assert (out / "index.html").exists()
    assert not (tmp_path / "runs" / "one" / "report").exists()
    nothing = CliRunner().invoke(cli.app, ["report", str(tmp_path / "nothing")])
    assert nothing.exit_code == 2
    assert nothing.stderr.startswith("ordain: got ")
    path_of(tmp_path / "runs" / "one", "rr", 0.1, 0).write_text("{}\n")
    broken = CliRunner().invoke(cli.app, ["report", str(tmp_path / "runs")])
    assert broken.exit_code == 2
    assert "line 1" in broken.stderr


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MEASURE = """
<script>
addEventListener("load", async () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, images = [...page.images];
    await Promise.all(images.map(image => image.decode()));
    const decoded = images.filter(image => image.naturalWidth > 0);
    const root = page.documentElement;
    found[frame.width] = [root.scrollWidth - root.clientWidth, images.length, decoded.length];
  }
  document.title = JSON.stringify(found);
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_in_a_browser(made: Path, tmp_path: Path) -> None:
    """Frames of a phone's and a desk's width, since a window of the browser cannot be as narrow as a phone."""
    page = html.escape((made / "index.html").read_text())
    frames = "".join(f'<iframe width="{width}" height="800" srcdoc="{page}"></iframe>' for width in (390, 1280))
    around = tmp_path / "around.html"
    around.write_text(f"<!doctype html><title>-</title>{frames}{MEASURE}")
    sources = {around: "--virtual-time-budget=20000", made / "index.html": "--virtual-time-budget=5000"}
    found = {}
    for source, budget in sources.items():
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        options += ["--disable-component-update", "--disable-sync", "--enable-logging=stderr", budget, "--dump-dom"]
        options += [f"--user-data-dir={tmp_path / source.parent.name}", source.as_uri()]
        found[source] = subprocess.run(  # noqa: S603
            [str(CHROMIUM), *options], capture_output=True, text=True, timeout=120, check=True, env=dict(os.environ)
        )
        assert "CONSOLE" not in found[source].stderr
    told = re.search(r"<title>(\{.*?\})</title>", found[around].stdout)
    assert told, found[around].stdout[:200]
    assert json.loads(told[1]) == {str(width): [0, len(FIGURES), len(FIGURES)] for width in (390, 1280)}
    assert "GraB, units of 16 helps" in found[made / "index.html"].stdout
