"""Scripts of several ranks, started on this machine: those under tests/workers, and the examples."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ordain

WORKERS = Path(__file__).parent / "workers"
TIMEOUT = 240  # seconds: what hangs is a failure


def launched(script: str | Path, *args: Any, ranks: int, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on so many ranks and wait for its end.

    By torchrun if ranks that end are to be started again. Else as forks of one process, where that is
    safe: most of such a test is the import of torch, by torchrun and by each rank.
    """
    words = [str(WORKERS / script), *map(str, args)]
    paths = [str(Path(ordain.__file__).parents[1]), str(Path(__file__).parent)]
    paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    # A store of its own for each restart: the one that is shared with torchrun keeps addresses of ranks that are gone.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        if not (restarts or sys.platform != "linux"):
            return _forked(ranks, words, environment)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [f"--max-restarts={restarts}", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        said = [one.decode() if isinstance(one, bytes) else one or "" for one in (error.stdout, error.stderr)]
        raise AssertionError(f"{script} hangs; its output:\n{said[0]}\nand where its ranks were:\n{said[1]}") from error


def _forked(ranks: int, words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    channel, end = _forks(environment["PYTHONPATH"])
    with TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        channel.sendall(json.dumps([ranks, words[0], words[1:], environment, *map(str, files)]).encode() + b"\n")
        try:
            answer = channel.recv(1)
        except TimeoutError as error:
            end()
            _forks.cache_clear()
            raise subprocess.TimeoutExpired(words, TIMEOUT, *(file.read_bytes() for file in files)) from error
        assert answer, "workers/forked.py has ended"
        return subprocess.CompletedProcess(words, int(answer), *(file.read_text() for file in files))


@cache
def _forks(paths: str) -> tuple[socket.socket, Any]:
    """Started for the first script, and there until the end of the tests: to talk to it, and to end it."""
    channel, its = socket.socketpair()
    channel.settimeout(TIMEOUT)
    command = [sys.executable, str(WORKERS / "forked.py"), str(its.fileno())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    process = subprocess.Popen(command, env=environment, pass_fds=[its.fileno()], start_new_session=True)  # noqa: S603
    its.close()

    def end() -> None:
        channel.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.wait()

    atexit.register(end)
    return channel, end
