"""All data sets by name. ``registry.json`` has where each is published, how it is verified, and its licence."""

from __future__ import annotations

import json
from functools import partial
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from ordain.errors import InputError
from ordain.study.data import readers
from ordain.study.data.data_files import Dataset, Download, File, FoundFiles, Splits, find

_READERS: dict[str, Any] = {
    "idx": readers.read_mnist,
    "cifar10": readers.read_cifar10,
    "wikitext": readers.read_wikitext,
    "glue": readers.read_glue,
    "libsvm": readers.read_binary,
    "covtype": readers.read_covtype,
    "digits": readers.read_digits,
}


def _dataset(
    name: str, files: list[Any], downloads: list[Any], *, reader: str, options: Any = None, **about: Any
) -> Dataset:
    """One entry of the registry. A download with a ``folder`` is an archive with all files in that folder."""
    read = partial(_READERS[reader], **options) if options else _READERS.get(reader)
    names = [file["names"][0] for file in files]
    for item in downloads:
        if folder := item.pop("folder", None):
            item["members"] = {f"{folder}/{member}": member for member in names}
    return Dataset(
        name=name,
        files=tuple(File(**file) for file in files),
        downloads=tuple(Download(**item) for item in downloads),
        read=read,
        **about,
    )


DATASETS: dict[str, Dataset] = {
    name: _dataset(name, **entry)
    for name, entry in json.loads(package_files(__package__).joinpath("registry.json").read_text("utf-8")).items()
}


def dataset_named(name: str) -> Dataset:
    """The entry of ``DATASETS``, or an error that lists the names."""
    if name not in DATASETS:
        raise InputError(f"data set {name!r}", expected=f"one of {', '.join(DATASETS)}", remedy="See: ordain data list")
    return DATASETS[name]


def load(name: str, folder: Path, *, verify: bool = True) -> Splits:
    """Read a data set from the data folder; InputError names a file that is missing, malformed or too large.

    ``verify=False`` reads a subset in the same format: checksums and row counts are not compared with the publisher's.
    """
    entry = dataset_named(name)
    if entry.read is None:
        raise InputError(f"{name}", expected="a data set with examples", remedy="Read it with bert_vocabulary().")
    return entry.read(_found(entry, folder, verify=verify))


def bert_vocabulary(folder: Path, *, verify: bool = True) -> tuple[str, ...]:
    """The word piece of each id in BERT's uncased vocabulary."""
    return readers.read_vocabulary(_found(dataset_named("bert-vocab"), folder, verify=verify).read("vocab"))


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
