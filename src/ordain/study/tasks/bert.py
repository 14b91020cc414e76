"""A BERT of BERT-Tiny's size on SST-2 and QNLI (the paper's fourth task), from random or pretrained weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ordain.errors import InputError, MissingPackageError
from ordain.study.data import Labelled, Splits, bert_vocabulary
from ordain.study.tasks.classification import classifier, labels
from ordain.study.tasks.task import LoadedTask, seeded

LENGTH = 32  # the paper's longest sequence
_LAYERS = 2
TINY = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
_FOLDER = "bert-tiny"  # in the data folder
_FILES = ("config.json", "model.safetensors")  # pickled weights are never loaded, and so never downloaded
_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
_SHOWN = 12  # letters of a commit
_RANK = 8  # of LoRA's matrices


def bert(
    splits: Splits,
    *,
    limit: int | None,
    folder: Path,
    weights: str | Path | None,
    verify: bool,
    trained: Literal["all", "head", "lora"] = "all",
) -> LoadedTask:
    """Two layers of BERT with a classifier of two classes.

    ``trained``: all weights; the classifier only; or the classifier, and LoRA on queries and values of the attention.
    """
    if trained == "lora":
        _require_peft()
    words = bert_vocabulary(folder, verify=verify)
    own = folder / _FOLDER
    asked = weights or (own if own.is_dir() else None)
    shape, tensors, origin = _pretrained(asked, len(words)) if asked else (TINY, {}, "random weights")
    notes = (
        f"{_LAYERS} layers of BERT, {shape['hidden_size']} wide, from {origin}; transformers "
        f"{version('transformers')}.",
        f"No dropout; at most {LENGTH} word pieces, padded.",
        *_NOTES.get(trained, ()),
    )
    return classifier(
        replace(splits, valid=None, test=splits.valid),  # GLUE does not publish its test labels: test on dev
        seeded(lambda: _TRAINED[trained](_model(shape, tensors, len(words)))),
        encode=partial(_encode, words),
        forward=lambda model, x: model(input_ids=x[:, 0], attention_mask=x[:, 1], token_type_ids=x[:, 2]).logits,
        limit=limit,
        chunk=256,
        notes=notes,
    )


def tokenizer(words: tuple[str, ...]) -> Any:
    """BERT's uncased tokenizer."""
    from tokenizers import BertWordPieceTokenizer

    return BertWordPieceTokenizer({word: number for number, word in enumerate(words)}, lowercase=True)


def bert_config(shape: dict[str, int], words: int) -> Any:
    """The configuration of a BERT of two layers with two classes."""
    import transformers

    bert: Any = transformers  # its types are too narrow
    # Without dropout an example's gradient depends only on the weights, and resumed runs are bit-identical.
    return bert.BertConfig(
        vocab_size=words,
        num_hidden_layers=_LAYERS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
        **shape,
    )


def _head(model: nn.Module) -> nn.Module:
    """What is in front of the classifier, the pooler too, stays as it is."""
    model.requires_grad_(False)
    model.get_submodule("classifier").requires_grad_(True)
    return model


def _lora(model: nn.Module) -> nn.Module:
    import peft

    # Without dropout, as in the model. PEFT trains the classifier as well.
    config = peft.LoraConfig(task_type="SEQ_CLS", r=_RANK, lora_alpha=2 * _RANK, target_modules=["query", "value"])
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


_TRAINED: dict[str, Callable[[nn.Module], nn.Module]] = {"all": lambda model: model, "head": _head, "lora": _lora}
_NOTES = {
    "head": ("Only the classifier is trained.",),
    "lora": (f"Only the classifier, and LoRA of rank {_RANK} on queries and values, are trained.",),
}


def _require_peft() -> None:
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"an error when importing 'peft' ({error})",
            expected="the package that has LoRA",
            remedy="Install it with: pip install 'ordain[peft]'",
        ) from error


def _encode(words: tuple[str, ...], part: Labelled) -> tuple[Tensor, Tensor]:
    """``[n, 3, T]``: word pieces, attention mask, and the index of the text that each belongs to; and the labels."""
    cutter = tokenizer(words)
    cutter.enable_truncation(LENGTH)
    cutter.enable_padding(length=LENGTH, pad_id=words.index("[PAD]"))
    found = cutter.encode_batch([text if len(text) == 2 else text[0] for text in part.x])
    return torch.tensor([[one.ids, one.attention_mask, one.type_ids] for one in found]), labels(part)


def _model(shape: dict[str, int], tensors: dict[str, Tensor], words: int) -> nn.Module:
    import transformers

    bert: Any = transformers  # its types are too narrow
    model: nn.Module = bert.BertForSequenceClassification(bert_config(shape, words))
    if tensors:
        model.get_submodule("bert").load_state_dict(tensors, strict=False)
    return model


def _pretrained(asked: str | Path, words: int) -> tuple[dict[str, int], dict[str, Tensor], str]:
    """The shape and the first layers of a BERT, and their origin."""
    from safetensors.torch import load_file

    folder, name = _find_weights(asked)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    needed = {key: config.get(key) for key in (*TINY, "num_hidden_layers", "vocab_size")}
    whole = all(isinstance(value, int) for value in needed.values())
    if not whole or config["vocab_size"] != words or config["num_hidden_layers"] < _LAYERS:
        raise InputError(
            f"{folder / 'config.json'} with {', '.join(f'{key} {value}' for key, value in needed.items())}",
            expected=f"a BERT of at least {_LAYERS} layers and {words:,} words",
            remedy="Use an uncased BERT.",
        )
    shape = {key: config[key] for key in TINY}
    given = {key.removeprefix("bert."): tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    own = _model(shape, {}, words).get_submodule("bert").state_dict()
    tensors = {key: tensor.float() for key, tensor in given.items() if key in own}
    absent = sorted(key for key in own if key not in tensors and not key.startswith("pooler."))
    if absent or any(tensor.shape != own[key].shape for key, tensor in tensors.items()):
        raise InputError(
            f"{folder / 'model.safetensors'} without {', '.join(absent[:3]) or 'tensors of the shape in config.json'}",
            expected="the weights of a BERT",
            remedy="Save the model with save_pretrained().",
        )
    pooler = "" if any(key.startswith("pooler.") for key in tensors) else ", its pooler random"
    return shape, tensors, f"{name}, the first {_LAYERS} of {config['num_hidden_layers']} layers{pooler}"


def settled(asked: str) -> str:
    """``asked`` independently of the current folder: a folder by its full path, a model by its name."""
    return str(Path(asked).resolve()) if Path(asked).is_dir() or not _HUB.fullmatch(asked) else asked


def _find_weights(asked: str | Path) -> tuple[Path, str]:
    """A folder with ``config.json`` and ``model.safetensors``, and its name in reports.

    ``asked`` is the folder itself, or ``"owner/name"`` or ``"owner/name@revision"`` of a model on the hub. A model that
    was downloaded before is found without a network.
    """
    folder, name = Path(asked), Path(asked).name
    if not folder.is_dir():
        found = _HUB.fullmatch(asked) if isinstance(asked, str) else None
        if found is None:
            raise InputError(
                f"--weights {asked}, which is not a folder",
                expected="a folder with config.json and model.safetensors, or owner/name of a model on the hub",
                remedy="Check the path, or leave it out for random weights.",
            )
        folder = _download(found["repo"], found["revision"])
        name = f"{found['repo']} at {folder.name[:_SHOWN]} of the Hugging Face hub"
    for file in _FILES:
        if not (folder / file).is_file():
            raise InputError(
                f"{folder} without {file}",
                expected="config.json and model.safetensors of a BERT",
                remedy="Save the model with save_pretrained(); pickled weights are never loaded.",
            )
    return folder, name


def _download(repo: str, revision: str | None) -> Path:
    """Download to the cache of the hub, where a folder is named after its commit."""
    from huggingface_hub import snapshot_download  # transformers, which builds the model, depends on it

    try:
        # Only public models: no token of the user is sent.
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(_FILES), token=False))
    except Exception as error:  # of the hub, of HTTP or of the system
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(
            f"--weights {repo}: not a folder, and the hub did not provide it ({why[:200]})",
            expected="a public model and a connection to the hub, or a folder",
            remedy="Check the name and the network, or download both files by hand into a folder.",
        ) from error
