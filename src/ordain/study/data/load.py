"""From a name to examples."""

from __future__ import annotations

from pathlib import Path

from ordain.errors import InputError
from ordain.study.data.catalogue import DATASETS
from ordain.study.data.content import Shelf
from ordain.study.data.folder import find
from ordain.study.data.kinds import Dataset, Splits
from ordain.study.data.vocabulary import read_vocabulary

__all__ = ["bert_vocabulary", "check", "dataset", "load", "wikitext_vocabulary"]


def dataset(name: str) -> Dataset:
    """The entry of that name."""
    if name not in DATASETS:
        raise InputError(f"data set {name!r}", expected=f"one of {', '.join(DATASETS)}", remedy="See: ordain data list")
    return DATASETS[name]


def load(name: str, folder: Path, *, verify: bool = True) -> Splits:
    """Read a data set.

    Args:
        name: in ``DATASETS``.
        folder: the data folder, from :func:`~ordain.study.data.data_dir`.
        verify: compare checksums and row counts with the publisher's. Without, a subset in the same format is
            read; what its files are made of is checked all the same.

    Raises:
        InputError: for a file that is missing, truncated, wrong, or larger than it may be, with its name.
    """
    entry = dataset(name)
    if entry.read is None:
        raise InputError(f"{name}", expected="a data set with examples", remedy="Read it with bert_vocabulary().")
    return entry.read(_shelf(entry, folder, verify=verify))


def wikitext_vocabulary(folder: Path, *, verify: bool = True) -> tuple[str, ...]:
    """The word of each id in WikiText-2."""
    return load("wikitext2", folder, verify=verify).vocabulary or ()


def bert_vocabulary(folder: Path, *, verify: bool = True) -> tuple[str, ...]:
    """The word piece of each id in BERT's uncased vocabulary."""
    return read_vocabulary(_shelf(dataset("bert-vocab"), folder, verify=verify).read("vocab"))


def check(name: str, folder: Path) -> None:
    """Read a data set for its errors alone."""
    if dataset(name).read is None:
        bert_vocabulary(folder)
    else:
        load(name, folder)


def _shelf(entry: Dataset, folder: Path, *, verify: bool) -> Shelf:
    where, paths = find(entry, folder)
    missing = [file.names[0] for file in entry.files if file.required and file.key not in paths]
    if missing:
        remedy = entry.remedy[:1].upper() + entry.remedy[1:]
        raise InputError(
            f"no {', '.join(missing)} in {where}",
            expected=f"the files of {entry.name}, plain, .gz or .xz",
            remedy=f"{remedy} or name the folder of your data by --data-dir or $ORDAIN_DATA.",
        )
    return Shelf(entry, paths, verify=verify)
