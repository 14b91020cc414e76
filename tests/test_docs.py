"""Every Python block of README.md and docs/ runs and prints what the page says; every page and public name is there."""

from __future__ import annotations

import ast
import doctest
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import Block, blocks, names
from launched import launched

import ordain
import ordain.balancing
import ordain.distributed
import ordain.gradients
import ordain.herding
import ordain.orders
import ordain.theory
from ordain.gradients.rules import registry

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "results/README.md")  # pages of the site that are not in docs/
NUMBER = re.compile(r"\d+\.\d+")

# What is not run, and why. Blocks of frameworks are covered by the examples that they come from.
NOT_RUN = {
    ("accelerate.md", "examples/accelerate_ddp.py is"),
    ("architecture.md", "part of a method"),
    ("data.md", "needs the files of MNIST"),
    ("distributed.md", "examples/ddp_mnist.py is"),
    ("distributed.md", "tests/distributed does"),
    ("jax.md", "examples/jax_mnist.py is"),
    ("lightning.md", "examples/lightning_mnist.py is"),
    ("peft.md", "examples/lora.py is"),
    ("study.md", "tests/study/test_runs.py does"),
    ("torch-compile.md", "tests/gradients/test_compiled.py does"),
    ("transformers.md", "examples/trainer.py is"),
}
TWO_PROCESSES = [(page, block) for page in PAGES for block in blocks(page) if block.two_processes]


def in_one_process(page: Path) -> list[Block]:
    return [block for block in blocks(page) if not block.not_run and not block.two_processes]


def check_output(printed: str, told: str) -> None:
    """The words are equal, and numbers nearly: they depend on the processor."""
    words = [[NUMBER.sub("#", line.rstrip()) for line in text.splitlines()] for text in (printed, told)]
    assert words[0] == words[1]
    numbers = [[float(one) for one in NUMBER.findall(text)] for text in (printed, told)]
    assert numbers[0] == pytest.approx(numbers[1], rel=2e-3)


def run(block: Block, space: dict[str, Any]) -> None:
    exec(block.setup, space)  # noqa: S102
    if block.code.startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(block.code, space, "block", None, 0)
        assert not doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed
        return
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(block.code, space)  # noqa: S102
    if block.output:
        check_output(printed.getvalue(), block.output)


@pytest.mark.parametrize("page", [page for page in PAGES if in_one_process(page)], ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore:this model was watched by another order")  # a page shows several
@pytest.mark.filterwarnings("ignore:GraB. no gradients were observed")  # a loop's body is "..."
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # num_workers=4
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mnist").symlink_to(ROOT / "results" / "mnist")
    rules, space = dict(registry.RULES), names()
    try:
        for block in in_one_process(page):
            run(block, space)
    finally:
        registry.RULES.clear()
        registry.RULES.update(rules)


def test_the_block_of_two_processes_runs(tmp_path: Path) -> None:
    ((page, block),) = TWO_PROCESSES
    runs = [launched("doc_block.py", tmp_path, page, epochs, ranks=2) for epochs in (4, 10)]  # the second one resumes
    assert not any(ended.returncode for ended in runs), "".join(ended.stderr for ended in runs)
    check_output("".join(ended.stdout for ended in runs), block.output or "")


def test_what_is_not_run_is_listed() -> None:
    assert {(page.name, block.not_run) for page in PAGES for block in blocks(page) if block.not_run} == NOT_RUN
    assert [page.stem for page, _ in TWO_PROCESSES] == ["tutorial"]
    assert all((ROOT / reason.split()[0]).exists() for _, reason in NOT_RUN if "/" in reason)


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    assert built.returncode == 0, built.stderr
    for page in (tmp_path / "site").rglob("*.html"):  # it opens from disk: nothing is loaded from elsewhere
        loaded = re.findall(r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="(\w+:)?//', page.read_text())
        assert not loaded, page


def test_the_readme_is_short_before_its_details() -> None:
    before, heading, _ = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Details\n")
    assert heading
    assert len(re.findall(r"\S*\w\S*", before)) <= 500


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2].partition("\ntheme:")[0]
    shown = re.findall(r": (\S+\.md)$", navigation, re.M)
    assert sorted(shown) == sorted({page.name for page in PAGES[1:]} | {*OUTSIDE})
    assert all((ROOT / name).exists() for name in OUTSIDE)


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M)
    assert len(set(listed)) == len(listed)
    short = {name.rpartition(".")[2] for name in listed}
    for module in (ordain, ordain.orders, ordain.balancing, ordain.gradients):
        assert set(module.__all__) - {"__version__", "distributed"} <= short
    for module in (ordain.herding, ordain.theory, ordain.distributed):
        assert {f"{module.__name__}.{name}" for name in module.__all__} <= set(listed)
    for path in (ROOT / "src" / "ordain" / "integrations").glob("*.py"):  # whose packages may not be installed
        for offered in re.findall(r"^__all__ = (\[.*?\])", path.read_text(encoding="utf-8"), re.M | re.S):
            assert {f"ordain.integrations.{path.stem}.{name}" for name in ast.literal_eval(offered)} <= set(listed)
