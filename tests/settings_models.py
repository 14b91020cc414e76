"""Whole models, small: what layers do together that none of them does alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine import Setting
from settings_sequence import frozen, ids
from torch import Tensor, nn


def wide() -> nn.Module:
    """Batches of seven wait until they are 47 rows."""
    layers = [nn.Linear(24, 256), nn.LayerNorm(256), nn.Linear(256, 256, bias=False), nn.Tanh(), nn.Linear(256, 7)]
    return nn.Sequential(*layers)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 5),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


class Residual(nn.Module):
    """Two convolutions and a shortcut, which is a projection where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, after)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(2, after))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)  # type: ignore[no-any-return]


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        Residual(4, 4, 1),
        Residual(4, 6, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


class LanguageModel(nn.Module):
    """Embedding, LSTM, decoder."""

    def __init__(self, *, width: int = 4, batch_first: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=batch_first)
        self.decoder = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.lstm(self.tokens(x))[0])  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """nn.TransformerEncoder over tokens, with a row of positions and padding."""

    def __init__(self, *, dropout: float = 0.0, width: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, width, padding_idx=0), nn.Embedding(6, width)
        layer = nn.TransformerEncoderLayer(width, width // 2, 6, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = 1  # never all padding
        embedded = self.tokens(x) + self.positions(torch.arange(x.shape[1])[None])
        return self.head(self.encoder(embedded, src_key_padding_mask=x == 0).mean(dim=1))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Patches, a class token and positions that are parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 4, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 5, 4))
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.encoder(x)[:, 0]))  # type: ignore[no-any-return]


class Autoencoder(nn.Module):
    """One hidden layer used on the way in and on the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.hidden, self.up = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        code = self.hidden(self.down(x).tanh()).tanh()
        return self.up(self.hidden(code).tanh())  # type: ignore[no-any-return]


class Siamese(nn.Module):
    """One branch, called for each of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(9, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.branch(x) - self.branch(y)).square()  # type: ignore[no-any-return]


class Branches(nn.Module):
    """One branch gets no gradient, another is not even called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.cut, self.idle = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) * self.cut(x).detach()  # type: ignore[no-any-return]


def bert(*, dropout: float = 0.0) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=6,
        max_position_embeddings=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=4,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return model  # type: ignore[no-any-return]


def llama(*, tied: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=11,
            hidden_size=4,
            intermediate_size=6,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=8,
            use_cache=False,
            tie_word_embeddings=tied,
        )
        model = transformers.LlamaForCausalLM(config)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        return model  # type: ignore[no-any-return]

    return build


def numbers(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda b: (torch.randn(b, *shape),)


def words(length: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda b: (ids(b, length),)


def masked(length: int) -> Callable[[int], dict[str, Any]]:
    """Token ids as keywords, each example with padding of its own at the end."""

    def inputs(b: int) -> dict[str, Any]:
        keep = torch.randint(1, length + 1, (b, 1))
        return {"input_ids": ids(b, length, high=11), "attention_mask": (torch.arange(length) < keep).long()}

    return inputs


SETTINGS = [
    Setting("mlp", mlp, numbers(6)),
    Setting("wide", wide, numbers(24)),
    Setting("lenet", lenet, numbers(1, 12, 12)),
    Setting("resnet", resnet, numbers(3, 6, 6), sizes=(1, 2, 3)),
    Setting("lstm-language-model", LanguageModel, words(6)),
    Setting("encoder", Encoder, words(6)),
    Setting("vision-transformer", VisionTransformer, numbers(3, 4, 4)),
    Setting("bert", bert, masked(6)),
    Setting("gpt2", gpt2, masked(6)),
    # Its norms compute in float32 whatever comes in.
    Setting("llama", llama(tied=False), masked(6), tolerance=1e-6),
    Setting("llama-tied", llama(tied=True), masked(6), tolerance=1e-6),
    Setting("autoencoder", Autoencoder, numbers(6)),
    Setting("siamese", Siamese, lambda b: (torch.randn(b, 2, 5), torch.randn(b, 2, 5))),
    Setting("frozen", frozen(mlp, "0.weight", "2.bias", "4.weight"), numbers(6)),
    Setting("frozen-bert", frozen(bert, "bert.embeddings.word_embeddings.weight", "classifier.bias"), masked(6)),
    Setting("frozen-trunk", frozen(lenet, "0.weight", "0.bias", "3.weight", "3.bias"), numbers(1, 12, 12)),
    Setting("branches", Branches, numbers(4)),
    Setting("sequence-first", lambda: LanguageModel(batch_first=False), lambda b: (ids(6, b),), batch_dim=1),
    # Sequences as long as the batch is large and the layers wide: nothing can be told by a length.
    Setting("square-lstm", lambda: LanguageModel(width=5), words(5), sizes=(5,)),
    Setting(
        "square-lstm-sequence-first",
        lambda: LanguageModel(width=5, batch_first=False),
        lambda b: (ids(5, b),),
        batch_dim=1,
        sizes=(5,),
    ),
    Setting("square-encoder", Encoder, words(4), sizes=(4,)),
    Setting("square-bert", bert, masked(4), sizes=(4,)),
    Setting("square-gpt2", gpt2, masked(4), sizes=(4,)),
    Setting("square-llama", llama(tied=False), masked(4), sizes=(4,), tolerance=1e-6),
]
