"""All data sets: where each is published, how it is verified, and its licence."""

from __future__ import annotations

from functools import partial

from ordain.study.data.dataset import Dataset, Download, File
from ordain.study.data.image_formats import read_cifar10, read_mnist
from ordain.study.data.table_formats import read_binary, read_covtype, read_digits
from ordain.study.data.text_formats import read_qnli, read_sst2, read_wikitext

__all__ = ["DATASETS"]

_MB = 1_000_000
_RESEARCH = "research data"


def _idx(
    name: str, title: str, *, folders: tuple[str, ...], licence: str, url: str, digests: dict[str, tuple[str, str]]
) -> Dataset:
    """``digests``: for each file, the sha256 of its content and the official md5 of the published .gz file."""
    files, downloads = [], []
    for key, (sha256, md5) in digests.items():
        file = f"{key}-idx3-ubyte" if key.endswith("images") else f"{key}-idx1-ubyte"
        rows = 60_000 if key.startswith("train") else 10_000
        files.append(File(key=key, names=(file,), limit=50 * _MB, digest=f"sha256:{sha256}", rows=rows))
        downloads.append(Download(url=f"{url}{file}.gz", name=f"{file}.gz", limit=40 * _MB, digest=f"md5:{md5}"))
    return Dataset(
        name=name,
        title=title,
        folders=folders,
        files=tuple(files),
        licence=licence,
        counts={"train": 60_000, "test": 10_000},
        read=read_mnist,
        downloads=tuple(downloads),
    )


_MNIST = _idx(
    "mnist",
    "handwritten digits, 28x28",
    folders=("mnist", "MNIST/raw", "MNIST"),
    licence=_RESEARCH,
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    digests={
        "train-images": (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        ),
        "train-labels": (
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "d53e105ee54ea40749a09fcbcd1e9432",
        ),
        "t10k-images": (
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "9fb629c4189551a2d022fa330f9573f3",
        ),
        "t10k-labels": (
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    },
)
_FASHION = _idx(
    "fashion-mnist",
    "clothing, 28x28",
    folders=("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
    licence="MIT",
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",  # the publisher has no https
    digests={  # checked against Debian's dataset-fashion-mnist
        "train-images": (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        ),
        "train-labels": (
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "25c81989df183df01b3e8a0aad5dffbe",
        ),
        "t10k-images": (
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "bef4ecab320f06d8554ea6380940ec79",
        ),
        "t10k-labels": (
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    },
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
        File(key=key, names=(f"{key}.bin",), limit=31 * _MB, digest=f"sha256:{digest}", rows=10_000)
        for key, digest in _CIFAR_FILES.items()
    ),
    licence=_RESEARCH,
    counts={"train": 50_000, "test": 10_000},
    read=read_cifar10,
    downloads=(
        Download(
            url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            name="cifar-10-binary.tar.gz",
            limit=200 * _MB,
            digest="md5:c32a1d4ab5d03f1284b67883e8d87530",
            members={f"cifar-10-batches-bin/{key}.bin": f"{key}.bin" for key in _CIFAR_FILES},
        ),
    ),
)

_WIKITEXT_FILES = {  # checked against the published token counts and vocabulary of 33,278 words
    "train": ("sha256:9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f", 2_088_628),
    "valid": ("sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8", 217_646),
    "test": ("sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0", 245_569),
}
_WIKITEXT_URL = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/"
_WIKITEXT = Dataset(
    name="wikitext2",
    title="Wikipedia, words",
    folders=("wikitext-2", "wikitext2"),
    files=tuple(
        File(key=key, names=(f"{key}.txt", f"wiki.{key}.tokens"), limit=12 * _MB, digest=digest, rows=rows)
        for key, (digest, rows) in _WIKITEXT_FILES.items()
    ),
    licence="CC BY-SA 3.0",
    counts={key: rows for key, (_, rows) in _WIKITEXT_FILES.items()},
    read=read_wikitext,
    downloads=tuple(
        Download(url=f"{_WIKITEXT_URL}{key}.txt", name=f"{key}.txt", limit=12 * _MB, digest=digest)
        for key, (digest, _) in _WIKITEXT_FILES.items()
    ),
)


def _glue(folder: str, archive: str, md5: str) -> tuple[Download, ...]:
    members = {f"{folder}/{part}.tsv": f"{part}.tsv" for part in ("train", "dev")}
    url = f"https://dl.fbaipublicfiles.com/glue/data/{archive}"
    return (Download(url=url, name=archive, limit=30 * _MB, digest=f"md5:{md5}", members=members),)


# The md5 of the archives and of their members are those that torchtext and Gluon NLP publish.
_SST2 = Dataset(
    name="sst2",
    title="GLUE: film reviews",
    folders=("sst2", "SST-2", "glue/SST-2", "glue_data/SST-2"),
    files=(
        File(
            key="train",
            names=("train.tsv",),
            limit=10 * _MB,
            digest="md5:da409a0a939379ed32a470bc0f7fe99a",
            rows=67_349,
        ),
        File(key="dev", names=("dev.tsv",), limit=_MB, digest="md5:268856b487b2a31a28c0a93daaff7288", rows=872),
    ),
    licence=_RESEARCH,
    counts={"train": 67_349, "valid": 872},
    read=read_sst2,
    downloads=_glue("SST-2", "SST-2.zip", "9f81648d4199384278b86e315dac217c"),
)
_QNLI = Dataset(
    name="qnli",
    title="GLUE: questions, answers",
    folders=("qnli", "QNLI", "glue/QNLI", "glue_data/QNLI"),
    files=(
        File(
            key="train",
            names=("train.tsv",),
            limit=50 * _MB,
            digest="md5:5e6063f407b08d1f7c7074d049ace94a",
            rows=104_743,
            required=False,
        ),
        File(key="dev", names=("dev.tsv",), limit=5 * _MB, digest="md5:1e81e211959605f144ba6c0ad7dc948b", rows=5_463),
    ),
    licence=_RESEARCH,
    counts={"train": 104_743, "valid": 5_463},
    read=read_qnli,
    downloads=_glue("QNLI", "QNLIv2.zip", "b4efd6554440de1712e9b54e14760e82"),
)


def _libsvm(
    name: str, title: str, *, features: int, counts: dict[str, int], labels: tuple[float, float] = (-1, 1)
) -> Dataset:
    """The publisher gives no checksums: only row counts and the range of indices can be compared."""
    names = {"train": name, "test": f"{name}.t"}
    url = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
    return Dataset(
        name=name,
        title=title,
        folders=("libsvm", name),
        files=tuple(
            File(key=key, names=(names[key],), limit=10 * _MB, rows=rows, required=key == "train")
            for key, rows in counts.items()
        ),
        licence=_RESEARCH,
        counts=counts,
        read=partial(read_binary, features=features, labels=labels),
        downloads=tuple(Download(url=f"{url}{names[key]}", name=names[key], limit=10 * _MB) for key in counts),
    )


_COVTYPE = Dataset(
    name="covtype",
    title="forest, 54 features",
    folders=("covtype",),
    files=(File(key="data", names=("covtype.data", "covtype.csv"), limit=80 * _MB, rows=581_012),),
    licence="CC BY 4.0",
    counts={"train": 581_012},
    read=read_covtype,
    downloads=(
        # UCI publishes no checksum: this is the copy that scikit-learn keeps, with scikit-learn's checksum.
        Download(
            url="https://ndownloader.figshare.com/files/5976039",
            name="covtype.data.gz",
            limit=20 * _MB,
            digest="sha256:614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771",
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

_VOCABULARY_DIGEST = "sha256:07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
_BERT = Dataset(
    name="bert-vocab",
    title="BERT's word pieces",
    folders=("bert-uncased-vocab", "bert-vocab", "bert-base-uncased"),
    files=(File(key="vocab", names=("vocab.txt",), limit=_MB, digest=_VOCABULARY_DIGEST, rows=30_522),),
    licence="Apache 2.0",
    counts={},
    read=None,
    downloads=(
        Download(
            url="https://huggingface.co/google-bert/bert-base-uncased/resolve/main/vocab.txt",
            name="vocab.txt",
            limit=_MB,
            digest=_VOCABULARY_DIGEST,
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
        _libsvm("a9a", "income, 123 features", features=123, counts={"train": 32_561, "test": 16_281}),
        _libsvm("w8a", "web pages, 300 features", features=300, counts={"train": 49_749, "test": 14_951}),
        # 112 is the largest index in the file and the number that its publisher states.
        _libsvm("mushrooms", "edible or not, 112 features", features=112, counts={"train": 8_124}, labels=(1, 2)),
        _COVTYPE,
        _DIGITS,
        _BERT,
    )
}
