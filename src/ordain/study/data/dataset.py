"""The description of a data set (its files and where they are published) and the arrays read from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ordain.study.data.data_files import FoundFiles


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
