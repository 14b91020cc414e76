"""The members of an archive that are wanted, and nothing else of it."""

from __future__ import annotations

import errno
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

from ordain.errors import FetchError
from ordain.study.files import replacing

__all__ = ["extract"]

_CHUNK = 1 << 20
_BESIDES = 10_000_000  # bytes of members that are not wanted: read-me files and the like


def extract(archive: Path, wanted: Mapping[str, tuple[Path, int]]) -> None:
    """Save members of a tar or zip file.

    No path of the archive is ever written to: members are copied to where ``wanted`` says. An archive with a member
    that would leave its folder, or a link in the place of a wanted file, is refused.

    Args:
        archive: a ``.zip`` file, or a tar file.
        wanted: for each member, where to save it and the most bytes it may have.
    """
    try:
        missing = (_unzip if archive.suffix == ".zip" else _untar)(archive, wanted)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise _refused(archive, f"a damaged archive ({_first_line(error)})") from None
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile) or error.errno == errno.EINVAL:  # a place before the file's beginning
            raise _refused(archive, f"a damaged archive ({_first_line(error)})") from None
        raise
    except (RuntimeError, NotImplementedError) as error:  # zipfile's for a password or an unknown compression
        if isinstance(error, FetchError):
            raise
        raise _refused(archive, f"an archive that cannot be read ({_first_line(error)})") from None
    if missing:
        raise _refused(archive, f"no {', '.join(sorted(missing))} in it")


def _untar(archive: Path, wanted: Mapping[str, tuple[Path, int]]) -> set[str]:
    missing, besides = set(wanted), 0
    with _opened(archive) as file, tarfile.open(fileobj=_Measured(file), mode="r:") as tar:
        for member in tar:
            name = _safe(archive, member.name)
            if name not in wanted:
                besides += member.size
                if besides > _BESIDES:  # each is decompressed on the way to the next
                    raise _refused(archive, f"more than {_BESIDES:,} bytes that are not wanted")
                continue
            inside = tar.extractfile(member) if member.isreg() else None
            if inside is None or name not in missing:
                raise _refused(archive, f"{name!a}, which is a link, or there twice")
            _save(archive, name, inside, *wanted[name])
            missing.remove(name)
    return missing


def _unzip(archive: Path, wanted: Mapping[str, tuple[Path, int]]) -> set[str]:
    missing = set(wanted)
    with zipfile.ZipFile(archive) as pack:
        for member in pack.infolist():
            name = _safe(archive, member.filename)
            if name not in wanted:
                continue
            if name not in missing or member.is_dir():
                raise _refused(archive, f"{name!a}, which is a folder, or there twice")
            with pack.open(member) as inside:
                _save(archive, name, inside, *wanted[name])
            missing.remove(name)
    return missing


def _opened(archive: Path) -> IO[bytes]:
    with archive.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(archive) if packed else archive.open("rb")  # type: ignore[return-value]


class _Measured(io.RawIOBase):
    """What tarfile reads from: a header that announces a name of gigabytes is not read into memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= 2 * _CHUNK:
            raise tarfile.ReadError(f"{size:,} bytes to be read at once")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _first_line(error: Exception) -> str:
    return ascii((str(error).splitlines() or [type(error).__name__])[0][:120])[1:-1]


def _safe(archive: Path, name: str) -> str:
    """The name in one form; refused if it leads out of the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or PureWindowsPath(name).drive or ".." in path.parts or "\\" in name:
        raise _refused(archive, f"a member {name[:80]!a} that leads out of its folder")
    return str(path)


def _save(archive: Path, name: str, inside: IO[bytes], target: Path, limit: int) -> None:
    size = 0
    with replacing(target) as file:
        while piece := inside.read(_CHUNK):
            size += len(piece)
            if size > limit:
                raise _refused(archive, f"a {name!a} of more than {limit:,} bytes")
            file.write(piece)


def _refused(archive: Path, what: str) -> FetchError:
    return FetchError(
        f"{archive}: {what}",
        expected="the publisher's archive",
        remedy="It was removed. Run the same command again, or get the files by hand.",
    )
