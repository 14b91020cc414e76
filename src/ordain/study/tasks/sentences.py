"""BERT-Tiny's shape on SST-2 and QNLI (the paper's fourth task): from random weights, or from pretrained ones."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ordain.errors import InputError
from ordain.study.data import bert_vocabulary, load
from ordain.study.tasks.classification import classifier
from ordain.study.tasks.pretrained import find_weights
from ordain.study.tasks.task import Load, Problem, Request, seeded

__all__ = ["bert_on"]

LENGTH = 32  # the paper's longest sequence
_LAYERS = 2
_TINY = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
_FOLDER = "bert-tiny"  # in the data folder


def bert_on(data: str) -> Load:
    """Two layers of BERT with a classifier of two classes."""

    def make(request: Request) -> Problem:
        words = bert_vocabulary(request.folder, verify=request.verify)
        own = request.folder / _FOLDER
        asked = request.weights or (own if own.is_dir() else None)
        shape, tensors, origin = _pretrained(asked, len(words)) if asked else (_TINY, {}, "random weights")
        notes = (
            f"{_LAYERS} layers of BERT, {shape['hidden_size']} wide, from {origin}; transformers "
            f"{version('transformers')}.",
            f"No dropout; at most {LENGTH} word pieces, padded.",
        )
        splits = load(data, request.folder, verify=request.verify)
        return classifier(
            replace(splits, valid=None, test=splits.valid),  # GLUE does not publish its test labels: test on dev
            seeded(partial(_model, shape, tensors, len(words))),
            encode=partial(_encode, words),
            forward=_logits,
            limit=request.limit,
            chunk=256,
            notes=notes,
        )

    return make


def _encode(words: tuple[str, ...], texts: Any) -> Tensor:
    """``[n, 3, T]``: word pieces, attention mask, and the index of the text that each belongs to."""
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer({word: number for number, word in enumerate(words)}, lowercase=True)
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH, pad_id=words.index("[PAD]"))
    found = tokenizer.encode_batch([text if len(text) == 2 else text[0] for text in texts])
    return torch.tensor([[one.ids, one.attention_mask, one.type_ids] for one in found])


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=x[:, 0], attention_mask=x[:, 1], token_type_ids=x[:, 2]).logits
    return logits


def _model(shape: dict[str, int], tensors: dict[str, Tensor], words: int) -> nn.Module:
    import transformers

    bert: Any = transformers  # its types are too narrow
    # Without dropout an example's gradient depends only on the weights, and resumed runs are bit-identical.
    config = bert.BertConfig(
        vocab_size=words,
        num_hidden_layers=_LAYERS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
        **shape,
    )
    model: nn.Module = bert.BertForSequenceClassification(config)
    if tensors:
        model.get_submodule("bert").load_state_dict(tensors, strict=False)
    return model


def _pretrained(asked: str | Path, words: int) -> tuple[dict[str, int], dict[str, Tensor], str]:
    """The shape and the first layers of a BERT, and their origin."""
    from safetensors.torch import load_file

    folder, name = find_weights(asked)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    needed = {key: config.get(key) for key in (*_TINY, "num_hidden_layers", "vocab_size")}
    whole = all(isinstance(value, int) for value in needed.values())
    if not whole or config["vocab_size"] != words or config["num_hidden_layers"] < _LAYERS:
        raise InputError(
            f"{folder / 'config.json'} with {', '.join(f'{key} {value}' for key, value in needed.items())}",
            expected=f"a BERT of at least {_LAYERS} layers and {words:,} words",
            remedy="Use an uncased BERT.",
        )
    shape = {key: config[key] for key in _TINY}
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
