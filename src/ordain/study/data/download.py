"""One file over the network: resumed where it broke off, compared with its checksum, whole or not there."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from ordain.errors import FetchError
from ordain.study.data.kinds import Download
from ordain.study.progress import Report

__all__ = ["download"]

_CHUNK = 1 << 18
_TRIES = 4
_TIMEOUT = 60  # seconds without a byte
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_AGAIN = "Run the same command again"


def download(item: Download, target: Path, *, report: Report) -> None:
    """Save ``item`` as ``target``. What a transfer that broke off has left in ``target``.part is gone on with.

    Without a checksum to compare the whole with, pieces of two transfers are not put together.
    """
    _check_address(item.url, item)
    if item.digest is not None and target.is_file() and _digest(target, item) == item.digest:
        return
    part = target.with_name(f"{target.name}.part")
    if item.digest is None:
        part.unlink(missing_ok=True)
    if not (part.is_file() and _digest(part, item) == item.digest):
        _transfer(item, part, report)
        found = _digest(part, item)
        if found != item.digest:
            part.unlink()
            raise FetchError(
                f"a file with {found} from {item.url}",
                expected=f"{item.digest}, and nothing was kept",
                remedy=f"{_AGAIN}; if it happens twice, the publisher has changed the file.",
            )
    part.replace(target)


def _transfer(item: Download, part: Path, report: Report) -> None:
    for _ in range(_TRIES):
        if _ask(item, part, report):
            return
        if item.digest is None:
            part.unlink(missing_ok=True)
    have = part.stat().st_size if part.is_file() else 0
    raise FetchError(
        f"a connection to {item.url} that broke off {_TRIES} times, after {have:,} bytes",
        expected="the whole file",
        remedy=f"{_AGAIN}: it goes on from there." if have else f"{_AGAIN} later.",
    )


def _ask(item: Download, part: Path, report: Report) -> bool:
    """One request for what is not there yet; whether the file is whole now."""
    have = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "ordain", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    opener = urllib.request.build_opener(_Redirects(item))
    try:
        response = opener.open(urllib.request.Request(item.url, headers=headers), timeout=_TIMEOUT)  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # what is there is no beginning of the file
            part.unlink(missing_ok=True)
            return False
        raise FetchError(
            f"HTTP {error.code} for {item.url}",
            expected="the file",
            remedy=f"{_AGAIN} later."
            if error.code >= 500
            else f"The publisher may have moved it: get it by hand and save it as {part.with_suffix('')}.",
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: redirected to no address at all
        reason = getattr(error, "reason", error)
        raise FetchError(
            f"no answer from {item.url} ({reason})",
            expected="a connection",
            remedy=f"{_AGAIN} when there is one, or get the file by hand and save it as {part.with_suffix('')}.",
        ) from None
    with response:
        if response.status != 206:
            have = 0  # a server that ignores Range sends all of it
        elif _number(response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]) != have:
            part.unlink(missing_ok=True)  # not the piece that was asked for: ask for all
            return False
        length = _number(response.headers.get("Content-Length", ""))
        total = None if length is None else have + length
        if total is not None and total > item.limit:
            raise _too_long(item, total)
        return _save(item, response, part, have=have, total=total, report=report)


def _save(item: Download, response: IO[bytes], part: Path, *, have: int, total: int | None, report: Report) -> bool:
    with part.open("ab" if have else "wb") as file:
        while True:
            try:
                piece = response.read(_CHUNK)
            except (OSError, http.client.HTTPException):  # reset, timed out, incomplete
                return False
            if not piece:
                break
            have += len(piece)
            if have > item.limit:
                raise _too_long(item, have)
            try:
                file.write(piece)
                file.flush()
            except OSError as error:
                raise FetchError(
                    f"{error.strerror} on writing {part}",
                    expected=f"room for {total or item.limit:,} bytes",
                    remedy=f"Make room, or name another folder by --data-dir. {_AGAIN}: it goes on from there.",
                ) from None
            if total is not None:
                report(have, total)
        os.fsync(file.fileno())
    return total is None or have == total


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _digest(part: Path, item: Download) -> str | None:
    if item.digest is None:
        return None
    kind = item.digest.partition(":")[0]
    state = hashlib.new(kind, usedforsecurity=False)
    with part.open("rb") as file:
        while piece := file.read(1 << 20):
            state.update(piece)
    return f"{kind}:{state.hexdigest()}"


def _check_address(url: str, item: Download) -> None:
    """Refuse all but https, and http where a checksum makes up for it."""
    address = urlsplit(url)
    if address.scheme == "https" or (
        address.scheme == "http" and (item.digest is not None or address.hostname in _LOOPBACK)
    ):
        return
    raise FetchError(
        f"the address {url}",
        expected="https, or http for a file with a known checksum",
        remedy=f"Get {item.name} by hand.",
    )


def _too_long(item: Download, size: int) -> FetchError:
    return FetchError(
        f"{size:,} bytes from {item.url}",
        expected=f"at most {item.limit:,}",
        remedy="The publisher has changed the file: get it by hand.",
    )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but to no address that would not have been asked at first."""

    def __init__(self, item: Download) -> None:
        self._item = item

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_address(newurl, self._item)
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except Exception:
            fp.close()  # urllib leaves open the answer whose redirect is not followed
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302
