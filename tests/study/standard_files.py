"""Tiny data sets in their publishers' formats, as random as they need be: ``write_mnist(folder)`` and so on.

Each takes the data folder and writes into the data set's own folder there; ``load(name, folder, verify=False)``
reads it.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

__all__ = [
    "WRITERS",
    "idx",
    "write_bert_vocab",
    "write_cifar10",
    "write_covtype",
    "write_libsvm",
    "write_mnist",
    "write_qnli",
    "write_sst2",
    "write_wikitext2",
]

_WORDS = ("the", "a", "film", "plot", "is", "was", "dull", "bright", "and", "of", "<unk>", "=", "@-@")


def idx(array: np.ndarray) -> bytes:
    """An idx file of bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, *, train: int = 60, test: int = 20, seed: int = 0, name: str = "mnist") -> Path:
    """Images that show their class: row of pixels 2 * class is bright."""
    rng = np.random.default_rng(seed)
    out = folder / name
    out.mkdir(parents=True)
    for part, n in (("train", train), ("t10k", test)):
        labels = np.arange(n) % 10
        images = rng.integers(0, 80, (n, 28, 28))
        images[np.arange(n), 2 * labels] += 150
        (out / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (out / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return out


def write_cifar10(folder: Path, *, train: int = 50, test: int = 20, seed: int = 0) -> Path:
    """``train`` examples over five files."""
    rng = np.random.default_rng(seed)
    out = folder / "cifar-10-batches-bin"
    out.mkdir(parents=True)
    sizes = {f"data_batch_{k + 1}": len(range(k, train, 5)) for k in range(5)} | {"test_batch": test}
    for name, n in sizes.items():
        labels = rng.permutation(n) % 10
        images = rng.integers(0, 80, (n, 3, 32, 32))
        images[np.arange(n), :, 3 * labels] += 150
        records = np.concatenate((labels[:, None], images.reshape(n, -1)), axis=1)
        (out / f"{name}.bin").write_bytes(records.astype(np.uint8).tobytes())
    return out


def _sentence(rng: np.random.Generator, words: int) -> str:
    return " ".join(rng.choice(_WORDS, words))


def write_wikitext2(folder: Path, *, lines: int = 40, seed: int = 0) -> Path:
    """``lines`` paragraphs of ten words for training, a quarter as many for each of the others; some lines empty."""
    rng = np.random.default_rng(seed)
    out = folder / "wikitext-2"
    out.mkdir(parents=True)
    for part, n in (("train", lines), ("valid", max(1, lines // 4)), ("test", max(1, lines // 4))):
        text = "".join(f" {_sentence(rng, 10)} \n" + (" \n" if k % 3 == 0 else "") for k in range(n))
        (out / f"{part}.txt").write_text(text, encoding="utf-8")
    return out


def write_sst2(folder: Path, *, train: int = 40, dev: int = 16, seed: int = 0) -> Path:
    """Sentences whose class is told by a word; one has a quote that is not closed."""
    rng = np.random.default_rng(seed)
    out = folder / "SST-2"
    out.mkdir(parents=True)
    for part, n in (("train", train), ("dev", dev)):
        rows = [f"{_sentence(rng, 6)} {('bad', 'good')[k % 2]} \t{k % 2}" for k in range(n)]
        rows[0] = f'" {rows[0]}'
        (out / f"{part}.tsv").write_text("\n".join(("sentence\tlabel", *rows, "")), encoding="utf-8")
    return out


def write_qnli(folder: Path, *, train: int | None = 40, dev: int = 16, seed: int = 0) -> Path:
    """``train=None`` writes no train.tsv, so that dev.tsv has to stand for it."""
    rng = np.random.default_rng(seed)
    out = folder / "QNLI"
    out.mkdir(parents=True)
    for part, n in (("train", train), ("dev", dev)):
        if n is None:
            continue
        labels = [("entailment", "not_entailment")[k % 2] for k in range(n)]
        rows = [f"{k}\tWhat {_sentence(rng, 4)}?\t{_sentence(rng, 6)}\t{labels[k]}" for k in range(n)]
        (out / f"{part}.tsv").write_text("\n".join(("index\tquestion\tsentence\tlabel", *rows, "")), encoding="utf-8")
    return out


def write_libsvm(folder: Path, name: str = "a9a", *, train: int = 60, test: int = 20, seed: int = 0) -> Path:
    """a9a, w8a (both with a test file) or mushrooms; the first feature tells the class."""
    rng = np.random.default_rng(seed)
    features, labels = {"a9a": (123, "-1 +1"), "w8a": (300, "-1 +1"), "mushrooms": (112, "1 2")}[name]
    out = folder / "libsvm"
    out.mkdir(parents=True, exist_ok=True)
    for suffix, n in (("", train), (".t", test)):
        if suffix and name == "mushrooms":
            continue
        rows = []
        for k in range(n):
            columns = sorted({1 + k % 2, *(3 + rng.choice(features - 2, 8, replace=False))})
            rows.append(" ".join((labels.split()[k % 2], *(f"{column}:1" for column in columns))) + " \n")
        (out / f"{name}{suffix}").write_text("".join(rows))
    return out


def write_covtype(folder: Path, *, rows: int = 70, seed: int = 0) -> Path:
    """Elevation goes with the class; distances to water may be negative."""
    rng = np.random.default_rng(seed)
    out = folder / "covtype"
    out.mkdir(parents=True)
    classes = np.arange(rows) % 7 + 1
    table = np.zeros((rows, 55), np.int64)
    table[:, 0] = 2000 + 200 * classes + rng.integers(0, 100, rows)
    table[:, 1:10] = rng.integers(-170, 400, (rows, 9))
    table[np.arange(rows), 10 + rng.integers(0, 4, rows)] = 1
    table[np.arange(rows), 14 + rng.integers(0, 40, rows)] = 1
    table[:, 54] = classes
    text = "".join(",".join(map(str, row)) + "\n" for row in table)
    (out / "covtype.data.gz").write_bytes(gzip.compress(text.encode()))
    return out


def write_bert_vocab(folder: Path) -> Path:
    """The special word pieces, the words of the sentences above, and letters."""
    out = folder / "bert-uncased-vocab"
    out.mkdir(parents=True)
    letters = [letter for k in range(26) for letter in (chr(97 + k), f"##{chr(97 + k)}")]
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    words = dict.fromkeys((*special, *letters, *_WORDS, "good", "bad", "what", "?", '"', "@", "-"))
    (out / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return out


WRITERS = {
    "mnist": write_mnist,
    "fashion-mnist": lambda folder: write_mnist(folder, name="fashion-mnist"),
    "cifar10": write_cifar10,
    "wikitext2": write_wikitext2,
    "sst2": write_sst2,
    "qnli": write_qnli,
    "a9a": lambda folder: write_libsvm(folder, "a9a"),
    "w8a": lambda folder: write_libsvm(folder, "w8a"),
    "mushrooms": lambda folder: write_libsvm(folder, "mushrooms"),
    "covtype": write_covtype,
}
