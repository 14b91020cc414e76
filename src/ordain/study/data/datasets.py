"""All data sets by name, from ``registry.json``: where each is published, how it is verified, and its licence."""

from __future__ import annotations

import json
from functools import partial
from importlib.resources import files as package_files
from typing import Any

from ordain.study.data.dataset import Dataset, Download, File
from ordain.study.data.image_formats import read_cifar10, read_mnist
from ordain.study.data.table_formats import read_binary, read_covtype, read_digits
from ordain.study.data.text_formats import read_qnli, read_sst2, read_wikitext

__all__ = ["DATASETS"]

_READERS: dict[str, Any] = {
    "idx": read_mnist,
    "cifar10": read_cifar10,
    "wikitext": read_wikitext,
    "sst2": read_sst2,
    "qnli": read_qnli,
    "libsvm": read_binary,
    "covtype": read_covtype,
    "digits": read_digits,
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
