"""Download a data set from its publisher."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from ordain.errors import FetchError, InputError
from ordain.study.data.data_files import Dataset, Download, find, reason
from ordain.study.data.datasets import bert_vocabulary, dataset_named, load
from ordain.study.files import replacing
from ordain.study.progress import Report

if TYPE_CHECKING:
    from requests import Response

_CHUNK = 1 << 18
_RETRIES = 3
_TIMEOUT = 60  # seconds without a byte
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_AGAIN = "Run the same command again"


def fetch(name: str, folder: Path, *, reporting: Callable[[str], AbstractContextManager[Report]]) -> Path:
    """Download the missing files of a data set, and verify all of it as :func:`~ordain.study.data.load` does.

    ``reporting`` gives, for a file name, a context that reports its download. Returns the folder that holds the files.
    """
    entry = dataset_named(name)
    if not entry.files:
        raise InputError(f"{name}", expected="a data set with files", remedy=f"Nothing to fetch: {entry.by_hand}")
    where, paths = find(entry, folder)
    new: list[Path] = []
    if len(paths) < len(entry.files):
        where = folder / entry.folders[0]
        where.mkdir(parents=True, exist_ok=True)
        new = [path for item in entry.downloads for path in _get(entry, item, where, reporting)]
    try:
        bert_vocabulary(folder) if entry.read is None else load(name, folder)
    except InputError as error:
        if not new:
            raise
        for path in new:  # files without a published checksum are checked here for the first time
            path.unlink()
        raise FetchError(
            f"something other than {name}: {str(error).partition('; expected')[0].removeprefix('got ')}",
            expected="the publisher's files, and nothing was kept",
            remedy=f"{_AGAIN} later, or download the files by hand.",
        ) from None
    return where


def _get(
    entry: Dataset, item: Download, where: Path, reporting: Callable[[str], AbstractContextManager[Report]]
) -> list[Path]:
    """Download one file, and extract it if it is an archive. Returns the new files; existing ones are kept."""
    targets = {member: where / name for member, name in (item.members or {"": item.name}).items()}
    targets = {member: path for member, path in targets.items() if not path.is_file()}
    if targets:
        with reporting(item.name) as report:
            download(item, where / item.name, report=report)
    if targets and item.members:
        try:
            extract(where / item.name, targets)
        finally:
            (where / item.name).unlink()
    return list(targets.values())


def extract(archive: Path, wanted: Mapping[str, Path]) -> None:
    """Copy members of a tar or zip file to the given paths; nothing is written to a path that comes from the archive.

    The archive is one whose checksum :func:`download` has compared, so it is what the publisher made.
    """
    try:
        with zipfile.ZipFile(archive) if archive.suffix == ".zip" else tarfile.open(archive) as file:
            for member, target in wanted.items():
                inside = file.open(member) if isinstance(file, zipfile.ZipFile) else file.extractfile(member)
                if inside is None:
                    raise KeyError(f"{member} is a folder")
                with inside, replacing(target) as new:
                    shutil.copyfileobj(inside, new)
    except (KeyError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise FetchError(
            f"{archive}: {reason(error)}",
            expected=f"an archive with {', '.join(wanted)}",
            remedy=f"It was removed. {_AGAIN}, or download the files by hand.",
        ) from None


def download(item: Download, target: Path, *, report: Report) -> None:
    """Save ``item`` as ``target``: pooch retries, checks the checksum, and only then moves the file into place."""
    import pooch
    import requests

    _check_url(item, item.url)
    if item.members and item.digest is None:
        raise FetchError(
            f"the archive {item.url} without a checksum",
            expected="one in registry.json: an archive is opened only if it is the publisher's",
            remedy="Add it, or download the files by hand.",
        )
    pooch.get_logger().setLevel("WARNING")
    store = pooch.create(
        target.parent, "", registry={target.name: item.digest}, urls={target.name: item.url}, retry_if_failed=_RETRIES
    )
    by_hand = f"download the file by hand and save it as {target}."
    try:
        store.fetch(target.name, downloader=lambda url, temporary, _: _transfer(item, Path(temporary), report))
        target.chmod(0o644)  # a data folder may be shared; pooch creates files that only their owner can read
    except requests.RequestException as error:
        cause: BaseException = error
        while cause.__context__:  # the first of a chain of errors says in few words what happened
            cause = cause.__context__
        raise FetchError(
            f"no complete file from {item.url} ({cause})",
            expected="a stable connection",
            remedy=f"{_AGAIN} later, or {by_hand}",
        ) from None
    except ValueError as error:
        raise FetchError(
            f"a file with another checksum from {item.url} ({error})",
            expected=f"{item.digest}, and nothing was kept",
            remedy=f"If it happens again, the publisher has changed the file: {by_hand}",
        ) from None
    except OSError as error:
        raise FetchError(
            f"{error} while writing {target}",
            expected=f"space for up to {item.limit:,} bytes",
            remedy="Free some space, or choose another folder with --data-dir.",
        ) from None


def _transfer(item: Download, temporary: Path, report: Report) -> None:
    import requests

    def check(response: Response, **_: Any) -> None:
        """Called for the response and for every redirect on the way."""
        response.raw.headers.pop("Content-Encoding", None)  # keep the file as it is stored, even if that is compressed
        try:
            if response.is_redirect:
                _check_url(item, response.url, redirect=response.headers["Location"])
            elif 400 <= response.status_code < 500:  # retrying does not help
                raise FetchError(
                    f"HTTP {response.status_code} for {item.url}",
                    expected="the file",
                    remedy=f"The publisher may have moved it: download {item.name} by hand.",
                )
        except FetchError:
            response.close()
            raise

    headers = {"User-Agent": "ordain", "Accept-Encoding": "identity"}
    with (
        requests.get(item.url, stream=True, timeout=_TIMEOUT, headers=headers, hooks={"response": check}) as response,
        temporary.open("wb") as file,
    ):
        response.raise_for_status()
        length = response.headers.get("Content-Length", "")
        total, done = int(length) if length.isdecimal() else 0, 0
        for piece in response.iter_content(_CHUNK):
            done += len(piece)
            if max(done, total) > item.limit:
                raise FetchError(
                    f"{max(done, total):,} bytes from {item.url}",
                    expected=f"at most {item.limit:,}",
                    remedy=f"The publisher has changed the file: download {item.name} by hand.",
                )
            file.write(piece)
            if total:
                report(done, total)


def _check_url(item: Download, url: str, *, redirect: str = "") -> None:
    """Refuse everything but https, and http where a checksum makes up for it."""
    try:
        address = urlsplit(urljoin(url, redirect))
    except ValueError:  # not an address
        address = urlsplit("")
    if address.scheme == "https" or (
        address.scheme == "http" and (item.digest is not None or address.hostname in _LOOPBACK)
    ):
        return
    raise FetchError(
        f"the address {redirect or url}",
        expected="https, or http for a file with a known checksum",
        remedy=f"Download {item.name} by hand.",
    )
