"""Read a data set by name."""

from __future__ import annotations

from pathlib import Path

from ordain.errors import InputError
from ordain.study.data.data_files import FoundFiles, find
from ordain.study.data.dataset import Dataset, Splits
from ordain.study.data.datasets import DATASETS
from ordain.study.data.text_formats import read_vocabulary

__all__ = ["bert_vocabulary", "dataset_named", "load"]


def dataset_named(name: str) -> Dataset:
    """The entry of ``DATASETS``, or an error that lists the names."""
    if name not in DATASETS:
        raise InputError(f"data set {name!r}", expected=f"one of {', '.join(DATASETS)}", remedy="See: ordain data list")
    return DATASETS[name]


def load(name: str, folder: Path, *, verify: bool = True) -> Splits:
    """Read a data set.

    Args:
        name: in ``DATASETS``.
        folder: the data folder, from :func:`~ordain.study.data.data_dir`.
        verify: compare checksums and row counts with the publisher's. Pass False to read a subset in the same
            format; the format is checked all the same.

    Raises:
        InputError: a file is missing, truncated, malformed or too large. The message names the file.
    """
    entry = dataset_named(name)
    if entry.read is None:
        raise InputError(f"{name}", expected="a data set with examples", remedy="Read it with bert_vocabulary().")
    return entry.read(_found(entry, folder, verify=verify))


def bert_vocabulary(folder: Path, *, verify: bool = True) -> tuple[str, ...]:
    """The word piece of each id in BERT's uncased vocabulary."""
    return read_vocabulary(_found(dataset_named("bert-vocab"), folder, verify=verify).read("vocab"))


def _found(entry: Dataset, folder: Path, *, verify: bool) -> FoundFiles:
    where, paths = find(entry, folder)
    missing = [file.names[0] for file in entry.files if file.required and file.key not in paths]
    if missing:
        raise InputError(
            f"no {', '.join(missing)} in {where}",
            expected=f"the files of {entry.name}, plain, .gz or .xz",
            remedy=f"{entry.remedy[:1].upper()}{entry.remedy[1:]} or set --data-dir or $ORDAIN_DATA to your data.",
        )
    return FoundFiles(entry, paths, verify=verify)
