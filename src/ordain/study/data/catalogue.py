"""The data sets: where each is published, what it must be, and how it may be used."""

from __future__ import annotations

from functools import partial

from ordain.study.data.cifar import read_cifar10
from ordain.study.data.covtype import read_covtype
from ordain.study.data.digits import read_digits
from ordain.study.data.glue import read_qnli, read_sst2
from ordain.study.data.idx import read_mnist
from ordain.study.data.kinds import Dataset, Download, File
from ordain.study.data.libsvm import read_binary
from ordain.study.data.wikitext import read_wikitext

__all__ = ["DATASETS"]

_MB = 1_000_000
_RESEARCH = "research data"
_IDX_NAMES = {
    "train-images": "train-images-idx3-ubyte",
    "train-labels": "train-labels-idx1-ubyte",
    "t10k-images": "t10k-images-idx3-ubyte",
    "t10k-labels": "t10k-labels-idx1-ubyte",
}


def _idx_files(digests: dict[str, str]) -> tuple[File, ...]:
    return tuple(
        File(key, (name,), 50 * _MB, digests[key], rows=60_000 if key.startswith("train") else 10_000)
        for key, name in _IDX_NAMES.items()
    )


def _idx_downloads(base: str, digests: dict[str, str]) -> tuple[Download, ...]:
    return tuple(Download(f"{base}{name}.gz", f"{name}.gz", 40 * _MB, digests[key]) for key, name in _IDX_NAMES.items())


_MNIST = Dataset(
    name="mnist",
    title="handwritten digits, 28x28",
    folders=("mnist", "MNIST/raw", "MNIST"),
    # The content of the .gz files with the official md5 below.
    files=_idx_files(
        {
            "train-images": "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels": "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images": "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels": "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        }
    ),
    licence=_RESEARCH,
    counts={"train": 60_000, "test": 10_000},
    read=read_mnist,
    downloads=_idx_downloads(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels": "md5:d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images": "md5:9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels": "md5:ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
)

_FASHION = Dataset(
    name="fashion-mnist",
    title="clothing, 28x28",
    folders=("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
    # The content of the .gz files with the official md5 below; checked against Debian's dataset-fashion-mnist.
    files=_idx_files(
        {
            "train-images": "sha256:c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels": "sha256:bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images": "sha256:5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels": "sha256:0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        }
    ),
    licence="MIT",
    counts={"train": 60_000, "test": 10_000},
    read=read_mnist,
    downloads=_idx_downloads(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",  # the publisher has no https
        {
            "train-images": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels": "md5:25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images": "md5:bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels": "md5:bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
)

_CIFAR_FILES = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_CIFAR10 = Dataset(
    name="cifar10",
    title="photographs, 3x32x32",
    folders=("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10"),
    files=tuple(
        File(key, (f"{key}.bin",), 31 * _MB, f"sha256:{digest}", rows=10_000) for key, digest in _CIFAR_FILES.items()
    ),
    licence=_RESEARCH,
    counts={"train": 50_000, "test": 10_000},
    read=read_cifar10,
    downloads=(
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "cifar-10-binary.tar.gz",
            200 * _MB,
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            members={f"cifar-10-batches-bin/{key}.bin": f"{key}.bin" for key in _CIFAR_FILES},
        ),
    ),
)

_WIKITEXT_FILES = {  # checked against the files' published token counts and vocabulary of 33,278 words
    "train": ("9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f", 2_088_628),
    "valid": ("f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8", 217_646),
    "test": ("d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0", 245_569),
}
_WIKITEXT = Dataset(
    name="wikitext2",
    title="Wikipedia, words",
    folders=("wikitext-2", "wikitext2"),
    files=tuple(
        File(key, (f"{key}.txt", f"wiki.{key}.tokens"), 12 * _MB, f"sha256:{digest}", rows)
        for key, (digest, rows) in _WIKITEXT_FILES.items()
    ),
    licence="CC BY-SA 3.0",
    counts={key: rows for key, (_, rows) in _WIKITEXT_FILES.items()},
    read=read_wikitext,
    downloads=tuple(
        Download(
            f"https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/{key}.txt",
            f"{key}.txt",
            12 * _MB,
            f"sha256:{digest}",
        )
        for key, (digest, _) in _WIKITEXT_FILES.items()
    ),
)


def _glue_download(folder: str, archive: str, md5: str) -> tuple[Download, ...]:
    members = {f"{folder}/{part}.tsv": f"{part}.tsv" for part in ("train", "dev")}
    return (Download(f"https://dl.fbaipublicfiles.com/glue/data/{archive}", archive, 30 * _MB, f"md5:{md5}", members),)


# The md5 of the archives and of their members are those that torchtext and Gluon NLP publish.
_SST2 = Dataset(
    name="sst2",
    title="GLUE: film reviews",
    folders=("sst2", "SST-2", "glue/SST-2", "glue_data/SST-2"),
    files=(
        File("train", ("train.tsv",), 10 * _MB, "md5:da409a0a939379ed32a470bc0f7fe99a", 67_349),
        File("dev", ("dev.tsv",), _MB, "md5:268856b487b2a31a28c0a93daaff7288", 872),
    ),
    licence=_RESEARCH,
    counts={"train": 67_349, "valid": 872},
    read=read_sst2,
    downloads=_glue_download("SST-2", "SST-2.zip", "9f81648d4199384278b86e315dac217c"),
)
_QNLI = Dataset(
    name="qnli",
    title="GLUE: questions, answers",
    folders=("qnli", "QNLI", "glue/QNLI", "glue_data/QNLI"),
    files=(
        File("train", ("train.tsv",), 50 * _MB, "md5:5e6063f407b08d1f7c7074d049ace94a", 104_743, required=False),
        File("dev", ("dev.tsv",), 5 * _MB, "md5:1e81e211959605f144ba6c0ad7dc948b", 5_463),
    ),
    licence=_RESEARCH,
    counts={"train": 104_743, "valid": 5_463},
    read=read_qnli,
    downloads=_glue_download("QNLI", "QNLIv2.zip", "b4efd6554440de1712e9b54e14760e82"),
)


def _libsvm(
    name: str,
    title: str,
    *,
    features: int,
    rows: int,
    test_rows: int | None = None,
    labels: tuple[float, float] = (-1, 1),
) -> Dataset:
    """Its publisher gives no checksums: counts, and the range of indices, are what can be compared."""
    names = (name,) if test_rows is None else (name, f"{name}.t")
    files = [File("train", (name,), 10 * _MB, rows=rows)]
    if test_rows is not None:
        files.append(File("test", (f"{name}.t",), 10 * _MB, rows=test_rows, required=False))
    base = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
    return Dataset(
        name=name,
        title=title,
        folders=("libsvm", name),
        files=tuple(files),
        licence=_RESEARCH,
        counts={"train": rows} if test_rows is None else {"train": rows, "test": test_rows},
        read=partial(read_binary, features=features, labels=labels),
        downloads=tuple(Download(f"{base}{name}", name, 10 * _MB) for name in names),
    )


_COVTYPE = Dataset(
    name="covtype",
    title="forest, 54 features",
    folders=("covtype",),
    files=(File("data", ("covtype.data", "covtype.csv"), 80 * _MB, rows=581_012),),
    licence="CC BY 4.0",
    counts={"train": 581_012},
    read=read_covtype,
    downloads=(
        # UCI's file as scikit-learn keeps it, with scikit-learn's checksum; UCI publishes none.
        Download(
            "https://ndownloader.figshare.com/files/5976039",
            "covtype.data.gz",
            20 * _MB,
            "sha256:614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771",
        ),
    ),
)

_DIGITS = Dataset(
    name="digits",
    title="handwritten digits, 8x8",
    folders=("digits",),
    files=(),
    licence="BSD 3-clause",
    counts={"train": 1_437, "test": 360},
    read=read_digits,
    by_hand="install scikit-learn, which carries it.",
)

_BERT = Dataset(
    name="bert-vocab",
    title="BERT's word pieces",
    folders=("bert-uncased-vocab", "bert-vocab", "bert-base-uncased"),
    files=(
        File(
            "vocab",
            ("vocab.txt",),
            _MB,
            "sha256:07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            30_522,
        ),
    ),
    licence="Apache 2.0",
    counts={},
    read=None,
    downloads=(
        Download(
            "https://huggingface.co/google-bert/bert-base-uncased/resolve/main/vocab.txt",
            "vocab.txt",
            _MB,
            "sha256:07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        ),
    ),
)

DATASETS: dict[str, Dataset] = {
    entry.name: entry
    for entry in (
        _MNIST,
        _FASHION,
        _CIFAR10,
        _WIKITEXT,
        _SST2,
        _QNLI,
        _libsvm("a9a", "income, 123 features", features=123, rows=32_561, test_rows=16_281),
        _libsvm("w8a", "web pages, 300 features", features=300, rows=49_749, test_rows=14_951),
        # 112 is the largest index in the file and the number its publisher states.
        _libsvm("mushrooms", "edible or not, 112 features", features=112, rows=8_124, labels=(1, 2)),
        _COVTYPE,
        _DIGITS,
        _BERT,
    )
}
