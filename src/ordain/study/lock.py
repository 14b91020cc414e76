"""A lock that keeps two commands from writing to the same folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ordain.errors import StateError


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Hold the folder's lock; the system releases it if the process is killed."""
    lock = FileLock(out / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise StateError(
            f"{out}, which another command is writing to",
            expected="one command per folder",
            remedy="Wait for it, or use another folder with --out.",
        ) from None
    try:
        yield
    finally:
        lock.release()
