"""Where data are on disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ordain.study.data.kinds import Dataset

__all__ = ["data_dir", "find"]

_SUFFIXES = ("", ".gz", ".xz")


def data_dir(given: Path | None = None) -> Path:
    """The folder of all data sets: as given, else ``$ORDAIN_DATA``, else a folder in the user's cache."""
    if given is not None:
        return given
    if named := os.environ.get("ORDAIN_DATA"):
        return Path(named)
    home = Path.home()
    if sys.platform == "win32":
        cache = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        cache = home / "Library" / "Caches"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return cache / "ordain" / "data"


def find(dataset: Dataset, folder: Path) -> tuple[Path, dict[str, Path]]:
    """The data set's folder under ``folder``, and its files there by key.

    The first of its folders with all that is required; else the first with anything; else the first.
    """
    places = [(folder / name, _files(dataset, folder / name)) for name in dataset.folders]
    needed = {file.key for file in dataset.files if file.required}
    whole = [place for place in places if needed <= place[1].keys()]
    some = [place for place in places if place[1]]
    return (whole + some + places)[0]


def _files(dataset: Dataset, folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in dataset.files:
        paths = (folder / f"{name}{suffix}" for name in file.names for suffix in _SUFFIXES)
        path = next((path for path in paths if path.is_file()), None)
        if path is not None:
            found[file.key] = path
    return found
