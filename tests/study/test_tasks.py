"""Every task, from tiny files in its publisher's format to a record."""

from __future__ import annotations

import itertools
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from study.recorded import DIGITS, call, record, repeatable
from study.standard_files import WRITERS, write_bert_vocab, write_libsvm, write_mnist, write_qnli, write_sst2

from ordain import RandomReshuffling, herding, reference
from ordain.errors import InputError
from ordain.study.commands.listing_commands import GRAB_COST
from ordain.study.runs.arms import build_order, parse
from ordain.study.runs.config import ABLATIONS
from ordain.study.runs.job import Job
from ordain.study.runs.runner import Progress, run
from ordain.study.tasks import TASKS, LoadedTask
from ordain.study.tasks.bert import settled
from ordain.study.tasks.classification import split
from ordain.study.tasks.images import crop_and_flip
from ordain.study.tasks.language import sequences
from ordain.study.vectors import STUDIES

TUNED = ("sst2", "sst2-head", "sst2-lora")
BERTS = (*TUNED, "qnli")
FILES = {**WRITERS, "digits": lambda folder: None}


def write(name: str, folder: Path) -> None:
    FILES[TASKS[name].data](folder)
    if name in BERTS:
        write_bert_vocab(folder)


def load(name: str, folder: Path, **options: Any) -> LoadedTask:
    write(name, folder)
    return TASKS[name].load(folder, verify=False, **options)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_trains(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "data")
    grab = "grab-head" if name == "cifar10-resnet" else "grab"  # batch normalisation in front of the head
    words = ("--orders", f"rr,{grab}", "--seeds", 1, "--epochs", 1, "--lr", 0.1, "--jobs", 0, "--limit", 11)
    files = ("--data-dir", tmp_path / "data", "--no-verify", "--out", tmp_path / "run")
    result = call("run", name, *words, *files, "--batch-size", 4)
    assert result.exit_code == 0, result.output
    for arm in ("rr", grab):
        start, *epochs, end = record(tmp_path / "run", arm)
        assert (start["arm"], start["lr"], start["seed"]) == (arm, 0.1, 0)
        assert [line["epoch"] for line in epochs] == [0, 1]
        assert end == {"kind": "end", "epochs": 1, "state": "done", "why": None}
        assert epochs[1]["train_loss"] < epochs[0]["train_loss"]
        assert all(0 <= line[part] <= 1 for line in epochs for part in ("valid_accuracy", "test_accuracy"))
    described = json.loads((tmp_path / "run" / "config.json").read_text())["problem"]
    assert described["train"] == 11
    assert min(described["valid"], described["test"]) > 0
    assert max(described["valid"], described["test"]) <= 11
    assert described["parameters"] > 0


def test_the_catalogue_counts_parameters_of_the_real_models() -> None:
    """Of those whose size does not depend on tiny files."""
    for name, classes in (("mnist", 10), ("a9a", 2), ("w8a", 2), ("mushrooms", 2), ("covtype", 7), ("digits", 10)):
        features = {"mnist": 784, "a9a": 123, "w8a": 300, "mushrooms": 112, "covtype": 54, "digits": 64}[name]
        assert TASKS[name].parameters == (features + 1) * classes
    embedding = (30_522 + 512 + 2) * 128 + 2 * 128
    layer = 4 * 128 * 129 + 128 * 513 + 512 + 512 * 128 + 4 * 128
    assert TASKS["sst2"].parameters == embedding + 2 * (layer - 128 + 128) + 128 * 129 + 2 * 129
    words, lstm = 33_278, 2 * (2 * 4 * 32 * 32 + 2 * 4 * 32)
    assert TASKS["wikitext2"].parameters == words * 32 + lstm + words * 33


@pytest.mark.parametrize("name", ["cifar10", "cifar10-resnet", "gpt"])
def test_networks_are_as_long_as_stated(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path).build(0)
    assert sum(p.numel() for p in model.parameters()) == TASKS[name].parameters


def test_images_are_cropped_and_mirrored() -> None:
    x = torch.arange(1.0, 1 + 400 * 2 * 6 * 6).view(400, 2, 6, 6)
    moved = crop_and_flip(x, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    seen = set()
    for before, after in zip(padded, moved, strict=True):
        for dy, dx, mirrored in itertools.product(range(9), range(9), (False, True)):
            crop = before[:, dy : dy + 6, dx : dx + 6]
            if torch.equal(after, crop.flip(-1) if mirrored else crop):
                seen.add((dy, dx, mirrored))
                break
        else:
            pytest.fail("an image that is none of its crops")
    assert len(seen) > 140  # of 162
    torch.testing.assert_close(moved, crop_and_flip(x, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("n", [10, 57, 1000])
@pytest.mark.parametrize(("valid", "test"), [(True, False), (True, True), (False, False), (False, True)])
def test_a_split_is_fixed_and_whole(n: int, valid: bool, test: bool) -> None:
    parts = split(n, valid=valid, test=test)
    assert sorted(np.concatenate(parts)) == list(range(n))
    assert [len(part) for part in parts[1:]] == [n // 10 * valid, n // 10 * test]
    for fewer, part in zip(split(n, valid=valid, test=test, limit=5), parts, strict=True):
        np.testing.assert_array_equal(fewer, part[:5])


def test_a_limit_shortens_a_publisher_s_test_set(tmp_path: Path) -> None:
    """By a fixed draw from all of it: a file may be sorted by its classes."""
    whole, some = load("mnist", tmp_path / "whole"), load("mnist", tmp_path / "some", limit=8)
    rows = np.random.default_rng(0).permutation(20)[:8]
    assert whole.test_y is not None
    assert some.test_y is not None
    assert whole.test_x is not None
    np.testing.assert_array_equal(some.test_y, whole.test_y[rows])
    np.testing.assert_array_equal(some.test_x, whole.test_x[rows])
    assert len(some.valid_x) == 6  # there are no more
    texts = load("wikitext2", tmp_path / "text", limit=2)
    assert (len(texts.train_x), len(texts.valid_x)) == (2, 2)
    assert texts.test_x is not None
    assert texts.test_x.shape == (2, 35)


@pytest.mark.parametrize("limit", [0, 55])
def test_a_limit_out_of_range(limit: int, tmp_path: Path) -> None:
    write_mnist(tmp_path, train=60)
    with pytest.raises(InputError, match=r"--limit .*1 to 54"):
        TASKS["mnist"].load(tmp_path, limit, verify=False)


def test_images_are_split_and_scaled(tmp_path: Path) -> None:
    problem = load("mnist", tmp_path)
    assert problem.train_x.shape == (54, 784)
    assert (len(problem.valid_x), len(problem.test_x)) == (6, 20)  # type: ignore[arg-type]
    # The writer's images show their class: rows 2 * class are bright.
    for x, y in ((problem.train_x, problem.train_y), (problem.valid_x, problem.valid_y)):
        np.testing.assert_array_equal(x.view(-1, 28, 28).mean(dim=2).argmax(dim=1), 2 * y)
    assert 0.5 < problem.train_x.max() <= 1
    assert problem.train_x.min() >= 0


def test_columns_are_standardised_by_the_training_rows(tmp_path: Path) -> None:
    problem = load("covtype", tmp_path)
    x = problem.train_x
    varied = x.std(dim=0, correction=0) > 0
    torch.testing.assert_close(x.mean(dim=0), torch.zeros(54), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(dim=0, correction=0)[varied], torch.ones(int(varied.sum())), atol=1e-4, rtol=0)
    assert problem.valid_x.mean(dim=0).abs().max() > 0.01  # not by their own


def test_a_publisher_s_test_file_is_the_test_set(tmp_path: Path) -> None:
    assert len(load("a9a", tmp_path).test_x) == 20  # type: ignore[arg-type]
    write_libsvm(tmp_path / "other", "mushrooms")
    problem = TASKS["mushrooms"].load(tmp_path / "other", verify=False)
    assert (len(problem.train_x), len(problem.valid_x), len(problem.test_x)) == (48, 6, 6)  # type: ignore[arg-type]
    assert any("test set is a fixed tenth" in note for note in problem.notes)


def test_sequences_follow_one_another() -> None:
    x, y = sequences(np.arange(106))
    assert x.shape == (3, 35)
    torch.testing.assert_close(y, x + 1)
    assert len(sequences(np.arange(105))[0]) == 2  # the last word has no follower
    with pytest.raises(InputError, match="35 words"):
        sequences(np.arange(35))


def test_the_order_of_sequences_does_not_change_their_loss(tmp_path: Path) -> None:
    problem = load("wikitext2", tmp_path)
    model = problem.build(0)
    x = problem.train_x[:4]
    torch.testing.assert_close(problem.forward(model, x).flip(0), problem.forward(model, x.flip(0)))


def test_sentences_are_word_pieces(tmp_path: Path) -> None:
    problem = load("qnli", tmp_path)
    words = (tmp_path / "bert-uncased-vocab" / "vocab.txt").read_text().split()
    ids, mask, kinds = problem.train_x[0]
    assert problem.train_x.shape[1:] == (3, 32)
    length = int(mask.sum())
    said = [words[i] for i in ids[:length]]
    assert said[:2] == ["[CLS]", "what"]
    assert said[-1] == "[SEP]"
    assert set(ids[length:].tolist()) <= {words.index("[PAD]")}
    second = said.index("[SEP]") + 1
    assert kinds[:length].tolist() == [0] * second + [1] * (length - second)


def test_dev_is_the_test_set_and_stands_for_a_missing_train(tmp_path: Path) -> None:
    problem = load("sst2", tmp_path / "sst2")
    assert (len(problem.train_x), len(problem.valid_x), len(problem.test_x)) == (36, 4, 16)  # type: ignore[arg-type]
    write_qnli(tmp_path / "qnli", train=None, dev=30)
    write_bert_vocab(tmp_path / "qnli")
    problem = TASKS["qnli"].load(tmp_path / "qnli", verify=False)
    assert (len(problem.train_x), len(problem.valid_x), len(problem.test_x)) == (24, 3, 3)  # type: ignore[arg-type]
    assert any("dev.tsv" in note for note in problem.notes)
    assert any("random weights" in note for note in problem.notes)


def save_bert(folder: Path, words: int, *, layers: int, prefix: str = "") -> dict[str, torch.Tensor]:
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(7)
    config = transformers.BertConfig(
        vocab_size=words, hidden_size=8, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=12
    )
    tensors = {prefix + k: v.contiguous() for k, v in transformers.BertModel(config).state_dict().items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return tensors


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("given", [True, False])
def test_weights_from_a_folder(tmp_path: Path, prefix: str, given: bool) -> None:
    """The first two layers of three, from --weights or from the data folder."""
    write_sst2(tmp_path)
    words = len((write_bert_vocab(tmp_path) / "vocab.txt").read_text().split())
    folder = tmp_path / ("mini" if given else "bert-tiny")
    tensors = save_bert(folder, words, layers=3, prefix=prefix)
    problem = TASKS["sst2"].load(tmp_path, weights=folder if given else None, verify=False)
    one, other = (problem.build(seed).state_dict() for seed in (0, 1))
    kept = [name for name in one if name.startswith("bert.")]
    assert len(kept) == len([name for name in tensors if "layer.2." not in name])
    for name in kept:
        torch.testing.assert_close(one[name], tensors[prefix + name.removeprefix("bert.")], rtol=0, atol=0)
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])
    assert any("the first 2 of 3 layers" in note and folder.name in note for note in problem.notes)


def test_weights_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model by its name: the two files that are read are all that is asked for, and the notes have the commit."""
    write_sst2(tmp_path)
    words = len((write_bert_vocab(tmp_path) / "vocab.txt").read_text().split())
    commit = "0123456789abcdef" * 2
    tensors = save_bert(tmp_path / "hub" / commit, words, layers=2)
    asked = []

    def download(repo: str, **options: Any) -> str:
        asked.append((repo, options))
        return str(tmp_path / "hub" / commit)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for name, revision in (("someone/tiny", None), ("someone/tiny@refs/pr/3", "refs/pr/3")):
        problem = TASKS["sst2"].load(tmp_path, weights=name, verify=False)
        found = problem.build(0).state_dict()["bert.encoder.layer.1.output.dense.weight"]
        torch.testing.assert_close(found, tensors["encoder.layer.1.output.dense.weight"], rtol=0, atol=0)
        assert any("someone/tiny at 0123456789ab of the Hugging Face hub" in note for note in problem.notes)
        assert asked.pop() == (
            "someone/tiny",
            {"revision": revision, "allow_patterns": ["config.json", "model.safetensors"], "token": False},
        )


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command names the model, and says what to do; no folder is left behind."""
    write("sst2", tmp_path / "data")
    with socket.socket() as taken:  # bound and not listening: refuses every connection
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        words = ("--weights", "someone/tiny", "--out", tmp_path / "run", "--data-dir", tmp_path / "data", "--no-verify")
        result = call("run", "sst2", *words)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "--weights someone/tiny: not a folder, and the hub did not provide it" in said
    assert "into a folder" in said
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="which is not a folder"):
        TASKS["sst2"].load(tmp_path / "data", weights="../no/such", verify=False)


def test_weights_are_found_again_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert settled("mine/tiny") == str(tmp_path / "mine" / "tiny")
    assert settled("someone/tiny") == "someone/tiny"
    assert settled("./someone/else/tiny") == str(tmp_path / "someone" / "else" / "tiny")


def test_weights_that_cannot_be_used(tmp_path: Path) -> None:
    write_sst2(tmp_path)
    words = len((write_bert_vocab(tmp_path) / "vocab.txt").read_text().split())
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"never read")
    save_bert(tmp_path / "other", words + 1, layers=2)
    save_bert(tmp_path / "shallow", words, layers=1)
    for name, word in (("pickled", "without config.json"), ("other", "vocab_size"), ("shallow", "at least 2 layers")):
        with pytest.raises(InputError, match=word):
            TASKS["sst2"].load(tmp_path, weights=tmp_path / name, verify=False)
    with pytest.raises(InputError, match="--weights with digits"):
        TASKS["digits"].load(tmp_path, weights=tmp_path / "other")


def of_a_small_bert(folder: Path) -> dict[str, Any]:
    """SST-2, and options for a task that trains a BERT 8 wide on 11 examples of it."""
    write_sst2(folder)
    words = len((write_bert_vocab(folder) / "vocab.txt").read_text().split())
    save_bert(folder / "small", words, layers=2)
    return {"limit": 11, "weights": str(folder / "small")}


def test_what_fine_tuning_trains(tmp_path: Path) -> None:
    write("sst2", tmp_path)
    for name, kinds in (("sst2-head", {"classifier"}), ("sst2-lora", {"lora_A", "lora_B", "classifier"})):
        problem = TASKS[name].load(tmp_path, verify=False)
        model = problem.build(0)
        trained = {path: p for path, p in model.named_parameters() if p.requires_grad}
        assert sum(p.numel() for p in trained.values()) == TASKS[name].parameters
        assert {kind for kind in kinds if any(kind in path for path in trained)} == kinds
        assert all(any(kind in path for kind in kinds) for path in trained)
        whole, x = TASKS["sst2"].load(tmp_path, verify=False), problem.train_x[:4]
        # LoRA starts as the model that it is put on.
        torch.testing.assert_close(problem.forward(model, x), whole.forward(whole.build(0), x), rtol=0, atol=0)
        assert any("trained" in note for note in problem.notes)


class ReshufflingBook:
    """What looks at no gradients."""

    def __init__(self, first: list[int], dim: int) -> None:
        self.order = RandomReshuffling(len(first), seed=3, distributed=False)
        assert list(self.order.sampler) == first

    def see(self, row: np.ndarray) -> None:
        pass

    def next_order(self) -> list[int]:
        return list(self.order.sampler)


class HerdingBook:
    """Herding of the gradients of an epoch, one at a time."""

    def __init__(self, first: list[int], dim: int) -> None:
        self.order, self.rows = list(first), list[np.ndarray]()

    def see(self, row: np.ndarray) -> None:
        self.rows.append(row)

    def next_order(self) -> list[int]:
        found = herding.herd(torch.tensor(np.stack(self.rows)), rounds=10, tolerance=0.2)
        self.order, self.rows = [self.order[i] for i in found], []
        return self.order


BOOKS: dict[str, Any] = {"rr": ReshufflingBook, "grab-pair": reference.PairGraB, "herding-head": HerdingBook}


@pytest.mark.parametrize("arm", BOOKS)
@pytest.mark.parametrize("name", TUNED)
def test_fine_tuning_is_in_the_order_of_a_loop_over_examples(name: str, arm: str, tmp_path: Path) -> None:
    problem = TASKS[name].load(tmp_path, verify=False, **of_a_small_bert(tmp_path))
    model, twin = (problem.build(0).double().train() for _ in range(2))
    order = build_order(parse(arm), model, 11, seed=3, memory_limit=2**20)
    trained = {path: p for path, p in twin.named_parameters() if p.requires_grad}
    looked_at = [p for path, p in trained.items() if "head" not in arm or "classifier" in path]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.2) for one in (model, twin)]
    permutation = list(order.sampler)
    book = BOOKS[arm](permutation, sum(p.numel() for p in looked_at))
    for _ in range(3):
        for start in range(0, 11, 4):
            rows = permutation[start : start + 4]
            for row in rows:
                loss = problem.loss(problem.forward(twin, problem.train_x[[row]]), problem.train_y[[row]])
                grads = torch.autograd.grad(loss, looked_at, allow_unused=True, materialize_grads=True)
                book.see(torch.cat([grad.flatten() for grad in grads]).numpy())
            for one in (model, twin):
                problem.loss(problem.forward(one, problem.train_x[rows]), problem.train_y[rows]).backward()
            order.step()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        permutation = list(order.sampler)
        assert permutation == list(book.next_order())
    order.detach()


class Killed(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("name", TUNED)
def test_fine_tuning_that_is_killed_resumes(name: str, tmp_path: Path) -> None:
    options = of_a_small_bert(tmp_path / "data")
    arms = ("grab-pair", "herding-head")
    config = replace(DIGITS, task=name, arms=arms, batch_size=4, optimizer="adamw", decay="cosine", **options)
    more: dict[str, Any] = {"data": tmp_path / "data", "verify": False, "checkpoint_every": 0.0}

    def kill(progress: Progress) -> None:
        if (progress.message.kind, progress.message.epoch) == ("checkpoint", 2):
            raise Killed

    run(config, tmp_path / "whole", **more)
    for arm in arms:
        with pytest.raises(Killed):
            run(replace(config, arms=(arm,)), tmp_path / arm, report=kill, **more)
        assert Job(arm, 0.1, 0).file(tmp_path / arm, "checkpoints").exists()
        run(replace(config, arms=(arm,)), tmp_path / arm, **more)
        assert repeatable(tmp_path / arm).items() <= repeatable(tmp_path / "whole").items()


def test_lora_without_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("sst2", tmp_path / "data")
    monkeypatch.setitem(sys.modules, "peft", None)
    result = call("run", "sst2-lora", "--data-dir", tmp_path / "data", "--no-verify", "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert "pip install 'ordain[peft]'" in result.stderr
    assert not (tmp_path / "run").exists()


def test_tasks_are_listed() -> None:
    result = call("tasks")
    assert result.exit_code == 0
    assert "without the train file of QNLI" in result.stdout
    assert f"takes {GRAB_COST} times as long" in result.stdout
    top = Path(__file__).parents[2]
    assert f"takes {GRAB_COST} times as long" in " ".join((top / "README.md").read_text(encoding="utf-8").split())
    costs = (top / "docs" / "gradients.md").read_text(encoding="utf-8").partition("## What it costs")[2]
    cells = [line.split("|") for line in costs.partition("\n## ")[0].splitlines() if line.startswith("|")]
    ratios = [float(cell) for line in cells[2:] for cell in line[4:6]]
    assert f"{min(ratios):.1f} to {max(ratios):.1f}".removesuffix(".0") == GRAB_COST
    assert "without w8a.t" in result.stdout
    assert all(name in result.stdout for name in (*TASKS, *ABLATIONS, *STUDIES))
