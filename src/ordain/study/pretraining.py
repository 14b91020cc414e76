"""Pretrain the study's BERT by masked language modelling on WikiText-2, for ``ordain run sst2 --weights FOLDER``."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from ordain.errors import InputError
from ordain.study.data import Splits, bert_vocabulary, load
from ordain.study.files import STRICT, only_one, replacing, validated, write_bytes
from ordain.study.progress import Report
from ordain.study.runs.run_folder import provenance
from ordain.study.tasks.bert import TINY, bert_config, tokenizer
from ordain.study.tasks.classification import few
from ordain.study.tasks.task import seeded

LENGTH = 64  # word pieces of a sequence, with [CLS] and [SEP]
_CHOSEN = round(0.15 * (LENGTH - 2))  # word pieces to predict in each sequence, as many in each as in BERT's own data
_WARM_UP = 0.1  # of all steps
_CHUNK = 32  # sequences to evaluate at once: their logits are 288 x 30,522 numbers
_RESULT, _CHECKPOINT = "pretraining.json", "checkpoint.pt"
_JOINED = re.compile(r" @([-,.])@ ")  # WikiText-2 writes these inside words and numbers


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Settings:
    """Everything that the weights depend on."""

    epochs: int = 10  # passes over the training text
    batch_size: int = 32  # sequences per step
    lr: float = 1e-3  # AdamW's largest rate, after the warm-up; it then falls linearly to 0
    weight_decay: float = 0.01
    clip: float = 1.0  # maximum gradient norm
    seed: int = 0  # of initial weights, order and masks
    limit: int | None = None  # use at most this many sequences of each part


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Result:
    """What is written next to the weights; losses are means over the predicted word pieces."""

    settings: Settings
    sequences: int  # in the training set
    train_losses: tuple[float, ...]  # the mean of each epoch, while training
    valid_loss: float
    valid_accuracy: float
    seconds: float  # of the processor, for training, since the last start
    made: dict[str, Any]  # command, versions and machine


def pretrain(
    out: Path,
    settings: Settings,
    *,
    folder: Path,
    report: Report,
    command: str,
    verify: bool = True,
    every: float = 120,
) -> Result:
    """Train, and write ``config.json``, ``model.safetensors`` and ``pretraining.json`` to ``out``.

    A checkpoint is saved when ``every`` seconds have passed since the last one. A call with the same settings continues
    from it, and ends with the same weights as without the interruption. Once they are there, it returns their result.
    """
    out.mkdir(parents=True, exist_ok=True)
    with only_one(out):
        if (out / _RESULT).exists():
            found: Result = validated(Result, (out / _RESULT).read_bytes(), str(out / _RESULT))
            _check_settings(out, asdict(found.settings), settings)
            return found
        words = bert_vocabulary(folder, verify=verify)
        splits = load("wikitext2", folder, verify=verify)
        train, valid = (sequences(splits, part, words, settings.limit) for part in ("train", "valid"))
        run = _Pretraining(out, settings, words, train)
        run.resume()
        start = time.process_time()
        run.go(report, every)
        seconds = time.process_time() - start
        loss, accuracy = run.evaluate(valid)
        made = provenance(command)
        made["versions"] |= {name: version(name) for name in ("transformers", "tokenizers")}
        result = Result(
            settings=settings,
            sequences=len(train),
            train_losses=tuple(run.losses),
            valid_loss=loss,
            valid_accuracy=accuracy,
            seconds=round(seconds, 1),
            made=made,
        )
        run.write()
        write_bytes(out / _RESULT, json.dumps(asdict(result), indent=1, allow_nan=False).encode() + b"\n")
        (out / _CHECKPOINT).unlink(missing_ok=True)
    return result


def sequences(splits: Splits, part: str, words: tuple[str, ...], limit: int | None) -> Tensor:
    """``[n, LENGTH]``: the running text in word pieces, cut; a shorter remainder is left out."""
    vocabulary = splits.vocabulary or ()
    text = " ".join([vocabulary[number] for number in np.asarray(getattr(splits, part).x)])
    lines = _JOINED.sub(r"\1", text.replace("<unk>", "[UNK]")).split("<eos>")
    ids = [number for one in tokenizer(words).encode_batch(lines, add_special_tokens=False) for number in one.ids]
    inner = LENGTH - 2
    count = len(ids) // inner
    if count < 1:
        came = f"a text of {len(ids)} word pieces"
        raise InputError(came, expected=f"at least {inner}, one sequence", remedy="Use the whole file.")
    rows = torch.tensor(ids[: count * inner]).view(count, inner)
    ends = [torch.full((count, 1), words.index(end)) for end in ("[CLS]", "[SEP]")]
    return torch.cat((ends[0], rows, ends[1]), dim=1)[torch.from_numpy(few(count, limit))]


def masked(ids: Tensor, random: torch.Generator, words: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """``[B, LENGTH]`` word pieces with some of them hidden, and the positions ``[B, chosen]`` of those to predict.

    Of those, 80 % are replaced by [MASK], 10 % by a random word piece, and 10 % are left as they are.
    """
    special = torch.isin(ids, torch.tensor([words.index(word) for word in ("[CLS]", "[SEP]", "[UNK]")]))
    places = torch.rand(ids.shape, generator=random).masked_fill(special, 2.0).topk(_CHOSEN, largest=False).indices
    how = torch.rand(places.shape, generator=random)
    shown = torch.randint(len(words), places.shape, generator=random)
    shown = torch.where(how < 0.8, words.index("[MASK]"), torch.where(how < 0.9, shown, ids.gather(1, places)))
    return ids.scatter(1, places, shown), places


class _Pretraining:
    """A model on its way; masks and order depend on the seed and the step only, so that a checkpoint needs no more."""

    def __init__(self, out: Path, settings: Settings, words: tuple[str, ...], train: Tensor) -> None:
        self.settings, self.losses = settings, list[float]()
        self._out, self._words, self._train = out, words, train
        self._step, self._sum = 0, 0.0  # steps taken, and the sum of the losses of this epoch
        self._steps = -(-len(train) // settings.batch_size)  # of an epoch
        self.model = seeded(self._build)(settings.seed).train()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True
        )

    def _build(self) -> nn.Module:
        import transformers

        bert: Any = transformers  # its types are too narrow
        model: nn.Module = bert.BertForMaskedLM(bert_config(TINY, len(self._words)))
        return model

    def resume(self) -> None:
        """Continue from the checkpoint if there is one."""
        path = self._out / _CHECKPOINT
        if not path.exists():
            return
        try:
            saved = torch.load(path, weights_only=True)
            found = saved["settings"]
        except (OSError, MemoryError):  # a problem of the machine, not of the file
            raise
        except Exception as error:  # torch raises many kinds of errors for damaged files
            expected = "a checkpoint that ordain pretrain wrote"
            raise InputError(
                f"{path}, which is damaged", expected=expected, remedy="Delete it to start anew."
            ) from error
        _check_settings(self._out, found, self.settings)
        self.model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._step, self._sum, self.losses = saved["step"], saved["sum"], saved["losses"]

    def _save(self) -> None:
        state = {
            "settings": asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self._step,
            "sum": self._sum,
            "losses": self.losses,
        }
        with replacing(self._out / _CHECKPOINT) as file:
            torch.save(state, file)

    def go(self, report: Report, every: float) -> None:
        """Train to the end."""
        settings, steps, whole = self.settings, self._steps, self.settings.epochs * self._steps
        last = time.monotonic()
        while self._step < whole:
            epoch, within = divmod(self._step, steps)
            order = torch.randperm(len(self._train), generator=self._random(epoch))
            for rows in torch.split(order, settings.batch_size)[within:]:
                self._optimizer.param_groups[0]["lr"] = settings.lr * _factor(self._step, whole)
                ids, places = masked(self._train[rows], self._random(1_000_003 + self._step), self._words)
                logits, y = self._predict(ids, places, self._train[rows])
                loss = nn.functional.cross_entropy(logits, y)
                if not loss.isfinite():
                    raise InputError(
                        f"a loss of {float(loss.detach())} in step {self._step + 1:,}",
                        expected="a finite one",
                        remedy="Use a smaller --lr, and a new folder.",
                    )
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
                self._optimizer.step()
                self._optimizer.zero_grad()
                self._step, self._sum = self._step + 1, self._sum + float(loss.detach())
                report(self._step, whole)
                if self._step % steps == 0:
                    self.losses.append(self._sum / steps)
                    self._sum = 0.0
                if time.monotonic() - last >= every:
                    self._save()
                    last = time.monotonic()

    def write(self) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
        from transformers.utils import logging

        logging.disable_progress_bar()  # for the two files
        self.model.save_pretrained(self._out)  # type: ignore[operator]

    def _random(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.settings.seed * 1_000_000_007 + number)

    def _predict(self, ids: Tensor, places: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B * chosen, words]`` of the hidden word pieces only, and what they should be."""
        hidden = self.model.get_submodule("bert")(input_ids=ids).last_hidden_state
        rows = torch.arange(len(ids)).unsqueeze(1)
        return self.model.get_submodule("cls")(hidden[rows, places].flatten(0, 1)), targets.gather(1, places).flatten()

    @torch.no_grad()
    def evaluate(self, valid: Tensor) -> tuple[float, float]:
        """Mean loss and accuracy of the hidden word pieces of the validation text, with the same masks every time."""
        self.model.eval()
        random = torch.Generator().manual_seed(0)
        loss, hits = 0.0, 0
        for rows in torch.split(valid, _CHUNK):
            logits, y = self._predict(*masked(rows, random, self._words), rows)
            loss += float(nn.functional.cross_entropy(logits, y, reduction="sum"))
            hits += int((logits.argmax(dim=1) == y).sum())
        count = len(valid) * _CHOSEN
        return loss / count, hits / count


def _factor(step: int, whole: int) -> float:
    """The rate's share of the largest: a linear warm-up, then a linear decay to 0."""
    up = max(1, round(_WARM_UP * whole))
    return min((step + 1) / up, (whole - step) / (whole - up + 1))


def _check_settings(out: Path, there: dict[str, Any], here: Settings) -> None:
    """Refuse a folder that was written with other settings."""
    differing = [
        f"{name} ({there.get(name)!r} there, {value!r} here)"
        for name, value in asdict(here).items()
        if there.get(name) != value
    ]
    if differing:
        raise InputError(
            f"{out}, whose weights differ in {'; '.join(differing)}",
            expected="the settings that it was started with",
            remedy="Use a new folder with --out.",
        )
