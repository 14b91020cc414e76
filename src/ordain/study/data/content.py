"""The bytes of a data file: decompressed under a limit, compared with its checksum, blamed by name."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ordain.errors import InputError
from ordain.study.data.kinds import Dataset

__all__ = ["Content", "Shelf", "shown"]

_CHUNK = 1 << 20
_XZ_MEMORY = 1 << 28  # an .xz file names the memory that its reader must take: 64 MiB at xz's highest level
_SHOWN = 40
_verified: set[tuple[str, int, int, str]] = set()  # (path, bytes, mtime, digest) of this process


def shown(raw: bytes | str) -> str:
    """A piece of a file that is safe to print: escaped and short."""
    return ascii(raw if len(raw) <= _SHOWN else raw[:_SHOWN]) + ("..." if len(raw) > _SHOWN else "")


@dataclass(frozen=True)
class Content:
    """The bytes of one file, and who to blame for them.

    Attributes:
        rows: how many there must be; None if that is not to be compared.
    """

    data: bytes
    path: Path
    remedy: str
    rows: int | None = None

    def wrong(self, what: str, *, expected: str) -> InputError:
        """The error to raise for something in this file."""
        return InputError(f"{self.path}: {what}", expected=expected, remedy=self.remedy)

    def count(self, found: int) -> None:
        """Refuse a file of another length than the publisher's."""
        if self.rows is not None and found != self.rows:
            raise self.wrong(f"{found:,} rows", expected=f"{self.rows:,}")


@dataclass(frozen=True)
class Shelf:
    """The files of a data set that were found on disk, for its reader.

    Attributes:
        paths: by the key of the file.
        verify: compare checksums and counts with the publisher's. What a file is made of is always checked.
    """

    dataset: Dataset
    paths: dict[str, Path]
    verify: bool = True

    def __contains__(self, key: object) -> bool:
        return key in self.paths

    def read(self, key: str) -> Content:
        """The content of one file."""
        file = next(file for file in self.dataset.files if file.key == key)
        path = self.paths[key]
        remedy = f"Remove it and {self.dataset.remedy}"
        if self.verify:
            remedy += ". A subset of your own is read with --no-verify (verify=False)."
        blank = Content(b"", path, remedy)
        data = b"".join(_chunks(blank, file.limit))
        if self.verify and file.digest is not None:
            self._check(blank, data, file.digest)
        return Content(data, path, remedy, file.rows if self.verify else None)

    def _check(self, blank: Content, data: bytes, digest: str) -> None:
        about = blank.path.stat()
        known = (str(blank.path.resolve()), about.st_size, about.st_mtime_ns, digest)
        if known in _verified:
            return
        kind, _, expected = digest.partition(":")
        found = hashlib.new(kind, data, usedforsecurity=False).hexdigest()
        if found != expected:
            raise blank.wrong(f"content with {kind} {found}", expected=f"{expected}, the publisher's")
        _verified.add(known)


def _chunks(blank: Content, limit: int) -> Iterator[bytes]:
    """The content in pieces; never more than ``limit`` bytes and a piece are held for a file that is larger."""
    if not blank.path.is_file():
        raise blank.wrong("no regular file", expected="a file")
    total = 0
    with blank.path.open("rb") as file:
        pieces = {".gz": _unzip, ".xz": _unxz}.get(blank.path.suffix, _plain)(file)
        try:
            for piece in pieces:
                total += len(piece)
                if total > limit:
                    raise blank.wrong(f"more than {limit:,} bytes", expected=f"at most {limit:,}")
                yield piece
        except EOFError:
            raise blank.wrong("a compressed file that breaks off", expected="a whole one") from None
        except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            raise blank.wrong(f"a damaged compressed file ({error})", expected="a whole one") from None


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_CHUNK):
        yield piece


def _unzip(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as inside:
        while piece := inside.read(_CHUNK):
            yield piece


def _unxz(file: BinaryIO) -> Iterator[bytes]:
    """By hand, since ``lzma.open`` sets no limit to the memory that a file asks for."""
    machine = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
    while not machine.eof:
        given = b""
        if machine.needs_input:
            given = file.read(_CHUNK)
            if not given:
                raise EOFError
        yield machine.decompress(given, _CHUNK)
    if machine.unused_data or file.read(1):
        raise lzma.LZMAError("more after its end")
