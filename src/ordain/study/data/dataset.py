"""The description of a data set (its files and where they are published) and the arrays read from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ordain.study.data.data_files import FoundFiles

__all__ = ["Dataset", "Download", "File", "Labelled", "Splits"]


@dataclass(frozen=True)
class Labelled:
    """Examples and their labels.

    Attributes:
        x: an array with one row per example or, for sentences, a list of tuples of one or two texts.
        y: int64 ``[n]``. For running text this is ``x`` itself, because the targets are the next words.
    """

    x: NDArray[Any] | list[tuple[str, ...]]
    y: NDArray[np.int64]


@dataclass(frozen=True)
class Splits:
    """A data set in its publisher's splits; None for a split that does not exist or has no labels.

    Attributes:
        notes: sentences that belong next to results on this data.
        vocabulary: for running text, the word of each id.
    """

    train: Labelled
    test: Labelled | None = None
    valid: Labelled | None = None
    notes: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class File:
    """A file to read, plain or compressed (``.gz``, ``.xz``).

    Attributes:
        key: the name by which the reader asks for it.
        names: its possible names on disk, without ``.gz`` or ``.xz``.
        limit: the largest decompressed size in bytes.
        digest: ``"sha256:..."`` or ``"md5:..."`` of the decompressed content.
        rows: the number of examples (or words, for running text).
        required: whether the data set cannot be read without it.
    """

    key: str
    names: Sequence[str]
    limit: int = 100_000_000
    digest: str | None = None
    rows: int | None = None
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file on a publisher's server.

    Attributes:
        url: https, or http together with a digest.
        name: the file name to save it under.
        limit: the largest size in bytes.
        digest: ``"sha256:..."`` or ``"md5:..."`` of the file as sent.
        members: for a tar or zip archive, the members to extract and the file name of each; the rest is ignored.
    """

    url: str
    name: str
    limit: int = 200_000_000
    digest: str | None = None
    members: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One data set.

    Attributes:
        name: on the command line.
        title: a description in a few words.
        folders: where to look for it inside the data folder; ``fetch`` downloads to the first.
        files: the files to read.
        licence: the publisher's terms of use.
        counts: the number of examples (or words, for running text) in train, valid and test.
        read: reads the examples; None for a vocabulary, which has none.
        downloads: where the files are published.
        by_hand: how to get it if there is nothing to download.
    """

    name: str
    title: str
    folders: Sequence[str]
    files: tuple[File, ...]
    licence: str
    counts: Mapping[str, int]
    read: Callable[[FoundFiles], Splits] | None
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""

    @property
    def remedy(self) -> str:
        """How to get it."""
        return f"run: ordain data fetch {self.name}" if self.downloads else self.by_hand
