"""Scripts of several ranks, started on this machine: those under tests/workers, and the examples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ordain

WORKERS = Path(__file__).parent / "workers"
TIMEOUT = 240  # seconds: what hangs is a failure


def launched(
    script: str | Path, *args: Any, ranks: int, restarts: int = 0, torchrun: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on so many ranks and wait for its end.

    By torchrun if asked for, or if ranks that end are to be started again. Else as forks of one process, where that is
    safe: most of such a test is the import of torch, by torchrun and by each rank.
    """
    if torchrun or restarts or sys.platform != "linux":
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [f"--max-restarts={restarts}"]
    else:
        command = [str(WORKERS / "forked.py"), str(ranks)]
    command = [sys.executable, *command, str(WORKERS / script), *map(str, args)]
    paths = [str(Path(ordain.__file__).parents[1]), str(Path(__file__).parent)]
    paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    # A store of its own for each restart: the one that is shared with torchrun keeps addresses of ranks that are gone.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        said = [one.decode() if isinstance(one, bytes) else one or "" for one in (error.stdout, error.stderr)]
        raise AssertionError(f"{script} hangs; its output:\n{said[0]}\nand where its ranks were:\n{said[1]}") from error
