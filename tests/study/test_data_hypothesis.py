"""Readers under bytes that nobody wrote: an InputError, or a result that is in order."""

from __future__ import annotations

import gzip
import lzma
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from study.hostile_files import damaged
from study.standard_files import WRITERS, write_bert_vocab

from ordain.errors import InputError
from ordain.study.data import DATASETS, Labelled
from ordain.study.data.data_files import FileContent, FoundFiles
from ordain.study.data.readers import (
    read_idx,
    read_libsvm,
    read_records,
    read_table,
    read_tsv,
    read_vocabulary,
    read_words,
)


def _seed_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_bert_vocab(folder)
        for kind in ("mnist", "cifar10", "wikitext2", "qnli", "a9a", "covtype"):
            WRITERS[kind](folder)
        paths = {
            "idx": "mnist/t10k-images-idx3-ubyte.gz",
            "cifar": "cifar-10-batches-bin/data_batch_1.bin",
            "words": "wikitext-2/valid.txt",
            "tsv": "QNLI/dev.tsv",
            "libsvm": "libsvm/a9a.t",
            "covtype": "covtype/covtype.data.gz",
            "vocabulary": "bert-uncased-vocab/vocab.txt",
        }
        raw = {kind: (folder / path).read_bytes() for kind, path in paths.items()}
    return {kind: gzip.decompress(one) if one[:2] == b"\x1f\x8b" else one for kind, one in raw.items()}


SEEDS = _seed_files()


def _libsvm(content: FileContent) -> None:
    _labelled(read_libsvm(content, features=123, labels=(-1, 1)), classes=2)


def _labelled(part: Labelled, *, classes: int) -> None:
    assert len(part.x) == len(part.y) > 0
    assert set(np.unique(part.y)) <= set(range(classes))
    if isinstance(part.x, np.ndarray):
        assert np.isfinite(part.x).all()


def _tsv(content: FileContent) -> None:
    found = read_tsv(content, texts=("question", "sentence"), labels=("entailment", "not_entailment"))
    _labelled(found, classes=2)
    assert all(len(row) == 2 for row in found.x)


READERS: dict[str, Callable[[FileContent], object]] = {
    "idx": partial(read_idx, shape=(28, 28)),
    "cifar": lambda content: _labelled(read_records(content), classes=10),
    "words": read_words,
    "tsv": _tsv,
    "libsvm": _libsvm,
    "covtype": lambda content: _labelled(read_table(content), classes=7),
    "vocabulary": read_vocabulary,
}


@pytest.mark.parametrize("kind", READERS)
@given(draws=st.data())
def test_only_input_errors(kind: str, draws: st.DataObject) -> None:
    raw = draws.draw(damaged(SEEDS[kind]) | st.binary(max_size=200))
    message = ""
    try:
        READERS[kind](FileContent(raw, Path("some.file"), "Remove it."))
    except InputError as error:
        message = str(error)
    assert message.isprintable()
    assert len(message) < 300


@pytest.mark.parametrize("kind", READERS)
def test_what_is_whole_is_read(kind: str) -> None:
    READERS[kind](FileContent(SEEDS[kind], Path("some.file"), "Remove it."))


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@given(draws=st.data())
def test_compressed_files(suffix: str, draws: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = {".gz": partial(gzip.compress, mtime=0), ".xz": partial(lzma.compress, preset=0)}[suffix](SEEDS["tsv"])
    raw = draws.draw(damaged(whole))
    path = tmp_path_factory.getbasetemp() / f"damaged.tsv{suffix}"
    path.write_bytes(raw)
    try:
        found = FoundFiles(DATASETS["qnli"], {"dev": path}, verify=False).read("dev").data
    except InputError:
        return
    assert found == SEEDS["tsv"] or (
        suffix == ".gz" and not raw
    )  # both formats carry checksums; gzip reads nothing as ""
