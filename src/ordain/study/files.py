"""Files and folders: JSON and arrays that may be damaged or edited, atomic writes, and a lock on a folder."""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import secrets
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from ordain.errors import InputError, StateError

_XZ_MEMORY = 1 << 28  # an .xz file states how much memory its reader needs: 64 MiB at the highest level of xz
REMEDY = "Delete or repair the file, and run again."
STRICT = ConfigDict(strict=True, allow_inf_nan=False)  # of types that are read from JSON


def read_bytes(path: Path, *, most: int = 1 << 28) -> bytes:
    """Read a file, decompressing ``.gz`` and ``.xz``; raises ValueError if it is damaged or has more bytes."""
    try:
        content = _decompressed(path, most + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        what = "compressed file that ends too early" if isinstance(error, EOFError) else "damaged compressed file"
        raise ValueError(f"a {what} ({error})") from error
    if len(content) > most:
        raise ValueError(f"more than {most:,} bytes")
    return content


def _decompressed(path: Path, most: int) -> bytes:
    """At most ``most`` bytes of the content."""
    if path.suffix != ".xz":
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(most)
    with path.open("rb") as file:  # lzma.open() has no limit on the memory that a file asks for
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
        data = decompressor.decompress(file.read(most), most)
        if len(data) < most and not decompressor.eof:
            raise EOFError
        if decompressor.unused_data or (decompressor.eof and file.read(1)):
            raise lzma.LZMAError("more data after its end")
    return data


def validated(kind: Any, content: bytes, where: str, *, remedy: str = REMEDY) -> Any:
    """Parse JSON and validate it as the pydantic type ``kind``; ``where`` names the source in errors."""
    try:
        return _adapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        raise InputError(f"{where}, which is not JSON", expected="one JSON object", remedy=remedy)
    name = ".".join(str(part) for part in first["loc"] if part not in ("start", "epoch", "end"))
    if first["type"] in ("missing", "missing_argument"):
        raise InputError(f"no {first['loc'][-1]!r} at {where}", expected=f"a field {name!r}", remedy=remedy)
    shown = repr(first["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    expected = first["msg"].removeprefix("Input should be ")
    raise InputError(f"{name + ' = ' if name else ''}{shown} at {where}", expected=expected, remedy=remedy)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


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
    """Write ``content`` to ``path`` atomically; its folder is created if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
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
        kind = NotADirectoryError if path.parent.exists() else FileNotFoundError
        raise kind(errno.ENOENT, "No such folder", str(path.parent))
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
