"""The description of a data set, and its files: find them on disk, decompress up to a size limit, and verify."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from numpy.typing import NDArray

from ordain.errors import InputError
from ordain.study.files import read_bytes

_SUFFIXES = ("", ".gz", ".xz")
_SHOWN, _REASON = 40, 80  # characters in messages
_verified: set[tuple[str, int, int, str]] = set()  # (path, bytes, mtime, digest) of this process


@dataclass(frozen=True)
class Labelled:
    """Examples and their labels."""

    x: NDArray[Any] | list[tuple[str, ...]]  # one row per example or, for sentences, one or two texts per example
    y: NDArray[np.int64]  # [n]; for running text x itself, because the targets are the next words


@dataclass(frozen=True)
class Splits:
    """A data set in its publisher's splits; None for a split that does not exist or has no labels."""

    train: Labelled
    test: Labelled | None = None
    valid: Labelled | None = None
    notes: tuple[str, ...] = ()  # sentences that belong next to results on this data
    vocabulary: tuple[str, ...] | None = None  # for running text, the word of each id


@dataclass(frozen=True, kw_only=True)
class File:
    """A file to read, plain or compressed (``.gz``, ``.xz``)."""

    key: str  # the name by which the reader asks for it
    names: Sequence[str]  # its possible names on disk, without .gz or .xz
    limit: int = 100_000_000  # the largest decompressed size in bytes
    digest: str | None = None  # "sha256:..." or "md5:..." of the decompressed content
    rows: int | None = None  # the number of examples (or words, for running text)
    required: bool = True  # whether the data set cannot be read without it


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file on a publisher's server."""

    url: str  # https, or http together with a digest
    name: str  # the file name to save it under
    limit: int = 200_000_000  # the largest size in bytes
    digest: str | None = None  # "sha256:..." or "md5:..." of the file as sent
    members: Mapping[str, str] = field(default_factory=dict)  # of an archive: what to extract, and its file name


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One data set."""

    name: str  # on the command line
    title: str
    folders: Sequence[str]  # where to look for it inside the data folder; ``fetch`` downloads to the first
    files: tuple[File, ...]
    licence: str
    counts: Mapping[str, int]  # the number of examples (or words) in train, valid and test
    read: Callable[[FoundFiles], Splits] | None  # None for a vocabulary, which has no examples
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""  # how to get it if there is nothing to download

    @property
    def remedy(self) -> str:
        """How to get it."""
        return f"run: ordain data fetch {self.name}" if self.downloads else self.by_hand


def data_dir(given: Path | None = None) -> Path:
    """The folder of all data sets: ``given``, else ``$ORDAIN_DATA``, else ``ordain/data`` in the user's cache."""
    if given is not None:
        return given
    named = os.environ.get("ORDAIN_DATA")
    return Path(named) if named else platformdirs.user_cache_path("ordain", appauthor=False, opinion=False) / "data"


def find(dataset: Dataset, folder: Path) -> tuple[Path, dict[str, Path]]:
    """The data set's own folder inside ``folder``, and the files found there by key.

    Prefers a folder with all required files, then one with any file, then the first of the data set's folders.
    """
    places = [(folder / name, _present(dataset, folder / name)) for name in dataset.folders]
    required = {file.key for file in dataset.files if file.required}
    return max(places, key=lambda place: (required <= place[1].keys(), bool(place[1])))  # the first of equals


def _present(dataset: Dataset, folder: Path) -> dict[str, Path]:
    found = {}
    for file in dataset.files:
        paths = (folder / f"{name}{suffix}" for name in file.names for suffix in _SUFFIXES)
        if path := next((path for path in paths if path.is_file()), None):
            found[file.key] = path
    return found


def brief(raw: bytes | str) -> str:
    """Part of a file, escaped and shortened so that it is safe to print."""
    return ascii(raw[:_SHOWN]) + ("..." if len(raw) > _SHOWN else "")


def reason(error: Exception) -> str:
    """The message of another library's error, which may quote the file, likewise."""
    return ascii(str(error) or type(error).__name__)[1:-1][:_REASON]


@dataclass(frozen=True)
class FileContent:
    """The decompressed bytes of one file, with what its reader needs for error messages."""

    data: bytes
    path: Path
    remedy: str
    rows: int | None = None  # to expect; None to accept any number

    def wrong(self, what: str, *, expected: str) -> InputError:
        """The error to raise for something in this file."""
        return InputError(f"{self.path}: {what}", expected=expected, remedy=self.remedy)

    def count(self, found: int) -> None:
        """Refuse a file with a different number of rows than the publisher's."""
        if self.rows is not None and found != self.rows:
            raise self.wrong(f"{found:,} rows", expected=f"{self.rows:,}")

    def lines(self) -> list[str]:
        """The lines of a text file in UTF-8."""
        try:
            text = self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = self.data.count(b"\n", 0, error.start) + 1
            piece = brief(self.data[error.start : error.start + 8])
            raise self.wrong(f"bytes {piece} in line {line:,}", expected="text in UTF-8") from None
        return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


@dataclass(frozen=True)
class FoundFiles:
    """The files of a data set that were found on disk, as its reader gets them."""

    dataset: Dataset
    paths: dict[str, Path]  # by the key of the file
    verify: bool = True  # compare checksums and row counts with the publisher's; the format is always checked

    def __contains__(self, key: object) -> bool:
        return key in self.paths

    def read(self, key: str) -> FileContent:
        """Decompress one file, and verify its checksum."""
        file = next(file for file in self.dataset.files if file.key == key)
        remedy = f"Remove it and {self.dataset.remedy}"
        if self.verify:
            remedy += ". To read your own subset, use --no-verify (verify=False)."
        path, expected = self.paths[key], f"a whole file of at most {file.limit:,} bytes"
        try:
            data = read_bytes(path, most=file.limit)
        except ValueError as error:
            raise InputError(f"{path}: {error}", expected=expected, remedy=remedy) from None
        content = FileContent(data, path, remedy, file.rows if self.verify else None)
        if self.verify:
            _check_digest(content, file)
        return content


def _check_digest(content: FileContent, file: File) -> None:
    if file.digest is None:
        return
    stat = content.path.stat()
    known = (str(content.path.resolve()), stat.st_size, stat.st_mtime_ns, file.digest)
    if known in _verified:
        return
    algorithm, _, expected = file.digest.partition(":")
    found = hashlib.new(algorithm, content.data, usedforsecurity=False).hexdigest()
    if found != expected:
        raise content.wrong(f"content with {algorithm} {found}", expected=f"{expected}, the publisher's")
    _verified.add(known)
