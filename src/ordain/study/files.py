"""Files and folders: arrays without unpickling, atomic writes, and a lock on a folder."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from ordain.errors import InputError, StateError


def read_vectors(path: Path) -> NDArray[Any]:
    """Open a ``.npy`` file, memory-mapped, so that it may be larger than memory."""
    try:
        with warnings.catch_warnings(), np.errstate(over="raise"):  # raise for shapes whose size overflows
            warnings.simplefilter("ignore", UserWarning)  # about headers written by Python 2
            found: NDArray[Any] = open_memmap(path, mode="r")  # np.load() would also try archives and pickles
    except (ValueError, TypeError, ArithmeticError, TokenError) as error:
        raise InputError(
            f"{path}, which is not a complete .npy file of numbers",
            expected="an [n, d] array written by np.save()",
            remedy="Write it with np.save(path, vectors); pickled objects are never loaded.",
        ) from error
    return found


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` if the block ends without an error.

    Opening it before long work detects an unwritable folder early. A killed process leaves ``path`` unchanged
    and ``.NAME.*.tmp`` next to it.
    """
    if path.is_dir():
        raise IsADirectoryError(21, "Is a directory", str(path))
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(2, "No such folder", str(path.parent))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Hold the folder's lock, which keeps other commands from writing; the system releases it if the process dies."""
    try:
        with FileLock(out / ".lock", timeout=0).acquire():
            yield
    except Timeout:
        raise StateError(
            f"{out}, which another command is writing to",
            expected="one command per folder",
            remedy="Wait for it, or use another folder with --out.",
        ) from None
