from __future__ import annotations

import csv
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest
import torch
from sklearn.datasets import load_digits, load_svmlight_file
from sklearn.model_selection import train_test_split
from study import standard_files
from study.standard_files import WRITERS, idx

from ordain.errors import InputError
from ordain.study import data
from ordain.study.data import DATASETS, bert_vocabulary, load
from ordain.study.data.data_files import FileContent
from ordain.study.data.readers import (
    read_idx,
    read_libsvm,
    read_records,
    read_table,
    read_tsv,
    read_vocabulary,
    read_words,
)


def content(raw: bytes, rows: int | None = None) -> FileContent:
    return FileContent(raw, Path("some.file"), "Remove it.", rows)


def images(raw: bytes) -> Any:
    return read_idx(content(raw), shape=(28, 28))


def svm(raw: bytes) -> Any:
    return read_libsvm(content(raw), features=5, labels=(-1, 1))


def pairs(raw: bytes) -> Any:
    return read_tsv(content(raw), texts=("question", "sentence"), labels=("entailment", "not_entailment"))


def table(raw: bytes) -> Any:
    return read_table(content(raw))


ROW = b",".join([b"7"] * 54)


@pytest.mark.parametrize(
    ("read", "raw", "words"),
    [
        (images, b"", "a start of b''"),
        (images, b"\x00\x00\x08\x03\x00\x00", "3 sizes"),
        (images, b"\x00\x00\x0d\x03" + idx(np.zeros((2, 28, 28)))[4:], "an idx file of bytes"),
        (images, idx(np.zeros(5)), "an idx file of bytes"),
        (images, idx(np.zeros((2, 28, 27))), "sizes (2, 28, 27); expected (n, 28, 28)"),
        (images, idx(np.zeros((2, 28, 28)))[:-1], "1,567 bytes of data; expected 1,568"),
        (images, idx(np.zeros((2, 28, 28))) + b"\0", "1,569 bytes of data"),
        (images, b"\x00\x00\x08\x03\xff\xff\xff\xff" + idx(np.zeros((1, 28, 28)))[8:], "4294967295"),
        (lambda raw: read_records(content(raw)), b"", "0 bytes"),
        (lambda raw: read_records(content(raw)), bytes(3072), "a multiple of 3,073"),
        (lambda raw: read_records(content(raw)), bytes(3073) + b"\x0a" + bytes(3072), "label 10 in record 2"),
        (svm, b"", "no rows"),
        (svm, b"-1 1:1\n+1 2:x\n", "b'+1 2:x' in line 2"),
        (svm, b"-1 1:1\n\n+1 2\n", "b'+1 2' in line 3"),
        (svm, b"-1 1:nan\n", "beyond float32, b'-1 1:nan' in line 1"),
        (svm, b"-1 1:inf\n", "beyond float32, b'-1 1:inf' in line 1"),
        (svm, b"-1 1:1e999\n", "beyond float32, b'-1 1:1e999' in line 1"),
        (svm, b"+1 2:1\n-1 1:1e39\n", "beyond float32, b'-1 1:1e39' in line 2"),
        (svm, b"-1 1_0:1\n", "b'-1 1_0:1' in line 1"),
        (svm, b"x 1:1\n", "b'x 1:1' in line 1"),
        (svm, b"+1 1:1\n3 1:1\n", "another label, b'3 1:1' in line 2; expected lines of a label (-1 or 1)"),
        (svm, b"+1 0:1\n", "b'+1 0:1' in line 1"),
        (svm, b"+1 5:1\n\n\n-1 6:1\n", "b'-1 6:1' in line 4"),
        (svm, b"+1 5:1\n-1 2:1 2:1\n", "b'-1 2:1 2:1' in line 2"),
        (svm, b"+1 5:1\n-1 1:1\n-1 3:1 4:1 2:1\n", "b'-1 3:1 4:1 2:1' in line 3"),
        (svm, b"+1 " + b"9" * 5000 + b":1", "b'+1 9999"),
        (pairs, b"", "the header ''"),
        (pairs, b"index\tquestion\tlabel\n", "columns question, sentence, label"),
        (pairs, b"question\tsentence\tlabel\n", "only a header"),
        (pairs, b"question\tsentence\tlabel\na\tb\tentailment\na\tb\n", "2 columns in line 3; expected 3"),
        (pairs, b"question\tsentence\tlabel\na\tb\tc\td\n", "4 columns in line 2"),
        (pairs, b"question\tsentence\tlabel\na\tb\tyes\x1b[31m\n", r"label 'yes\x1b[31m' in line 2"),
        (pairs, b"question\tsentence\tlabel\na\t\xff\xfe\tentailment\n", r"bytes b'\xff\xfe\tentai' in line 2"),
        (table, b"", "1 lines with a table of 0 x "),
        (table, b"a,b,c", "0 x "),
        (table, ROW + b",1\n" + ROW + b"\n", "from 55 to 54 at row 2"),
        (table, b"Elevation\n" + ROW + b",1\n" + ROW + b",1,1\n", "from 55 to 56 at row 2"),
        (table, ROW[:-1] + b"x,1\n", "'x' to int32 at row 0, column 54"),
        (table, ROW[:-1] + b"1.5,1\n", "'1.5' to int32 at row 0, column 54.; expected 55 whole numbers"),
        (table, ROW[:-1] + b"nan,1\n", "'nan' to int32 at row 0"),
        (table, ROW[:-1] + b"1-,1\n", "'1-' to int32 at row 0, column 54"),
        (table, ROW[:-1] + b"--1,1\n", "'--1' to int32 at row 0"),
        (table, ROW[:-1] + b"-,1\n", "'-' to int32 at row 0"),
        (table, ROW[:-1] + b",1\n", "'' to int32 at row 0, column 54"),
        (table, ROW[:-1] + b"1234567,1\n", "1234567 in data row 1"),
        (table, ROW + b",1\n" + ROW + b",8\n", "class 8 in data row 2; expected 1..7"),
        (table, ROW + b",0\n", "class 0 in data row 1"),
        (table, ROW + b",1\n\n" + ROW + b",1\n", "3 lines with a table of 2 x 55"),
        (table, b"1" * 5_000_000, "could not convert string '1111"),
        (lambda raw: read_words(content(raw)), b"", "no words"),
        (lambda raw: read_words(content(raw)), b" \n \n", "no words"),
        (lambda raw: read_words(content(raw)), b"a\nb \x80 c\n", r"bytes b'\x80 c\n' in line 2"),
        (lambda raw: read_vocabulary(content(raw)), b"[PAD]\n[UNK]\n", "no [CLS], [SEP], [MASK]"),
        (lambda raw: read_vocabulary(content(raw)), b"a\na\n", "twice"),
        (lambda raw: read_vocabulary(content(raw)), b"\xff", r"bytes b'\xff' in line 1; expected text in UTF-8"),
    ],
    ids=count(),
)
def test_what_is_wrong_is_said(read: Callable[[bytes], Any], raw: bytes, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read(raw)
    message = str(caught.value)
    assert message.startswith("got some.file: ")
    assert words in message
    assert message.endswith("Remove it.")
    assert len(message) < 250
    assert message.isprintable()


def test_libsvm_is_what_scikit_learn_reads(tmp_path: Path) -> None:
    raw = b"-1 1:1 3:-2.5e-1 \r\n+1 2:.5 5:1e3\n\n1\n-1.0\t4:+7.\r\n"
    found = svm(raw)
    x, y = load_svmlight_file(io.BytesIO(raw), n_features=5)
    np.testing.assert_array_equal(found.x, x.toarray().astype(np.float32))
    np.testing.assert_array_equal(found.y, (y > 0).astype(np.int64))
    standard_files.write_libsvm(tmp_path, "w8a")
    splits = load("w8a", tmp_path, verify=False)
    for part, name in ((splits.train, "w8a"), (splits.test, "w8a.t")):
        x, y = load_svmlight_file(str(tmp_path / "libsvm" / name), n_features=300)
        np.testing.assert_array_equal(part.x, x.toarray())
        np.testing.assert_array_equal(part.y, y > 0)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"", b"\n\n"])
@pytest.mark.parametrize("header", [b"", b"Elevation,Aspect\n", b'"Elevation"\n'])
def test_covtype_is_what_numpy_reads(header: bytes, end: bytes) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.integers(-(10 ** rng.integers(1, 7, (40, 55))) + 1, 10 ** rng.integers(1, 7, (40, 55)))
    numbers[:, -1] = rng.integers(1, 8, 40)
    line = b"\r\n" if end == b"\r\n" else b"\n"
    raw = line.join(b",".join(str(number).encode() for number in row) for row in numbers) + end
    found = table(header + raw)
    expected = np.loadtxt(io.BytesIO(raw), delimiter=",")
    np.testing.assert_array_equal(found.x, expected[:, :-1])
    np.testing.assert_array_equal(found.y, expected[:, -1] - 1)
    assert (found.x.dtype, found.y.dtype) == (np.float32, np.int64)


def test_words_are_those_of_pytorch_examples(tmp_path: Path) -> None:
    folder = standard_files.write_wikitext2(tmp_path)
    (folder / "valid.txt").write_text("a new <unk> word\n\nwithout a last line end", encoding="utf-8")
    known: dict[str, int] = {}
    splits = load("wikitext2", tmp_path, verify=False)
    for name in ("train", "valid", "test"):  # Corpus.tokenize, word for word
        ids: list[int] = []
        with (folder / f"{name}.txt").open(encoding="utf8") as lines:
            for line in lines:
                ids += [known.setdefault(word, len(known)) for word in (*line.split(), "<eos>")]
        part = getattr(splits, name)
        assert part.x.tolist() == ids
        assert part.y is part.x
    assert splits.vocabulary == tuple(known)
    assert f"{len(known)} words" in splits.notes[0]


def test_quotes_mean_nothing_in_glue(tmp_path: Path) -> None:
    folder = standard_files.write_qnli(tmp_path)
    odd = '0\t" What?\tsaid "so"\tentailment\n1\tb\u2028b\tc\x0bc\x85\tnot_entailment\n'
    (folder / "dev.tsv").write_text("index\tquestion\tsentence\tlabel\n" + odd, encoding="utf-8")
    splits = load("qnli", tmp_path, verify=False)
    assert splits.valid is not None
    assert splits.valid.x == [('" What?', 'said "so"'), ("b\u2028b", "c\x0bc\x85")]
    assert splits.valid.y.tolist() == [0, 1]
    with (folder / "train.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert splits.train.x == [(row["question"], row["sentence"]) for row in rows]
    assert splits.train.y.tolist() == [int(row["label"] == "not_entailment") for row in rows]


def test_qnli_without_train(tmp_path: Path) -> None:
    standard_files.write_qnli(tmp_path, train=None, dev=6)
    splits = load("qnli", tmp_path, verify=False)
    assert (len(splits.train.y), splits.valid, splits.test) == (6, None, None)
    assert "6 rows of dev.tsv" in splits.notes[0]


def test_libsvm_without_a_test_file(tmp_path: Path) -> None:
    (standard_files.write_libsvm(tmp_path, "w8a") / "w8a.t").unlink()
    splits = load("w8a", tmp_path, verify=False)
    assert splits.test is None
    assert "w8a.t is not there: no test set." in splits.notes


def test_images_come_out_as_they_were_written(tmp_path: Path) -> None:
    shown = np.random.default_rng(3).integers(0, 256, (4, 28, 28))
    folder = standard_files.write_mnist(tmp_path, train=4)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(shown)))
    train = load("mnist", tmp_path, verify=False).train
    np.testing.assert_array_equal(train.x, shown)
    assert train.y.tolist() == [0, 1, 2, 3]
    records = np.random.default_rng(4).integers(0, 10, (3, 3073)).astype(np.uint8)
    found = read_records(content(records.tobytes()))
    assert found.x[2, 1, 5, 7] == records[2, 1 + 1024 + 5 * 32 + 7]
    assert found.y.tolist() == records[:, 0].tolist()


SHAPES = {
    "mnist": ((28, 28), np.uint8),
    "fashion-mnist": ((28, 28), np.uint8),
    "cifar10": ((3, 32, 32), np.uint8),
    "a9a": ((123,), np.float32),
    "w8a": ((300,), np.float32),
    "mushrooms": ((112,), np.float32),
    "covtype": ((54,), np.float32),
    "digits": ((64,), np.float32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_arrays_are_ready_for_torch(name: str, tmp_path: Path) -> None:
    if name in WRITERS:
        WRITERS[name](tmp_path)
    splits = load(name, tmp_path, verify=False)
    for part in (splits.train, splits.test):
        if part is not None:
            assert (part.x.shape[1:], part.x.dtype, part.y.dtype) == (*SHAPES[name], np.int64)
            assert len(part.x) == len(part.y) > 0
            torch.from_numpy(part.x), torch.from_numpy(part.y)  # would warn of an array that cannot be written to
    assert set(splits.train.y) == set(range(len(set(splits.train.y))))


def test_digits_are_scikit_learn_s(tmp_path: Path) -> None:
    splits = load("digits", tmp_path)
    assert splits.test is not None
    pixels, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(pixels / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    for ours, theirs in zip(
        (splits.train.x, splits.train.y, splits.test.x, splits.test.y), (x, y, test_x, test_y), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs.astype(ours.dtype))
    assert (len(splits.train.y), len(splits.test.y)) == tuple(DATASETS["digits"].counts.values())


def test_vocabulary(tmp_path: Path) -> None:
    folder = standard_files.write_bert_vocab(tmp_path)
    words = bert_vocabulary(tmp_path, verify=False)
    assert words == tuple((folder / "vocab.txt").read_text().split("\n")[:-1])
    with pytest.raises(InputError, match="bert_vocabulary"):
        load("bert-vocab", tmp_path)


# Which file it is: folders, names, compression


def unpacked(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("name", WRITERS)
def test_every_folder_and_compression_is_found(name: str, suffix: str, tmp_path: Path) -> None:
    made = WRITERS[name](tmp_path / "made")
    expected = load(name, tmp_path / "made", verify=False)
    pack = {"": bytes, ".gz": gzip.compress, ".xz": partial(lzma.compress, preset=0)}[suffix]
    for number, place in enumerate(DATASETS[name].folders):
        folder = tmp_path / str(number) / place
        folder.mkdir(parents=True)
        for path in made.iterdir():
            (folder / (path.name.removesuffix(".gz") + suffix)).write_bytes(pack(unpacked(path)))
        found = load(name, tmp_path / str(number), verify=False)
        np.testing.assert_array_equal(found.train.x, expected.train.x)
        np.testing.assert_array_equal(found.train.y, expected.train.y)
        assert found.notes == expected.notes


def test_other_names_are_found(tmp_path: Path) -> None:
    folder = standard_files.write_wikitext2(tmp_path)
    expected = load("wikitext2", tmp_path, verify=False)
    for path in list(folder.iterdir()):
        path.rename(folder / f"wiki.{path.stem}.tokens")
    np.testing.assert_array_equal(load("wikitext2", tmp_path, verify=False).train.x, expected.train.x)


def test_a_whole_folder_is_preferred(tmp_path: Path) -> None:
    standard_files.write_mnist(tmp_path, name="MNIST/raw")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").write_bytes(b"")
    assert len(load("mnist", tmp_path, verify=False).train.y) == 60


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no train-images-idx3-ubyte, .* in .*mnist.*ordain data fetch mnist"):
        load("mnist", tmp_path)
    folder = standard_files.write_mnist(tmp_path)
    (folder / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(InputError, match=r"no t10k-images-idx3-ubyte in .*mnist"):
        load("mnist", tmp_path, verify=False)
    with pytest.raises(InputError, match="one of mnist, "):
        load("imagenet", tmp_path)


def test_labels_must_go_with_images(tmp_path: Path) -> None:
    folder = standard_files.write_mnist(tmp_path)
    labels = folder / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx(np.zeros(59))))
    with pytest.raises(InputError, match="59 labels; expected 60"):
        load("mnist", tmp_path, verify=False)
    labels.write_bytes(gzip.compress(idx(np.full(60, 10))))
    with pytest.raises(InputError, match="label 10; expected labels in 0"):
        load("mnist", tmp_path, verify=False)


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", partial(lzma.compress, preset=0))])
def test_damaged_and_hostile_compression(
    suffix: str, pack: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = standard_files.write_sst2(tmp_path)
    entry = DATASETS["sst2"]
    limited = replace(entry, files=tuple(replace(file, limit=1_000_000) for file in entry.files))
    monkeypatch.setitem(DATASETS, "sst2", limited)
    (folder / "dev.tsv").unlink()
    path = folder / f"dev.tsv{suffix}"
    whole = pack(b"sentence\tlabel\n" + b"a\t1\n" * 500)
    cases = {
        b"": "ends too early|the header",
        whole[: len(whole) // 2]: "ends too early",
        whole[:-1]: "ends too early",
        b"plain text, not compressed": "damaged compressed file",
        whole[:20] + b"\xff" * 8 + whole[28:]: "damaged compressed file",
        whole + b"more": "damaged compressed file",
        pack(bytes(30_000_000)): "more than 1,000,000 bytes",  # 30 MB of zeros in a few kB
    }
    for raw, words in cases.items():
        path.write_bytes(raw)
        with pytest.raises(InputError, match=words) as caught:
            load("sst2", tmp_path, verify=False)
        assert str(path) in str(caught.value)
        assert "Remove it and run: ordain data fetch sst2" in str(caught.value)


def test_xz_that_asks_for_much_memory_is_refused(tmp_path: Path) -> None:
    folder = standard_files.write_sst2(tmp_path)
    (folder / "dev.tsv").unlink()
    greedy = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}]
    raw = bytearray(lzma.compress(b"sentence\tlabel\na\t1\n", filters=greedy))
    # The block header's byte for the dictionary's size, 40 for 4 GiB - 1, and its CRC made anew.
    start, size = 12, (raw[12] + 1) * 4
    raw[start + raw[start : start + size].index(b"\x21\x01") + 2] = 40
    raw[start + size - 4 : start + size] = zlib.crc32(raw[start : start + size - 4]).to_bytes(4, "little")
    (folder / "dev.tsv.xz").write_bytes(raw)
    with pytest.raises(InputError, match=r"[Mm]emory"):
        load("sst2", tmp_path, verify=False)


# Whether it is the publisher's


def test_checksums_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = standard_files.write_sst2(tmp_path, train=40, dev=16)
    with pytest.raises(InputError, match=r"train.tsv|dev.tsv") as caught:
        load("sst2", tmp_path)
    assert "--no-verify" in str(caught.value)
    entry = DATASETS["sst2"]
    kinds = {"train": "sha256", "dev": "md5"}
    digests = {
        key: f"{kind}:{hashlib.new(kind, (folder / f'{key}.tsv').read_bytes()).hexdigest()}"
        for key, kind in kinds.items()
    }
    right = tuple(
        replace(file, digest=digests[file.key], rows={"train": 40, "dev": 16}[file.key]) for file in entry.files
    )
    monkeypatch.setitem(DATASETS, "sst2", replace(entry, files=right))
    assert len(load("sst2", tmp_path).train.y) == 40
    raw = (folder / "train.tsv").read_bytes()
    (folder / "train.tsv").write_bytes(raw.replace(b"bad", b"sad", 1))  # after a first, verified reading
    with pytest.raises(InputError, match="content with sha256"):
        load("sst2", tmp_path)
    assert len(load("sst2", tmp_path, verify=False).train.y) == 40
    monkeypatch.setitem(DATASETS, "sst2", replace(entry, files=tuple(replace(f, digest=None, rows=41) for f in right)))
    with pytest.raises(InputError, match="rows; expected 41"):
        load("sst2", tmp_path)


def test_a_big_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = standard_files.write_bert_vocab(tmp_path)
    entry = DATASETS["bert-vocab"]
    digest = f"sha256:{hashlib.sha256((folder / 'vocab.txt').read_bytes()).hexdigest()}"
    files = (replace(entry.files[0], digest=digest, rows=None),)
    monkeypatch.setitem(DATASETS, "bert-vocab", replace(entry, files=files))
    bert_vocabulary(tmp_path)
    monkeypatch.setattr(hashlib, "new", lambda *_, **__: pytest.fail("hashed again"))
    bert_vocabulary(tmp_path)


def test_entries_agree_with_themselves() -> None:
    for name, entry in DATASETS.items():
        assert entry.name == name
        keys = [file.key for file in entry.files]
        assert len(set(keys)) == len(keys)
        for item in entry.downloads:
            assert item.url.startswith("https://") or item.digest
            kept = item.members.values() or (item.name.removesuffix(".gz"),)
            assert set(kept) <= {known for file in entry.files for known in file.names}
        for digest in (*(file.digest for file in entry.files), *(item.digest for item in entry.downloads)):
            assert digest is None or len(digest) == {"md5": 4 + 32, "sha256": 7 + 64}[digest.partition(":")[0]]
    for name in ("sst2", "qnli", "a9a", "w8a", "mushrooms", "covtype", "wikitext2"):
        assert [file.rows for file in DATASETS[name].files] == list(DATASETS[name].counts.values())


def test_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDAIN_DATA", str(tmp_path / "env"))
    assert data.data_dir(tmp_path) == tmp_path
    assert data.data_dir(None) == tmp_path / "env"
    monkeypatch.delenv("ORDAIN_DATA")
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *names, **options: tmp_path / "cache" / names[0])
    assert data.data_dir(None) == tmp_path / "cache" / "ordain" / "data"
