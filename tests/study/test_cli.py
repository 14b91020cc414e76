from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from matplotlib.image import imread
from typer.testing import CliRunner

import ordain
import ordain_cli
from ordain import Deterministic, KernelHalving, SelfBalancingWalk, herding
from ordain.study import cli
from ordain.study.commands.terminal import plain_errors
from ordain.study.files import write_bytes

BALANCERS = {"deterministic": Deterministic(), "walk": SelfBalancingWalk(), "halving": KernelHalving()}


def call(*words: Any) -> Any:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def refused(result: Any, *words: str) -> None:
    """One line on stderr that says what is wrong, nothing on stdout, exit code 2."""
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("ordain: ")
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    path = tmp_path / "vectors.npy"
    np.save(path, np.random.default_rng(0).random((201, 7)))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "order.npy"


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("balancer", BALANCERS)
def test_herd_is_the_library_s_herd(vectors: Path, out: Path, balancer: str, centering: Any) -> None:
    words = ("--rounds", 3, "--balancer", balancer, "--centering", centering, "--seed", 5)
    result = call("herd", vectors, "--out", out, *words)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""  # no progress bar where there is no terminal
    z = np.load(vectors)
    expected = herding.herd(z, rounds=3, balancer=BALANCERS[balancer], centering=centering, seed=5)
    np.testing.assert_array_equal(np.load(out), expected)


def test_herd_prints_the_objective_before_and_after(vectors: Path, out: Path) -> None:
    lines = call("herd", vectors, "--out", out).stdout.splitlines()
    z, order = np.load(vectors), np.load(out)
    assert lines[0] == "201 vectors of 7 numbers"
    assert lines[4:] == [f"Wrote the order (201 row indices) to {out}"]
    for line, norm in zip(lines[2:4], (np.inf, 2), strict=True):
        before, after = herding.herding_objective(z, norm=norm), herding.herding_objective(z, order, norm=norm)
        assert line.split()[-3:] == [f"{before:.6g}", f"{after:.6g}", f"{before / after:.1f}x"]


def test_herd_without_an_output_writes_nothing(vectors: Path, out: Path) -> None:
    told = call("herd", vectors, "--out", out).stdout.splitlines()
    out.unlink()
    result = call("herd", vectors)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [*told[:4], "To save the order: --out order.npy"]
    assert [path.name for path in vectors.parent.iterdir()] == ["vectors.npy"]


@pytest.mark.parametrize("name", ["order.txt", "order.csv", "order"])
def test_an_order_is_not_written_as_text(vectors: Path, name: str) -> None:
    refused(call("herd", vectors, "--out", vectors.with_name(name)), name, "ends in .npy", "np.load()")
    assert [path.name for path in vectors.parent.iterdir()] == ["vectors.npy"]


def test_herd_reads_the_file_in_place(vectors: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []
    original = herding.herd
    monkeypatch.setattr(herding, "herd", lambda z, **options: kinds.append(type(z)) or original(z, **options))
    assert call("herd", vectors, "--out", out).exit_code == 0
    assert kinds == [np.memmap]


@pytest.mark.parametrize("z", [np.random.default_rng(1).random((1500, 3)), np.ones((5, 2)), np.ones((1, 2))])
def test_plot_is_a_picture(tmp_path: Path, out: Path, z: np.ndarray) -> None:
    np.save(tmp_path / "z.npy", z)
    result = call("herd", tmp_path / "z.npy", "--out", out, "--plot", tmp_path / "prefix.png")
    assert result.exit_code == 0, result.stderr
    picture = imread(tmp_path / "prefix.png")
    assert picture.shape[0] > 300
    assert picture.std() > 0


def test_one_vector_has_one_order(tmp_path: Path, out: Path) -> None:
    np.save(tmp_path / "one.npy", np.array([[3.0, 4.0]]))
    assert call("herd", tmp_path / "one.npy", "--out", out).exit_code == 0
    assert np.load(out).tolist() == [0]


def test_missing_file(tmp_path: Path, out: Path) -> None:
    refused(call("herd", tmp_path / "none.npy", "--out", out), "which does not exist", "none.npy")
    assert not out.exists()


@pytest.mark.parametrize("content", [b"", b"hello, this is text", b"\x93NUMPY\x01\x00", b"PK\x03\x04"])
def test_not_an_array(tmp_path: Path, out: Path, content: bytes) -> None:
    (tmp_path / "bad.npy").write_bytes(content)
    result = call("herd", tmp_path / "bad.npy", "--out", out)
    refused(result, "bad.npy")
    assert not out.exists()


def test_truncated_array(vectors: Path, out: Path) -> None:
    vectors.write_bytes(vectors.read_bytes()[:-8])
    refused(call("herd", vectors, "--out", out), "not a complete .npy file")


def test_archive_is_not_an_array(tmp_path: Path, out: Path) -> None:
    np.savez(tmp_path / "many.npz", a=np.ones((3, 2)))
    refused(call("herd", tmp_path / "many.npz", "--out", out), "not a complete .npy file")


class Trap:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_pickles_are_never_loaded(tmp_path: Path, out: Path) -> None:
    marker = tmp_path / "sprung"
    np.save(tmp_path / "trap.npy", np.array([[Trap(marker)]], dtype=object), allow_pickle=True)
    refused(call("herd", tmp_path / "trap.npy", "--out", out), "never loaded")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("z", "word"),
    [
        (np.ones(5), "(5,)"),
        (np.ones((2, 3, 4)), "(2, 3, 4)"),
        (np.ones((0, 3)), "(0, 3)"),
        (np.ones((3, 0)), "(3, 0)"),
        (np.array([["a"]]), "dtype"),
        (np.array([[1.0], [np.nan], [0.0]]), "row 1"),
        (np.array([[1.0], [0.0], [np.inf]]), "row 2"),
    ],
)
def test_vectors_that_cannot_be_herded(tmp_path: Path, out: Path, z: np.ndarray, word: str) -> None:
    np.save(tmp_path / "z.npy", z)
    refused(call("herd", tmp_path / "z.npy", "--out", out), word)
    assert [path.name for path in tmp_path.iterdir()] == ["z.npy"]


@pytest.mark.parametrize(("option", "value"), [("--rounds", -1), ("--seed", -1)])
def test_numbers_out_of_range(vectors: Path, out: Path, option: str, value: int) -> None:
    refused(call("herd", vectors, "--out", out, option, value), f"{option[2:]}=-1")


def test_unknown_balancer(vectors: Path, out: Path) -> None:
    assert call("herd", vectors, "--out", out, "--balancer", "none").exit_code == 2


def test_output_that_cannot_be_written(vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(herding, "herd", lambda *_, **__: pytest.fail("worked before it looked"))
    refused(call("herd", vectors, "--out", tmp_path / "no" / "order.npy"), "which does not exist")
    (tmp_path / "folder.npy").mkdir()
    refused(call("herd", vectors, "--out", tmp_path / "folder.npy"), "Is a directory")
    refused(call("herd", vectors, "--out", vectors / "order.npy"), "which is a file")


@pytest.mark.parametrize("words", [("--out", "vectors.npy"), ("--out", "a.png", "--plot", "a.png")])
def test_input_is_never_overwritten(vectors: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(vectors.parent)
    before = vectors.read_bytes()
    refused(call("herd", vectors, *words), "one path twice")
    assert vectors.read_bytes() == before


def test_failing_write_leaves_the_old_file(vectors: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.write_bytes(b"old")

    def break_off(file: Any, order: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", break_off)
    refused(call("herd", vectors, "--out", out), "No space left")
    assert out.read_bytes() == b"old"
    assert sorted(path.name for path in out.parent.iterdir()) == ["order.npy", "vectors.npy"]


def test_write_replaces(tmp_path: Path) -> None:
    for content in (b"first", b"second"):
        write_bytes(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_version() -> None:
    assert call("--version").stdout == f"ordain {ordain.__version__}\n"


def started(*words: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without some packages. Its last line lists what it has imported of torch."""
    code = (
        f"import sys; sys.argv = {['ordain', *words]!r}; sys.modules |= dict.fromkeys({blocked!r})\n"
        "import atexit; atexit.register(lambda: print([name for name in ('torch', 'numpy') if name in sys.modules]))\n"
        "import ordain_cli; ordain_cli.main()"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603


@pytest.mark.parametrize("words", [("--help",), ("--version",), ()])
def test_help_and_version_need_neither_torch_nor_the_study(words: tuple[str, ...]) -> None:
    found = started(*words, blocked=("typer", "rich", "matplotlib"))
    assert found.returncode == 0, found.stderr
    *lines, imported = found.stdout.splitlines()
    assert imported == "[]"
    if words == ("--version",):
        assert lines == [f"ordain {ordain.__version__}"]
    else:
        assert lines[0] == "Usage: ordain [OPTIONS] COMMAND [ARGS]..."
        assert [line.split()[0] for line in lines[lines.index("Commands:") + 1 : -3]] == [*ordain_cli.COMMANDS]


def test_a_command_without_the_study_says_what_to_install() -> None:
    found = started("tasks", blocked=("typer",))
    assert found.returncode == 1
    assert found.stderr == "ordain: the command needs 'typer'. Install it with: pip install 'ordain[study]'\n"


def test_the_help_lists_the_commands_with_their_own_words() -> None:
    commands = typer.main.get_command(cli.app).commands
    assert {name: command.help.splitlines()[0] for name, command in commands.items()} == ordain_cli.COMMANDS
    assert ordain_cli.ABOUT in call("--help").stdout
    assert set(re.findall("^  (--[a-z-]+) ", call("--help").stdout, re.M)) == set(
        re.findall("^  (--[a-z-]+) ", started("--help").stdout, re.M)
    )


def test_module_runs() -> None:
    words = [sys.executable, "-m", "ordain", "--version"]
    found = subprocess.run(words, capture_output=True, text=True, check=True)  # noqa: S603
    assert found.stdout == f"ordain {ordain.__version__}\n"


def test_brackets_in_help_texts_are_shown() -> None:
    assert "[n, d] array" in call("herd", "--help").stdout
    assert "[default: $ORDAIN_DATA, or a cache]" in " ".join(call("data", "list", "--help").stdout.split())


@pytest.mark.parametrize(("typed", "offered"), [("ordain ru", ["run"]), ("ordain run --prot", ["--protocol"])])
def test_the_shell_completes(typed: str, offered: list[str]) -> None:
    words = typed.split()
    environment = {"_ORDAIN_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner().invoke(cli.app, [], prog_name="ordain", env=environment)
    assert result.stdout.split() == offered


def test_names_that_cannot_be_written(vectors: Path, out: Path, tmp_path: Path) -> None:
    nowhere = call("herd", vectors, "--out", tmp_path / "no" / "order.npy")
    refused(nowhere, "which does not exist")
    assert ".tmp" not in nowhere.output
    refused(call("herd", vectors, "--out", out, "--plot", tmp_path / "prefix.xyz"), "ends in .png")
    assert not out.exists()


def test_a_reader_that_has_seen_enough_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """As under ``| head -1``: what finds nobody goes to the command line's own end, which says nothing."""
    with pytest.raises(BrokenPipeError), plain_errors():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert capsys.readouterr().err == ""
