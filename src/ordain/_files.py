"""Files that are whole or not there: written beside, then put in place."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["replacing"]


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
