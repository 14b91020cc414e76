"""Reading of vectors without unpickling, and atomic writing of files."""

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
from numpy.lib.format import MAGIC_PREFIX
from numpy.typing import NDArray

from ordain.errors import InputError


def read_vectors(path: Path) -> NDArray[Any]:
    """Open a ``.npy`` file, memory-mapped, so that it may be larger than memory."""
    with path.open("rb") as file:
        named = file.read(len(MAGIC_PREFIX)) == MAGIC_PREFIX
    if not named:  # np.load() would also try archives and pickles
        raise _not_an_array(path)
    try:
        with warnings.catch_warnings(), np.errstate(over="raise"):  # raise for shapes whose size overflows
            warnings.simplefilter("ignore", UserWarning)  # about headers written by Python 2
            found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, TypeError, ArithmeticError, TokenError) as error:
        raise _not_an_array(path) from error
    return found


def _not_an_array(path: Path) -> InputError:
    return InputError(
        f"{path}, which is not a complete .npy file of numbers",
        expected="an [n, d] array written by np.save()",
        remedy="Write it with np.save(path, vectors); pickled objects are never loaded.",
    )


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
