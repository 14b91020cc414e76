"""The examples, as a user runs them: started, and taken up again."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from launched import launched

EXAMPLES = Path(__file__).parents[2] / "examples"


def ran(name: str, folder: Path | None, *words: str, ranks: int = 1) -> list[str]:
    """What it prints. One process is this one: importing torch and a framework again would take most of the time."""
    path = EXAMPLES / name
    words = (*(("--out", str(folder)) if folder else ()), *words)
    if ranks > 1:
        ended = launched(path, *words, ranks=ranks)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        torch.random.fork_rng(),
        redirect_stdout(StringIO()) as said,
    ):
        warnings.simplefilter("ignore")  # those of frameworks, which a user sees or not
        patch.setattr(sys, "argv", [str(path), *words])
        runpy.run_path(str(path), run_name="__main__")
    return said.getvalue().splitlines()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_short_and_marked(path: Path) -> None:
    """The text in front says which marks there are: what is different from reshuffling."""
    text = path.read_text()
    said, _, code = text.partition("from __future__")
    last = re.search(r"ifferences from reshuffling.* marked \(1\) (?:to|and) \((\d)\)", " ".join(said.split()))
    assert last
    assert sorted({int(mark) for mark in re.findall(r"# \((\d)\)", code)}) == list(range(1, int(last[1]) + 1))
    assert len(text.splitlines()) <= 80


def test_trainer(tmp_path: Path) -> None:
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    out = ran("trainer.py", tmp_path, "--examples", "144", "--epochs", "3")
    assert out[-1] == "27 steps, GraB(n=144, params='head' (lm_head.weight [128, 32]), seed=0), in epoch 2"
    shutil.rmtree(tmp_path / "checkpoint-27")
    again = ran("trainer.py", tmp_path, "--examples", "144", "--epochs", "3", "--resume")  # from step 20, in mid-epoch
    assert again[-1] == out[-1]


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    ran("lightning_mnist.py", tmp_path, "--epochs", "1")
    out = ran("lightning_mnist.py", tmp_path, "--epochs", "2", "--resume")
    assert re.fullmatch(r"58 steps, loss 0\.\d+, GraB\(n=1797, seed=0\), in epoch 1", out[-1])


def test_token_blocks(tmp_path: Path) -> None:
    text = "the order of the data is the order of the blocks and " * 80
    np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16).tofile(tmp_path / "train.bin")
    words = ("--data", str(tmp_path / "train.bin"), "--vocabulary", "128", "--epochs")
    first = ran("token_blocks.py", tmp_path, *words, "1")
    second = ran("token_blocks.py", tmp_path, *words, "2", "--resume")
    told = [
        re.fullmatch(r"epoch (\d): loss (\d\.\d+) over 16 blocks, GraB\(n=128, group=8, seed=0\)", line)
        for line in (*first, *second)
    ]
    assert [match and match[1] for match in told] == ["1", "2"]
    losses = [float(match[2]) for match in told if match]
    assert losses[1] < losses[0]


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    first = ran("accelerate_ddp.py", tmp_path, "--epochs", "1", ranks=2)
    second = ran("accelerate_ddp.py", tmp_path, "--epochs", "2", "--resume", ranks=2)
    told = [re.fullmatch(r"epoch (\d): loss (\d\.\d+), GraB\(n=1797, seed=0\)", line) for line in (*first, *second)]
    assert [match and match[1] for match in told] == ["1", "2"]
    assert all(match and float(match[2]) < 2.3 for match in told)  # less than a guess among ten


def test_lora(tmp_path: Path) -> None:
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    small = ("--examples", "40")
    whole = ran("lora.py", tmp_path / "whole", *small, "--epochs", "2")
    ran("lora.py", tmp_path, *small, "--epochs", "1")
    assert ran("lora.py", tmp_path, *small, "--epochs", "2", "--resume") == whole[1:]
    assert re.fullmatch(r"epoch 2: loss 4\.\d+, by 4352 numbers", whole[-1])
    assert ran("lora.py", tmp_path, *small, "--epochs", "1", "--head")[-1].endswith("by 384 numbers")


def test_plain(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    whole = ran("plain.py", tmp_path / "whole", "--epochs", "2")
    ran("plain.py", tmp_path, "--epochs", "1")
    assert ran("plain.py", tmp_path, "--epochs", "2", "--resume") == whole[1:]
    assert re.fullmatch(r"epoch 2: loss 0\.\d+, GraB\(n=1797, seed=0\)", whole[-1])


def test_linear_probe() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    out = ran("linear_probe.py", None, "--epochs", "2")
    told = (
        r"epoch 2: loss 0\.\d+, Herding\(n=1797, params='head' \(head.weight \[10, 256\], head.bias \[10\]\), seed=0\)"
    )
    assert re.fullmatch(told, out[-1])


def test_nanogpt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model", None)  # so that it is put back
    monkeypatch.delitem(sys.modules, "model")
    monkeypatch.syspath_prepend(EXAMPLES.parent / "tests" / "nanogpt")
    out = ran("nanogpt.py", None, "--examples", "160", "--epochs", "2")[-2:]
    told = [
        re.fullmatch(r"epoch \d: loss (\d\.\d+) of the last batch, GraB\(n=160, seed=0\)", line) for line in out[-2:]
    ]
    assert all(told)
    assert float(told[1][1]) < float(told[0][1]) < 4.9  # type: ignore[index]  # ln 128 is 4.85
