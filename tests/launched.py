"""Worker scripts under tests/workers, started by torchrun on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ordain

WORKERS = Path(__file__).parent / "workers"
TIMEOUT = 240  # seconds: what hangs is a failure


def launched(script: str, *args: Any, ranks: int, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on so many ranks and wait for its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", str(WORKERS / script), *map(str, args)]
    paths = [str(Path(ordain.__file__).parents[1]), str(Path(__file__).parent)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    # A store of its own for each restart: the one that is shared with torchrun keeps addresses of ranks that are gone.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)  # noqa: S603
