"""A data set from its publisher to the data folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from ordain.errors import FetchError, InputError
from ordain.study.data.archives import extract
from ordain.study.data.download import download
from ordain.study.data.folder import find
from ordain.study.data.kinds import Dataset, Download
from ordain.study.data.load import check, dataset
from ordain.study.progress import Report

__all__ = ["fetch"]


def fetch(name: str, folder: Path, *, reporting: Callable[[str], AbstractContextManager[Report]]) -> Path:
    """Download what is not there yet of a data set, and read all of it as :func:`~ordain.study.data.load` does.

    Args:
        name: in ``DATASETS``.
        folder: the data folder; made if need be.
        reporting: for the name of a file, how to report how far its download has come.

    Returns:
        The folder that the files are in.
    """
    entry = dataset(name)
    if not entry.files:
        raise InputError(f"{name}", expected="a data set with files", remedy=f"Nothing to fetch: {entry.by_hand}")
    where, paths = find(entry, folder)
    if len(paths) == len(entry.files):
        check(name, folder)
        return where
    where = folder / entry.folders[0]
    where.mkdir(parents=True, exist_ok=True)
    new = [path for item in entry.downloads for path in _get(entry, item, where, reporting)]
    try:
        check(name, folder)
    except InputError as error:
        for path in new:  # what its publisher gives no checksum for is first compared here
            path.unlink()
        raise FetchError(
            f"what is not {name}: {str(error).partition('; expected')[0].removeprefix('got ')}",
            expected="the publisher's files, and nothing was kept",
            remedy="Run the same command again later, or get them by hand.",
        ) from None
    return where


def _get(
    entry: Dataset, item: Download, where: Path, reporting: Callable[[str], AbstractContextManager[Report]]
) -> list[Path]:
    """The files that ``item`` has brought: none if they were there."""
    targets = {member: where / name for member, name in (item.members or {"": item.name}).items()}
    targets = {member: path for member, path in targets.items() if not path.is_file()}  # a user's file stays
    if not targets:
        return []
    packed = where / item.name
    with reporting(item.name) as report:
        download(item, packed, report=report)
    if item.members:
        limits = {name: file.limit for file in entry.files for name in file.names}
        try:
            extract(packed, {member: (path, limits[path.name]) for member, path in targets.items()})
        except FetchError:
            packed.unlink()
            raise
        packed.unlink()
    return list(targets.values())
