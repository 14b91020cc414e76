"""The members of an archive that are wanted, and nothing else of it."""

from __future__ import annotations

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
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _refused(archive, f"a damaged archive ({error})") from None
    except (RuntimeError, NotImplementedError) as error:  # zipfile's for a password or an unknown compression
        if isinstance(error, FetchError):
            raise
        raise _refused(archive, f"an archive that cannot be read ({error})") from None
    if missing:
        raise _refused(archive, f"no {', '.join(sorted(missing))} in it")


def _untar(archive: Path, wanted: Mapping[str, tuple[Path, int]]) -> set[str]:
    missing, besides = set(wanted), 0
    with tarfile.open(archive) as tar:
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
            if name not in missing:
                raise _refused(archive, f"{name!a}, which is there twice")
            with pack.open(member) as inside:
                _save(archive, name, inside, *wanted[name])
            missing.remove(name)
    return missing


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
