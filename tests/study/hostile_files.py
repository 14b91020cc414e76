"""Archives with any members, and files with random damage."""

from __future__ import annotations

import io
import tarfile
import zipfile

from hypothesis import strategies as st

__all__ = ["damaged", "packed", "tar"]


def tar(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            about = tarfile.TarInfo(member[0])
            about.size = len(member[1])
            archive.addfile(about, io.BytesIO(member[1]))
    return out.getvalue()


def packed(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members:
            archive.writestr(zipfile.ZipInfo(name), body)
    return out.getvalue()


@st.composite
def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """Some of: cut, overwritten, taken out, put in, twice."""
    out = bytearray(raw)
    for _ in range(draw(st.integers(1, 4))):
        at, end = sorted((draw(st.integers(0, len(out))), draw(st.integers(0, len(out)))))
        piece = draw(st.binary(max_size=8) | st.sampled_from([b"\n", b"\t", b",", b":", b" ", b"-", b"9" * 30, b"nan"]))
        kind = draw(st.sampled_from(["cut", "write", "out", "in", "twice"]))
        if kind == "cut":
            del out[end:]
        elif kind == "write":
            out[at : at + len(piece)] = piece
        elif kind == "out":
            del out[at : min(end, at + 20)]
        elif kind == "in":
            out[at:at] = piece
        else:
            out[at:at] = out[at : min(end, at + 200)]
    return bytes(out)
