"""Ranks of scripts as forks of one process: what they import is imported once, not once for each rank of each script.

forked.py SOCKET    Reads a line for each script, ``[ranks, script, words, environment, stdout's file, stderr's file]``
in JSON, and answers 1 if a rank failed (then the others are ended), else 0. The environment is what torchrun gives.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch._dynamo  # noqa: F401 (the first optimizer imports it, in 2 seconds)
import torch.distributed as dist
from launched import TIMEOUT


def forked(job: Callable[[], int | None]) -> int:
    """The job in a process of its own, to its end; gives the process's id."""
    pid = os.fork()
    if pid:
        return pid
    code: int | None = 1
    try:
        code = job()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def rank_of(script: str, words: list[str]) -> None:
    faulthandler.dump_traceback_later(TIMEOUT - 20)  # a rank that hangs says where
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def ranks_of(ranks: int, script: str, words: list[str], environment: dict[str, str], *files: str) -> int:
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.clear()
    os.environ |= environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    running = set()
    for rank in range(ranks):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running.add(forked(partial(rank_of, script, words)))
    failed = False
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status and not failed:
            failed = True
            for other in running:
                os.kill(other, signal.SIGKILL)
    return int(failed)


def main(channel: socket.socket) -> None:
    for line in channel.makefile():
        ranks, script, *rest = json.loads(line)
        sys.path.insert(0, os.path.dirname(script))
        with suppress(Exception):  # its ranks will say what is wrong
            runpy.run_path(script, run_name="imported")  # what it imports is there before the forks
        gc.collect()
        gc.freeze()  # ranks do not look through it for garbage
        pid = forked(partial(ranks_of, ranks, script, *rest))
        channel.sendall(b"1" if os.waitpid(pid, 0)[1] else b"0")
        del sys.path[0]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
