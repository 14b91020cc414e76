"""Read tables of numbers: LIBSVM's text files, Covertype's CSV, and the digits of scikit-learn."""

from __future__ import annotations

import io
import warnings

import numpy as np
from numpy.typing import NDArray

from ordain.study.data.data_files import FileContent, FoundFiles, Labelled, Splits, brief, reason

_COLUMNS = 55
_CLASSES = 7
_LARGEST = 999_999  # float32 holds every integer up to here


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
    bad = (y < 1) | (y > _CLASSES)
    if bad.any():
        row = int(bad.argmax())
        raise content.wrong(f"class {y[row]} in data row {row + 1:,}", expected=f"1..{_CLASSES}")
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
