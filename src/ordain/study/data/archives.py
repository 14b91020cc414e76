"""Extract the expected members of an archive, and nothing else."""

from __future__ import annotations

import errno
import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

from ordain.errors import FetchError
from ordain.study.data.data_files import reason
from ordain.study.files import replacing

_CHUNK = 1 << 20
_UNWANTED = 10_000_000  # bytes of other members, such as read-me files, that are decompressed on the way
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, OSError)
_Member = tuple[str, int, Callable[[], IO[bytes] | None] | None]  # name, bytes to skip it, open() of a regular file


def extract(archive: Path, wanted: Mapping[str, tuple[Path, int]]) -> None:
    """Save members of a tar or zip file.

    Nothing is written to a path that comes from the archive: members are copied to the paths in ``wanted``. An archive
    with a member that leads out of its folder, or with a link in place of a wanted file, is refused.

    Args:
        archive: a ``.zip`` file or a tar file.
        wanted: for each member, where to save it and its largest size in bytes.
    """
    missing, unwanted = set(wanted), 0
    try:
        with closing((_zip_members if archive.suffix == ".zip" else _tar_members)(archive)) as members:
            for full_name, size, open_member in members:
                path = PurePosixPath(full_name)
                if path.is_absolute() or PureWindowsPath(full_name).drive or ".." in path.parts or "\\" in full_name:
                    raise _refused(archive, f"a member {full_name[:80]!a} that leads out of its folder")
                name = str(path)
                if name not in wanted:
                    unwanted += size
                    if unwanted > _UNWANTED:
                        raise _refused(archive, f"more than {_UNWANTED:,} bytes that are not wanted")
                    continue
                inside = open_member() if open_member and name in missing else None
                if inside is None:
                    raise _refused(archive, f"{name!a}, which is a link or a folder, or there twice")
                target, limit = wanted[name]
                with inside, replacing(target) as file:
                    while piece := inside.read(_CHUNK):
                        if file.tell() + len(piece) > limit:
                            raise _refused(archive, f"a {name!a} of more than {limit:,} bytes")
                        file.write(piece)
                missing.remove(name)
    except _DAMAGED as error:
        # gzip raises an OSError for a damaged file, and the system one (EINVAL) for an offset before its start.
        of_disk = isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile) and error.errno != errno.EINVAL
        if of_disk or isinstance(error, FetchError):
            raise
        raise _refused(archive, f"a damaged archive that cannot be read ({reason(error)})") from None
    if missing:
        raise _refused(archive, f"no {', '.join(sorted(missing))} in it")


def _tar_members(archive: Path) -> Generator[_Member]:
    with archive.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        file = gzip.GzipFile(fileobj=raw) if packed else raw
        with tarfile.open(fileobj=_BoundedReads(file), mode="r:") as tar:
            for member in tar:
                yield member.name, member.size, partial(tar.extractfile, member) if member.isreg() else None


def _zip_members(archive: Path) -> Generator[_Member]:
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            yield member.filename, 0, None if member.is_dir() else partial(file.open, member)


class _BoundedReads(io.RawIOBase):
    """A file for tarfile that refuses huge reads, such as a header that announces a name of gigabytes."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= 2 * _CHUNK:
            raise tarfile.ReadError(f"{size:,} bytes to be read at once")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _refused(archive: Path, what: str) -> FetchError:
    return FetchError(
        f"{archive}: {what}",
        expected="the publisher's archive",
        remedy="It was removed. Run the same command again, or download the files by hand.",
    )
