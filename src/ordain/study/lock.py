"""The lock that keeps two commands out of one folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ordain.errors import StateError

__all__ = ["only_one"]


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system takes back from a process that is killed."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(
                f"{out}, into which another command is running",
                expected="one command to a folder",
                remedy="Wait for it, or run into another folder with --out.",
            ) from None
        yield
