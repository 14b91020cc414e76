"""What a data set is: its files, where they come from, and what is read from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ordain.study.data.content import Shelf

__all__ = ["Dataset", "Download", "File", "Labelled", "Splits"]


@dataclass(frozen=True)
class Labelled:
    """Examples and their labels.

    Attributes:
        x: an array with one row an example or, for sentences, a list of one or two texts an example.
        y: int64 ``[n]``. For running text the very array of ``x``: its targets are its own next words.
    """

    x: NDArray[Any] | list[tuple[str, ...]]
    y: NDArray[np.int64]


@dataclass(frozen=True)
class Splits:
    """A data set as its publisher divides it; None where there is no such part (with labels).

    Attributes:
        notes: what a reader of results should know of how this was made, as sentences.
        vocabulary: for running text, the word of each id.
    """

    train: Labelled
    test: Labelled | None = None
    valid: Labelled | None = None
    notes: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] | None = None


@dataclass(frozen=True)
class File:
    """A file that is read, plain or compressed (``.gz``, ``.xz``).

    Attributes:
        key: what the reader calls it.
        names: what it may be called on disk, without ``.gz`` or ``.xz``.
        limit: the most bytes its content may have; what decompresses to more is refused.
        digest: ``"sha256:..."`` or ``"md5:..."`` of the *content*, so that it holds however the file is compressed.
        rows: examples (or words, for running text) in it.
        required: whether the data set can be read without it.
    """

    key: str
    names: tuple[str, ...]
    limit: int
    digest: str | None = None
    rows: int | None = None
    required: bool = True


@dataclass(frozen=True)
class Download:
    """A file that a publisher offers.

    Attributes:
        url: where it is. https, or http together with a digest.
        name: what it is saved as.
        limit: the most bytes it may have.
        digest: ``"sha256:..."`` or ``"md5:..."`` of the file as it is sent.
        members: for an archive (tar or zip), the members to take out and what to save each as; nothing else is.
    """

    url: str
    name: str
    limit: int
    digest: str | None = None
    members: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Dataset:
    """One data set.

    Attributes:
        name: on the command line.
        title: what it is, in a few words.
        folders: where under the data folder it is looked for; the first is where it is fetched to.
        files: what is read.
        licence: what its publisher says on use.
        counts: examples (or words, for running text) in train, valid and test.
        read: from its files to examples; None for a list of words without examples.
        downloads: where it comes from.
        by_hand: how to get it where there is nothing to download.
    """

    name: str
    title: str
    folders: tuple[str, ...]
    files: tuple[File, ...]
    licence: str
    counts: Mapping[str, int]
    read: Callable[[Shelf], Splits] | None
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""

    @property
    def remedy(self) -> str:
        """How to get it."""
        return f"run: ordain data fetch {self.name}" if self.downloads else self.by_hand
