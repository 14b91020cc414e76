"""Files in and out: vectors that are never unpickled, and outputs that are whole or not there."""

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
    """The array of a ``.npy`` file, memory-mapped: larger ones than memory can be herded."""
    with path.open("rb") as file:
        named = file.read(len(MAGIC_PREFIX)) == MAGIC_PREFIX
    if not named:  # np.load() would try archives and pickles next
        raise _not_an_array(path)
    try:
        with warnings.catch_warnings(), np.errstate(over="raise"):  # of a shape whose product is beyond any number
            warnings.simplefilter("ignore", UserWarning)  # on headers as Python 2 wrote them
            found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, TypeError, ArithmeticError, TokenError) as error:
        raise _not_an_array(path) from error
    return found


def _not_an_array(path: Path) -> InputError:
    return InputError(
        f"{path}, which is no whole .npy file of numbers",
        expected="an [n, d] array as np.save() writes it",
        remedy="Write it with np.save(path, vectors); pickled objects are never loaded.",
    )


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, whole or not at all."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` only when the block ends without an error.

    Open it before long work: a folder that cannot be written is then found at once. A process that is killed
    leaves ``path`` as it was, and ``.NAME.*.tmp`` beside it.
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
