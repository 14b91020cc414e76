"""BERT's word pieces: one a line, numbered by line."""

from __future__ import annotations

from ordain.study.data.content import Content

__all__ = ["read_vocabulary"]

_NEEDED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_vocabulary(content: Content) -> tuple[str, ...]:
    """The word piece of each id."""
    try:
        text = content.data.decode("utf-8")
    except UnicodeDecodeError:
        raise content.wrong("bytes that are no UTF-8", expected="one word piece a line") from None
    words = tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n"))
    if len(set(words)) < len(words):
        raise content.wrong("a word piece twice, or an empty line", expected="each once")
    missing = [word for word in _NEEDED if word not in words]
    if missing:
        raise content.wrong(f"no {', '.join(missing)}", expected="BERT's special word pieces among the lines")
    content.count(len(words))
    return words
