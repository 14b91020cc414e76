"""The example of data-parallel training, as a user runs it: by torchrun, stopped and taken up again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "ddp_mnist.py"


def start(folder: Path, checkpoint: str, *words: str) -> subprocess.Popen[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLE)]
    options = ["--data-dir", str(folder / "no-data"), "--checkpoint", str(folder / checkpoint)]
    return subprocess.Popen(  # noqa: S603
        [*launch, *options, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def printed(process: subprocess.Popen[str]) -> list[str]:
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return out.splitlines()


def test_two_processes_and_resume(tmp_path: Path) -> None:
    at_once, begun = start(tmp_path, "whole.pt", "--epochs", "2"), start(tmp_path, "run.pt", "--epochs", "1")
    whole, first = printed(at_once), printed(begun)
    rest = printed(start(tmp_path, "run.pt", "--epochs", "2", "--resume"))
    assert whole[0] == "digits: 1,797 examples, 2 ranks, 64 examples a step"
    found = [
        re.fullmatch(r"epoch (\d): (loss \d\.\d+), the order sent ([\d,]+) bytes a step", one) for one in whole[1:]
    ]
    assert [match and match[1] for match in found] == ["1", "2"]
    assert all(match and int(match[3].replace(",", "")) > 0 for match in found)
    told = [line.partition(",")[0] for line in whole[1:]]
    assert [line.partition(",")[0] for line in (first[1], rest[1])] == told
