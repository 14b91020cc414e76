"""Pretraining: what is hidden and predicted, weights that tasks load, and stopping anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from study.recorded import call
from study.standard_files import write_bert_vocab, write_sst2, write_wikitext2

from ordain.errors import InputError
from ordain.study import pretraining
from ordain.study.pretraining import LENGTH, Settings, masked, pretrain
from ordain.study.tasks import TASKS

SETTINGS = Settings(epochs=2, batch_size=2, limit=5, seed=3)  # three steps an epoch


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_wikitext2(tmp_path / "data")
    write_bert_vocab(tmp_path / "data")
    write_sst2(tmp_path / "data")
    return tmp_path / "data"


def train(out: Path, data: Path, **options: Any) -> Any:
    settings = options.pop("settings", SETTINGS)
    told = {"report": lambda done, total: None, "command": "", "verify": False} | options
    return pretrain(out, settings, folder=data, **told)


def test_what_is_hidden() -> None:
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{k}" for k in range(1000)))
    ids = torch.randint(5, 1005, (3000, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, 0], ids[:, -1], ids[:, 7] = 2, 3, 1
    given, places = masked(ids, torch.Generator().manual_seed(0), words)
    assert places.shape == (3000, 9)  # 15 % of 62
    assert all(len(set(row)) == 9 for row in places[:50].tolist())
    assert not torch.isin(places, torch.tensor([0, 7, LENGTH - 1])).any()
    untouched = torch.ones_like(ids, dtype=torch.bool).scatter_(1, places, False)
    assert torch.equal(given[untouched], ids[untouched])
    shown, hidden = given.gather(1, places), ids.gather(1, places)
    assert abs((shown == 4).double().mean() - 0.8) < 0.01
    assert abs((shown == hidden).double().mean() - 0.1) < 0.01


def test_the_text_in_word_pieces(tmp_path: Path) -> None:
    """In a row over the ends of lines; what WikiText-2 writes for an unknown word and for a hyphen is put right."""
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for part in ("train", "valid", "test"):
        (folder / f"{part}.txt").write_text(" a <unk> film @-@ plot \n \n was \n" * 20, encoding="utf-8")
    words = tuple((write_bert_vocab(tmp_path) / "vocab.txt").read_text().split())
    splits = pretraining.load("wikitext2", tmp_path, verify=False)
    (first,) = pretraining.sequences(splits, "train", words, limit=None)
    said = [words[number] for number in first]
    assert said == ["[CLS]", *(["a", "[UNK]", "film", "-", "plot", "was"] * 20)[: LENGTH - 2], "[SEP]"]


def test_a_task_starts_from_the_weights(tmp_path: Path, data: Path) -> None:
    words = ("--out", tmp_path / "bert", "--data-dir", data, "--no-verify", "--limit", 5, "--epochs", 2)
    result = call("pretrain", *words)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "ordain run sst2 --weights" in result.stdout
    about = json.loads((tmp_path / "bert" / "pretraining.json").read_text())
    assert f"loss {about['valid_loss']:.4f}" in result.stdout
    assert about["settings"]["epochs"] == 2
    assert {"torch", "transformers"} <= about["made"]["versions"].keys()
    assert {path.name for path in (tmp_path / "bert").iterdir()} >= {"config.json", "model.safetensors"}
    problem = TASKS["sst2"].load(data, weights=tmp_path / "bert", verify=False)
    saved, found = load_file(tmp_path / "bert" / "model.safetensors"), problem.build(0).state_dict()
    shared = [name for name in saved if name.startswith("bert.")]
    assert len(shared) > 20
    assert all(torch.equal(saved[name], found[name]) for name in shared)
    assert call("pretrain", *words).stdout == result.stdout  # nothing is left to do
    other = call("pretrain", *words[:-1], 3)
    assert other.exit_code == 2
    assert "epochs (2 there, 3 here)" in other.stderr


def test_the_loss_falls(tmp_path: Path, data: Path) -> None:
    found = train(tmp_path / "bert", data, settings=Settings(epochs=12, batch_size=2, limit=5))
    assert found.train_losses[-1] < 0.9 * found.train_losses[0]
    assert len(found.train_losses) == 12
    assert 0 <= found.valid_accuracy <= 1


@pytest.mark.parametrize("at", [1, 3, 5])
def test_stopped_and_started_again(at: int, tmp_path: Path, data: Path) -> None:
    """In mid-epoch and between epochs."""

    def stop(done: int, total: int) -> None:
        assert total == 6
        if done == at + 1:
            raise KeyboardInterrupt

    whole = train(tmp_path / "whole", data)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "bert", data, report=stop, every=0.0)
    assert not (tmp_path / "bert" / "model.safetensors").exists()
    with pytest.raises(InputError, match=r"batch_size \(2 there, 3 here\)"):
        train(tmp_path / "bert", data, settings=Settings(epochs=2, batch_size=3, limit=5, seed=3))
    found = train(tmp_path / "bert", data)
    assert not (tmp_path / "bert" / "checkpoint.pt").exists()
    assert (found.train_losses, found.valid_loss) == (whole.train_losses, whole.valid_loss)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "bert")]
    assert files[0] == files[1]


def test_a_damaged_checkpoint(tmp_path: Path, data: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "checkpoint.pt").write_bytes(b"never a checkpoint")
    with pytest.raises(InputError, match=r"checkpoint.pt, which is damaged.*Delete it"):
        train(tmp_path / "bert", data)


def test_too_little_text(tmp_path: Path) -> None:
    write_wikitext2(tmp_path, lines=2)
    write_bert_vocab(tmp_path)
    with pytest.raises(InputError, match="at least 62"):
        train(tmp_path / "bert", tmp_path)


@pytest.mark.parametrize("lr", ["0", "nan", "inf", "-1"])
def test_a_rate_that_is_none(lr: str, tmp_path: Path) -> None:
    result = call("pretrain", "--out", tmp_path / "bert", "--lr", lr)
    assert result.exit_code == 2
    assert "expected a finite rate above 0" in result.stderr
    assert not (tmp_path / "bert").exists()


def test_a_loss_that_is_not_finite(tmp_path: Path, data: Path) -> None:
    with pytest.raises(InputError, match=r"a loss of .*smaller --lr"):
        train(tmp_path / "bert", data, settings=Settings(epochs=9, batch_size=2, limit=5, lr=1e38))
    assert not (tmp_path / "bert" / "model.safetensors").exists()
