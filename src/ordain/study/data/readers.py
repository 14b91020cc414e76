"""Read data sets: images, tables of numbers, and texts, each in its publisher's format."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ordain.study.data.data_files import FileContent, FoundFiles, Labelled, Splits, brief, reason

_CLASSES = 10  # of images
_UINT8 = 8  # the code of the type in an idx file
_CIFAR_SHAPE = (3, 32, 32)
_RECORD = 1 + math.prod(_CIFAR_SHAPE)  # bytes: a label, then the pixels
_COLUMNS, _COVERS = 55, 7  # of Covertype, and its classes
_LARGEST = 999_999  # float32 holds every integer up to here
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_idx(content: FileContent, *, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """``[n, *shape]``: the array of an idx file of unsigned bytes (a magic number, the sizes, the bytes)."""
    data, dims = content.data, 1 + len(shape)
    start, magic = 4 + 4 * dims, bytes((0, 0, _UINT8, dims))
    if data[:4] != magic or len(data) < start:
        raise content.wrong(f"a start of {data[:4]!r}", expected=f"an idx file of bytes, {magic!r} and {dims} sizes")
    sizes = tuple(int(size) for size in np.frombuffer(data, ">u4", dims, offset=4))
    if sizes[1:] != shape or sizes[0] == 0:
        raise content.wrong(f"sizes {sizes}", expected=f"(n, {', '.join(map(str, shape))})" if shape else "(n)")
    size, expected = len(data) - start, math.prod(sizes)  # Python's integers: the product cannot overflow
    if size != expected:
        raise content.wrong(f"{size:,} bytes of data", expected=f"{expected:,} for sizes {sizes}")
    content.count(sizes[0])
    array: NDArray[np.uint8] = np.frombuffer(data, np.uint8, offset=start).reshape(sizes).copy()  # writable
    return array


def read_mnist(files: FoundFiles) -> Splits:
    """MNIST and data sets in its format: x uint8 ``[n, 28, 28]``, y in 0..9."""
    return Splits(train=_idx_pair(files, "train"), test=_idx_pair(files, "t10k"))


def _idx_pair(files: FoundFiles, name: str) -> Labelled:
    images = read_idx(files.read(f"{name}-images"), shape=(28, 28))
    content = files.read(f"{name}-labels")
    labels = read_idx(content, shape=())
    if len(labels) != len(images):
        raise content.wrong(f"{len(labels):,} labels", expected=f"{len(images):,}, one per image")
    if labels.max() >= _CLASSES:
        raise content.wrong(f"label {labels.max()}", expected="labels in 0..9")
    return Labelled(images, labels.astype(np.int64))


def read_records(content: FileContent) -> Labelled:
    """One file of CIFAR-10: images uint8 ``[n, 3, 32, 32]``, labels in 0..9."""
    size = len(content.data)
    if size == 0 or size % _RECORD:
        raise content.wrong(f"{size:,} bytes", expected=f"a multiple of {_RECORD:,}, the size of a record")
    records = np.frombuffer(content.data, np.uint8).reshape(-1, _RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= _CLASSES:
        row = int(labels.argmax())
        raise content.wrong(f"label {labels[row]} in record {row + 1}", expected="labels in 0..9")
    content.count(len(records))
    return Labelled(records[:, 1:].reshape(-1, *_CIFAR_SHAPE).copy(), labels)  # writable


def read_cifar10(files: FoundFiles) -> Splits:
    """CIFAR-10, with the five training files concatenated."""
    parts = [read_records(files.read(f"data_batch_{k}")) for k in range(1, 6)]
    train = Labelled(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))
    return Splits(train=train, test=read_records(files.read("test_batch")))


def read_libsvm(content: FileContent, *, features: int, labels: tuple[float, float]) -> Labelled:
    """Rows float32 ``[n, features]``, dense; labels 0 for the first of ``labels`` and 1 for the second."""
    parsed = _parse_libsvm(content.data, features, labels)
    if isinstance(parsed, Exception):
        what = reason(parsed)
        for number, line in enumerate(content.data.split(b"\n"), 1):  # scikit-learn does not name the line
            error = _parse_libsvm(line, features, labels) if line.strip() else None
            if isinstance(error, Exception):
                what = f"{reason(error)}, {brief(line)} in line {number:,}"
                break
        pairs = f"a label ({labels[0]:g} or {labels[1]:g}) and index:value pairs with indices in 1..{features}"
        raise content.wrong(what, expected=f"lines of {pairs}")
    x, y = parsed
    content.count(len(y))
    return Labelled(x, (y == labels[1]).astype(np.int64))


def _parse_libsvm(
    data: bytes, features: int, labels: tuple[float, float]
) -> tuple[NDArray[np.float32], NDArray[np.float64]] | Exception:
    from sklearn.datasets import load_svmlight_file  # slow to import

    if not data.strip():
        return ValueError("no rows")
    try:
        x, y = load_svmlight_file(io.BytesIO(data), n_features=features, zero_based=False)
    except (ValueError, OverflowError) as error:
        return error
    if not np.isin(y, labels).all():
        return ValueError("another label")
    with np.errstate(over="ignore"):
        dense: NDArray[np.float32] = x.toarray().astype(np.float32)
    return (dense, y) if np.isfinite(dense).all() else ValueError("a value beyond float32")


def read_binary(files: FoundFiles, *, features: int, labels: tuple[float, float] = (-1, 1)) -> Splits:
    """A data set with two classes in LIBSVM's format, and its test file if it is there."""
    train = read_libsvm(files.read("train"), features=features, labels=labels)
    test = read_libsvm(files.read("test"), features=features, labels=labels) if "test" in files else None
    absent = (file.names[0] for file in files.dataset.files if file.key not in files)
    note = f"Labels {labels[0]:g} and {labels[1]:g} are 0 and 1."
    return Splits(train=train, test=test, notes=(note, *(f"{name} is not there: no test set." for name in absent)))


def read_table(content: FileContent) -> Labelled:
    """Covertype's CSV: 54 measurements float32 ``[n, 54]``, and the class 1..7 as a label in 0..6.

    A header line is skipped.
    """
    expected = f"{_COLUMNS} whole numbers of at most 6 digits per line, separated by commas"
    header = content.data[:1].isalpha() or content.data[:1] == b'"'
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # for a file without data
            warnings.simplefilter("error", DeprecationWarning)  # NumPy 1 reads 1.5 as 1
            table = np.loadtxt(io.BytesIO(content.data), np.int32, None, ",", skiprows=int(header), ndmin=2)
    except (ValueError, DeprecationWarning) as error:
        raise content.wrong(reason(error), expected=expected) from None
    lines = content.data.rstrip().count(b"\n") + 1 - header
    if table.shape != (lines, _COLUMNS):
        raise content.wrong(f"{lines:,} lines with a table of {len(table):,} x {table.shape[1]}", expected=expected)
    large = np.abs(table) > _LARGEST
    if large.any():
        raise content.wrong(f"{table[large][0]} in data row {large.any(axis=1).argmax() + 1:,}", expected=expected)
    y = table[:, -1].astype(np.int64)
    bad = (y < 1) | (y > _COVERS)
    if bad.any():
        row = int(bad.argmax())
        raise content.wrong(f"class {y[row]} in data row {row + 1:,}", expected=f"1..{_COVERS}")
    content.count(len(table))
    return Labelled(table[:, :-1].astype(np.float32), y - 1)


def read_covtype(files: FoundFiles) -> Splits:
    """Covertype: all rows are the training set; the publisher's split is for another task."""
    return Splits(train=read_table(files.read("data")), notes=("Columns are as in the file, unscaled.",))


def read_digits(files: FoundFiles) -> Splits:
    """The digits of scikit-learn: pixels float32 ``[n, 64]`` in [0, 1]; a fixed, stratified fifth is the test set."""
    from sklearn.datasets import load_digits  # slow to import
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(pixels / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    return Splits(
        train=Labelled(x.astype(np.float32), y.astype(np.int64)),
        test=Labelled(test_x.astype(np.float32), test_y.astype(np.int64)),
    )


def read_tsv(content: FileContent, *, texts: Sequence[str], labels: Sequence[str]) -> Labelled:
    """The columns ``texts`` as tuples, and the index in ``labels`` of the column "label".

    Quotes are ordinary characters in these files. Parsers that treat a lone carriage return as the end of a line
    (pandas, Python's csv) misread them.
    """
    header, *rows = (line.split("\t") for line in content.lines())
    wanted = (*texts, "label")
    if any(header.count(name) != 1 for name in wanted):
        raise content.wrong(f"the header {brief(chr(9).join(header))}", expected=f"columns {', '.join(wanted)}")
    columns = [header.index(name) for name in wanted]
    x: list[tuple[str, ...]] = []
    y: list[int] = []
    for line, fields in enumerate(rows, 2):
        if len(fields) != len(header):
            raise content.wrong(f"{len(fields)} columns in line {line:,}", expected=f"{len(header)}, as in the header")
        *words, label = (fields[column] for column in columns)
        if label not in labels:
            raise content.wrong(f"label {brief(label)} in line {line:,}", expected=f"one of {', '.join(labels)}")
        x.append(tuple(words))
        y.append(labels.index(label))
    if not x:
        raise content.wrong("only a header", expected="rows")
    content.count(len(x))
    return Labelled(x, np.array(y, np.int64))


def read_glue(files: FoundFiles, *, texts: Sequence[str], labels: Sequence[str]) -> Splits:
    """Without a test set: GLUE does not publish its test labels."""
    dev = read_tsv(files.read("dev"), texts=texts, labels=labels)
    if "train" in files:
        return Splits(train=read_tsv(files.read("train"), texts=texts, labels=labels), valid=dev)
    note = f"train.tsv is not there: what is called train are the {len(dev.y):,} rows of dev.tsv."
    return Splits(train=dev, notes=(note,))


def read_words(content: FileContent) -> list[str]:
    """The words of a file, with ``<eos>`` after each line."""
    lines = content.lines() if content.data else []
    words = list(chain.from_iterable((*line.split(), "<eos>") for line in lines))
    if len(words) == len(lines):
        raise content.wrong("no words", expected="text")
    content.count(len(words))
    return words


def read_wikitext(files: FoundFiles) -> Splits:
    """Word ids int64 ``[words]``, numbered by first appearance over all splits (as Corpus in pytorch/examples)."""
    ids: dict[str, int] = {}
    parts = {}
    for name in ("train", "valid", "test"):
        words = read_words(files.read(name))
        numbers = np.fromiter((ids.setdefault(word, len(ids)) for word in words), np.int64, len(words))
        parts[name] = Labelled(numbers, numbers)
    note = f"A vocabulary of {len(ids):,} words, numbered in order of first appearance over train, valid and test."
    return Splits(**parts, notes=(note,), vocabulary=tuple(ids))


def read_vocabulary(content: FileContent) -> tuple[str, ...]:
    """BERT's word pieces: one per line, numbered by line."""
    words = tuple(content.lines())
    if len(set(words)) < len(words):
        raise content.wrong("a word piece twice, or an empty line", expected="each once")
    missing = [word for word in _SPECIAL if word not in words]
    if missing:
        raise content.wrong(f"no {', '.join(missing)}", expected="a line for each of BERT's special word pieces")
    content.count(len(words))
    return words
