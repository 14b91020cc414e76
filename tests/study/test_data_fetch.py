from __future__ import annotations

import gzip
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from study import standard_files
from study.hostile_files import packed, tar
from typer.testing import CliRunner

from ordain.errors import FetchError, InputError
from ordain.study import cli
from ordain.study.data import DATASETS, Download, fetch, load
from ordain.study.data.fetching import download, extract

BODY = bytes(range(256)) * 40
MD5 = f"md5:{hashlib.md5(BODY, usedforsecurity=False).hexdigest()}"


class Publisher:
    """A web server on loopback, as well or badly behaved as a test asks for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[str, bytes] = {"/file": BODY}
        self.asked: list[str] = []
        self.breaks: list[int] = []  # after so many bytes, one per request
        self.says_length = True
        self.says_encoded = False
        self.redirect = ""
        self.trouble = 0

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        body = self.files.get(request.path)
        if self.redirect and request.path == "/file":
            request.send_response(302)
            request.send_header("Location", self.redirect)
            request.end_headers()
            return
        if body is None or self.trouble:
            request.send_error(self.trouble or 404)
            return
        request.send_response(200)
        if self.says_length:
            request.send_header("Content-Length", str(len(body)))
        if self.says_encoded:
            request.send_header("Content-Encoding", "gzip")
        request.end_headers()
        request.wfile.write(body[: self.breaks.pop(0)] if self.breaks else body)


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made = Publisher(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a download would have waited before it tried again."""
    seconds: list[float] = []
    monkeypatch.setattr("pooch.core.time", SimpleNamespace(sleep=seconds.append))
    return seconds


def item(publisher: Publisher, *, digest: str | None = MD5, limit: int = 20_000) -> Download:
    return Download(url=f"{publisher.url}/file", name="file", limit=limit, digest=digest)


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("says_length", [True, False])
@pytest.mark.parametrize("digest", [MD5, None])
def test_whole(publisher: Publisher, tmp_path: Path, digest: str | None, says_length: bool) -> None:
    publisher.says_length = says_length
    reports: list[tuple[int, int]] = []
    download(item(publisher, digest=digest), tmp_path / "file", report=lambda *now: reports.append(now))
    assert (tmp_path / "file").read_bytes() == BODY
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
    assert names(tmp_path) == ["file"]
    assert publisher.asked == ["/file"]
    assert (reports[-1:] == [(len(BODY), len(BODY))]) is says_length


@pytest.mark.parametrize("digest", [MD5, None])
def test_a_broken_connection_is_tried_again(
    publisher: Publisher, tmp_path: Path, digest: str | None, waits: list[float]
) -> None:
    publisher.breaks = [1000, 500]
    download(item(publisher, digest=digest), tmp_path / "file", report=silent)
    assert (tmp_path / "file").read_bytes() == BODY
    assert names(tmp_path) == ["file"]
    assert (publisher.asked, waits) == (["/file"] * 3, [1, 2])
    publisher.breaks = [1000] * 4
    with pytest.raises(FetchError, match=r"no complete file from http://127.*again later, or .*save it as .*other\."):
        download(item(publisher, digest=digest), tmp_path / "other", report=silent)
    assert names(tmp_path) == ["file"]  # no part of a file is left


def test_a_file_that_breaks_off_without_a_length_has_another_checksum(publisher: Publisher, tmp_path: Path) -> None:
    publisher.says_length, publisher.breaks = False, [1000] * 4
    with pytest.raises(FetchError, match="another checksum"):
        download(item(publisher), tmp_path / "file", report=silent)
    assert names(tmp_path) == []


def test_what_is_whole_is_not_asked_for(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BODY)
    download(item(publisher), tmp_path / "file", report=silent)
    assert publisher.asked == []
    assert names(tmp_path) == ["file"]


def test_wrong_checksum_leaves_nothing(publisher: Publisher, tmp_path: Path) -> None:
    publisher.files["/file"] = BODY[:-1] + b"?"
    with pytest.raises(FetchError, match=r"another checksum from http://127.*expected md5:.*nothing was kept"):
        download(item(publisher), tmp_path / "file", report=silent)
    assert names(tmp_path) == []


def test_a_compressed_file_stays_compressed(publisher: Publisher, tmp_path: Path) -> None:
    """Some servers declare a .gz file to be an encoding of its content, which requests would decompress."""
    body = gzip.compress(BODY, mtime=0)
    publisher.files["/file"], publisher.says_encoded = body, True
    digest = f"md5:{hashlib.md5(body, usedforsecurity=False).hexdigest()}"
    download(item(publisher, digest=digest), tmp_path / "file", report=silent)
    assert (tmp_path / "file").read_bytes() == body


def test_not_found(publisher: Publisher, tmp_path: Path, waits: list[float]) -> None:
    del publisher.files["/file"]
    with pytest.raises(FetchError, match=r"HTTP 404 for http://127.*download file by hand"):
        download(item(publisher), tmp_path / "file", report=silent)
    assert names(tmp_path) == []
    assert waits == []


def test_server_in_trouble(publisher: Publisher, tmp_path: Path) -> None:
    publisher.redirect = "http://[nowhere"
    with pytest.raises(FetchError, match=r"the address http://\[nowhere"):
        download(item(publisher), tmp_path / "file", report=silent)
    publisher.redirect, publisher.trouble = "", 503
    with pytest.raises(FetchError, match=r"503 Server Error.*again later"):
        download(item(publisher), tmp_path / "file", report=silent)
    assert names(tmp_path) == []


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    nobody = Download(url="http://127.0.0.1:9/file", name="file", limit=100, digest=MD5)  # the port of "discard"
    with pytest.raises(
        FetchError, match=r"no complete file from http://127.0.0.1:9/file \(\[Errno \d+\] Connection refused\)"
    ):
        download(nobody, tmp_path / "file", report=silent)
    assert names(tmp_path) == []


@pytest.mark.parametrize("says_length", [True, False])
def test_too_long(publisher: Publisher, tmp_path: Path, says_length: bool) -> None:
    publisher.says_length = says_length
    with pytest.raises(FetchError, match=r"bytes from .*expected at most 5,000"):
        download(item(publisher, limit=5000), tmp_path / "file", report=silent)
    assert names(tmp_path) == []


def test_full_disk(publisher: Publisher, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # no file may be longer
    try:
        with pytest.raises(FetchError, match=r"File too large.* while writing .*file; expected space for up to 20,000"):
            download(item(publisher), tmp_path / "file", report=silent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


@pytest.mark.parametrize("url", ["http://example.org/file", "ftp://example.org/file", "file:///etc/hostname"])
def test_addresses_that_are_never_asked(publisher: Publisher, tmp_path: Path, url: str) -> None:
    with pytest.raises(FetchError, match="expected https"):
        download(Download(url=url, name="file", limit=100), tmp_path / "file", report=silent)
    publisher.redirect = url
    with pytest.raises(FetchError, match="expected https"):
        download(item(publisher, digest=None), tmp_path / "file", report=silent)
    assert names(tmp_path) == []


def test_redirects_are_followed(publisher: Publisher, tmp_path: Path) -> None:
    publisher.files = {"/moved": BODY}
    publisher.redirect, publisher.breaks = f"{publisher.url}/moved", [1000]
    download(item(publisher), tmp_path / "file", report=silent)
    assert publisher.asked[-2:] == ["/file", "/moved"]
    assert (tmp_path / "file").read_bytes() == BODY


# Archives


@pytest.mark.parametrize(("pack", "suffix"), [(tar, "tar.gz"), (packed, "zip")])
def test_only_wanted_members(pack: Any, suffix: str, tmp_path: Path) -> None:
    archive = tmp_path / f"a.{suffix}"
    archive.write_bytes(pack(("in/readme", b"hello"), ("in/a", b"AAA"), ("./in/b", b"B"), ("in/sub/c", b"C")))
    out = tmp_path / "out"
    out.mkdir()
    extract(archive, {"in/a": out / "first", "in/sub/c": out / "second"})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {"first": b"AAA", "second": b"C"}


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("a.tar.gz", tar(("in/b", b"A"))),
        ("a.tar.gz", tar(("in/a", b"A"))[:40]),
        ("a.tar.gz", b"no archive"),
        ("a.zip", packed(("in/b", b"A"))),
        ("a.zip", packed(("in/a", b"A" * 50)).replace(b"in/a", b"in/b", 1)),
        ("a.zip", packed(("in/a", b"A"))[:-10]),
        ("a.zip", b"no archive"),
    ],
    ids=count(),
)
def test_other_archives(name: str, raw: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(FetchError, match="expected an archive with in/a"):
        extract(tmp_path / name, {"in/a": tmp_path / "a"})
    assert names(tmp_path) == [name]


def test_an_archive_without_a_checksum_is_never_asked_for(publisher: Publisher, tmp_path: Path) -> None:
    archive = replace(item(publisher, digest=None), members={"in/a": "a"})
    with pytest.raises(FetchError, match="without a checksum"):
        download(archive, tmp_path / "file", report=silent)
    assert publisher.asked == []


# Whole data sets


def sha256(content: bytes | None) -> str | None:
    return None if content is None else f"sha256:{hashlib.sha256(content).hexdigest()}"


@contextmanager
def offered(
    publisher: Publisher, name: str, made: Path, monkeypatch: pytest.MonkeyPatch, **archive: bytes
) -> Iterator[None]:
    """Let ``publisher`` offer the files in ``made``, or an archive, in the place of the real one's."""
    entry = DATASETS[name]
    publisher.files = {f"/{path.name}": path.read_bytes() for path in made.iterdir()}
    publisher.files |= {f"/{entry.downloads[0].name}": content for content in archive.values()}
    items = tuple(
        replace(
            item,
            url=f"{publisher.url}/{item.name}",
            digest=sha256(publisher.files.get(f"/{item.name}")) if item.members else None,
        )
        for item in entry.downloads
    )
    files = tuple(replace(file, digest=None, rows=None) for file in entry.files)
    with monkeypatch.context() as patch:
        patch.setitem(DATASETS, name, replace(entry, downloads=items, files=files))
        yield


def call(*words: Any) -> Any:
    return CliRunner().invoke(cli.app, ["data", *(str(word) for word in words)])


@pytest.mark.parametrize(
    ("name", "write"), [("mnist", standard_files.write_mnist), ("a9a", standard_files.write_libsvm)]
)
def test_fetch_files(
    publisher: Publisher, name: str, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write(tmp_path / "made")
    with offered(publisher, name, made, monkeypatch):
        root = tmp_path / "new" / "folder"
        first = call("fetch", name, "--data-dir", root)
        assert first.exit_code == 0, first.stderr
        assert first.stdout == f"{name} is in {root / DATASETS[name].folders[0]}\n"
        assert load(name, root).train.y.tolist() == load(name, tmp_path / "made").train.y.tolist()
        asked = len(publisher.asked)
        assert asked == len(DATASETS[name].downloads)
        assert call("fetch", name, "--data-dir", root).stdout == first.stdout
        os.remove(next((root / DATASETS[name].folders[0]).iterdir()))
        assert call("fetch", name, "--data-dir", root).exit_code == 0
        assert len(publisher.asked) == asked + 1  # only what was not there


@pytest.mark.parametrize(("name", "pack"), [("cifar10", tar), ("sst2", packed), ("qnli", packed)])
def test_fetch_archives(
    publisher: Publisher, name: str, pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = standard_files.WRITERS[name](tmp_path / "made")
    wanted = DATASETS[name].downloads[0]
    members = [(member, (made / saved).read_bytes()) for member, saved in wanted.members.items()]
    archive = pack(("readme.html", b"hello"), ("../../evil", b""), *members)
    with offered(publisher, name, made, monkeypatch, archive=archive):
        assert call("fetch", name, "--data-dir", tmp_path / "new").exit_code == 0
        folder = tmp_path / "new" / DATASETS[name].folders[0]
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            saved: (made / saved).read_bytes() for saved in wanted.members.values()
        }
        assert not list(tmp_path.rglob("evil"))
        publisher.files = {f"/{wanted.name}": archive[:-1]}
        result = call("fetch", name, "--data-dir", tmp_path / "hostile")
        assert result.exit_code == 2
        assert "another checksum" in result.stderr
        assert names(tmp_path / "hostile" / DATASETS[name].folders[0]) == []


def test_files_without_checksum_are_read_before_they_are_kept(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = standard_files.write_libsvm(tmp_path / "made", "mushrooms")
    (made / "mushrooms").write_text("<!doctype html>\n<p>Please sign in\n")
    with offered(publisher, "mushrooms", made, monkeypatch):
        result = call("fetch", "mushrooms", "--data-dir", tmp_path)
    assert result.exit_code == 2
    progress, message = result.stderr.splitlines()
    assert progress == "mushrooms: 100 %"
    assert message.startswith("ordain: got something other than mushrooms: ")
    assert "b'<!doctype html>' in line 1; expected" in message
    assert names(tmp_path / "libsvm") == []


def test_damaged_file_is_not_replaced_behind_the_user_s_back(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = standard_files.write_mnist(tmp_path)
    with offered(publisher, "mnist", made, monkeypatch):
        (made / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"mine"))
        result = call("fetch", "mnist", "--data-dir", tmp_path)
    assert result.exit_code == 2
    assert "Remove it and run: ordain data fetch mnist" in result.stderr
    assert publisher.asked == []


def test_a_user_s_file_stays(publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = standard_files.write_qnli(tmp_path / "made")
    wanted = DATASETS["qnli"].downloads[0]
    archive = packed(*((member, (made / saved).read_bytes()) for member, saved in wanted.members.items()))
    with offered(publisher, "qnli", made, monkeypatch, archive=archive):
        mine = standard_files.write_qnli(tmp_path, train=None, dev=3, seed=1).rename(tmp_path / "qnli")
        before = (mine / "dev.tsv").read_bytes()
        assert call("fetch", "qnli", "--data-dir", tmp_path).exit_code == 0
        assert (mine / "dev.tsv").read_bytes() == before
        assert (mine / "train.tsv").read_bytes() == (made / "train.tsv").read_bytes()


def test_fetch_what_cannot_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="scikit-learn"):
        fetch("digits", tmp_path, reporting=lambda _: pytest.fail("began"))
    assert "one of mnist" in call("fetch", "imagenet", "--data-dir", tmp_path).stderr
    (tmp_path / "file").write_text("")
    result = call("fetch", "mnist", "--data-dir", tmp_path / "file")
    assert result.exit_code == 2
    assert result.stderr.startswith("ordain: ")


def test_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "[red]odd"
    standard_files.write_mnist(root, name="MNIST/raw")
    standard_files.write_qnli(root, train=None)
    (standard_files.write_sst2(root) / "train.tsv").unlink()
    monkeypatch.setenv("ORDAIN_DATA", str(root))
    result = call("list")
    assert result.exit_code == 0, result.stderr
    rows = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.startswith("│")}
    assert set(DATASETS) <= set(rows)
    cells = {name: [cell.strip() for cell in rows[name].split("│")[3:6]] for name in DATASETS}
    assert cells["mnist"] == ["yes", "MNIST/raw", "60,000 / 10,000"]
    assert cells["cifar10"][:2] == ["no", "-"]
    assert cells["digits"][:2] == ["yes", "scikit-learn"]
    assert cells["qnli"][0].startswith("yes, without")
    assert cells["sst2"][0].startswith("no, without")
    assert "[red]odd" in result.stdout.replace("\n", "")
