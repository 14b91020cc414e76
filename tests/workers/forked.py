"""Ranks of a script as forks of one process: torch is imported once, not once for torchrun and once for each rank.

forked.py RANKS SCRIPT ARGS...    The environment is what torchrun gives; if a rank fails, the others are ended.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import traceback

import torch._dynamo  # noqa: F401 (the first optimizer imports it, in 2 seconds)
import torch.distributed as dist
from launched import TIMEOUT


def rank_of(script: str, words: list[str]) -> int:
    """The script in a process of its own, to its end; gives the process's id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    faulthandler.dump_traceback_later(TIMEOUT - 20)  # a rank that hangs says where
    try:
        sys.argv = [script, *words]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(ranks: int, script: str, words: list[str]) -> int:
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="imported")  # what it imports is there before the forks
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    running = set()
    for rank in range(ranks):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running.add(rank_of(script, words))
    failed = False
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status and not failed:
            failed = True
            for other in running:
                os.kill(other, signal.SIGKILL)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
