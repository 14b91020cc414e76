"""Whole models as people write them, small: what the tests train under GraB and beside a loop over single examples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from nanogpt.model import GPT, GPTConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, rnn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

N = 14  # examples
VOCABULARY, CLASSES, WIDTH = 7, 3, 8
Batch = dict[str, Tensor]


def classes(output: Tensor, batch: Batch) -> Tensor:
    """[B]: cross entropy of logits [B, ..., C] with classes [B, ...]."""
    return F.cross_entropy(output.movedim(-1, 1), batch["y"], reduction="none").reshape(len(output), -1).mean(dim=1)


@dataclass(frozen=True)
class Case:
    """A model in the mode it is trained in, its data, and how it is called.

    Attributes:
        model: trained as it is.
        data: tensors [N, ...] by name.
        call: the model's output for a batch of the data.
        losses: from the output and the batch, either a loss for each example [B] or their mean.
    """

    model: nn.Module
    data: Batch
    call: Callable[[nn.Module, Batch], Any] = lambda model, batch: model(batch["x"])
    losses: Callable[[Any, Batch], Tensor] = classes


@dataclass(frozen=True)
class Setting:
    """A whole model by name.

    Attributes:
        name: for the test's id.
        build: makes a case; the test makes it float64.
        batch_size: N is no multiple of it.
        draws: does the forward draw random numbers, so that an example cannot be run again alone?
        expected: are the orders those of the loop, or does ordain refuse the model?
    """

    name: str
    build: Callable[[], Case]
    batch_size: int = 6
    draws: bool = False
    expected: Literal["exact", "refused"] = "exact"

    def make(self, seed: int) -> Case:
        torch.manual_seed(seed)
        case = self.build()
        data = tree_map(lambda t: t.double() if t.is_floating_point() else t, case.data)
        return Case(case.model.double(), data, case.call, case.losses)


class Net(nn.Module):
    """Parts by name (modules, parameters, buffers), and a forward written as a function of the model and its inputs."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def vectors(*shape: int) -> Batch:
    return {"x": torch.randn(N, *shape), "y": torch.randint(CLASSES, (N,))}


def words(length: int, *targets: int, vocabulary: int = VOCABULARY) -> Batch:
    """Token ids, and a class for each example or (``targets`` of them) for each of several places."""
    top = vocabulary if targets else CLASSES
    return {"x": torch.randint(vocabulary, (N, length)), "y": torch.randint(top, (N, *targets))}


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 2)


def words_in() -> nn.Embedding:
    return nn.Embedding(VOCABULARY, WIDTH)


def head(width: int = WIDTH, out: int = CLASSES) -> nn.Linear:
    return nn.Linear(width, out)


# --- nanoGPT ------------------------------------------------------------------------------------------------------


def nanogpt(dropout: float = 0.0) -> GPT:
    return GPT(GPTConfig(6, VOCABULARY, 2, 2, WIDTH, dropout, bias=False))


def nanogpt_loss() -> Case:
    return Case(nanogpt(), words(6, 6), lambda m, b: m(b["x"], b["y"]), lambda out, _: out[1])


def nanogpt_dropout() -> Case:
    return Case(nanogpt(0.1), words(6, 6), lambda m, b: m(b["x"], b["y"]), lambda out, b: classes(out[0], b))


# --- embeddings that all examples share -------------------------------------------------------------------------------


def prototypes(count: int) -> Callable[[], Case]:
    def build() -> Case:
        def run(m: Any, x: Tensor) -> Any:
            found = m.prototypes(torch.arange(count)[None]).reshape(-1, WIDTH)
            return m.features(x) @ found.T

        model = Net(run, features=nn.Linear(5, WIDTH), prototypes=nn.Embedding(count, WIDTH))
        return Case(model, {"x": torch.randn(N, 5), "y": torch.randint(count, (N,))})

    return build


def positions(take: Callable[[Tensor, int], Tensor]) -> Callable[[], Case]:
    """Positions looked up once, as ``take`` brings what came of them [1, T, width] to the batch."""

    def build() -> Case:
        def run(m: Any, x: Tensor) -> Any:
            places = take(m.places(torch.arange(x.shape[1])[None]), len(x))
            return m.out((m.tokens(x) + places).tanh())

        model = Net(run, tokens=words_in(), places=nn.Embedding(6, WIDTH), out=head(WIDTH, VOCABULARY))
        return Case(model, words(6, 6))

    return build


def attention(width: int = WIDTH, dropout: float = 0.0, **options: Any) -> nn.Module:
    options = {"batch_first": True, "norm_first": True} | options
    return nn.TransformerEncoderLayer(width, 2, 6, dropout, **options)


def prompt_tuning() -> Case:
    def run(m: Any, x: Tensor) -> Any:
        prompt = m.prompt(torch.arange(3)[None]).expand(len(x), -1, -1)
        return m.out(m.layer(torch.cat([prompt, m.tokens(x)], dim=1)).mean(dim=1))

    model = Net(run, prompt=nn.Embedding(3, WIDTH), tokens=words_in(), layer=attention(), out=head())
    model.tokens.requires_grad_(False)
    model.layer.requires_grad_(False)
    return Case(model, words(5))


def queries() -> Case:
    """DETR: an embedding that is never called, repeated for each image; sequence first inside."""

    def run(m: Any, x: Tensor) -> Any:
        memory = m.backbone(x).flatten(2).permute(2, 0, 1)
        found = m.decoder(m.query.weight.unsqueeze(1).repeat(1, len(x), 1), memory)
        return m.out(found).transpose(0, 1)

    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 6, 0.0), 1)
    model = Net(run, backbone=nn.Conv2d(1, WIDTH, 2, 2), query=nn.Embedding(3, WIDTH), decoder=decoder, out=head())
    return Case(model, {"x": torch.randn(N, 1, 4, 4), "y": torch.randint(CLASSES, (N, 3))})


def attend(qkv: Tensor, bias: Tensor, heads: int) -> Any:
    """Attention [B, N, width] with a bias on the scores [B, heads, N, N]."""
    q, k, v = qkv.reshape(*qkv.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
    return ((q @ k.transpose(-2, -1) + bias).softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


def swin_bias() -> Case:
    """Windows of 2 x 2 folded into the batch, and a table of relative positions that is a parameter."""

    def window(m: Any, x: Tensor) -> Any:
        bias = m.table[m.index.view(-1)].view(4, 4, -1).permute(2, 0, 1).contiguous()
        return m.proj(attend(m.qkv(x), bias.unsqueeze(0), 2))

    def run(m: Any, x: Tensor) -> Any:
        size = len(x)
        x = m.patches(x).permute(0, 2, 3, 1)
        windows = x.view(size, 2, 2, 2, 2, WIDTH).transpose(2, 3).reshape(-1, 4, WIDTH)
        windows = windows + m.attention(m.norm(windows))
        return m.out(windows.view(size, -1, WIDTH).mean(dim=1))

    grid = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    apart = grid[:, None] - grid[None] + 1
    inner = Net(
        window,
        table=weights(9, 2),
        index=apart[..., 0] * 3 + apart[..., 1],
        qkv=nn.Linear(WIDTH, 3 * WIDTH),
        proj=nn.Linear(WIDTH, WIDTH),
    )
    model = Net(run, patches=nn.Conv2d(1, WIDTH, 2, 2), norm=nn.LayerNorm(WIDTH), attention=inner, out=head())
    return Case(model, vectors(1, 8, 8))


def t5_bias() -> Case:
    """An embedding of how far apart two places are, called with [T, T]."""

    def run(m: Any, x: Tensor) -> Any:
        place = torch.arange(x.shape[1])
        apart = (place[None] - place[:, None]).clamp(-3, 3) + 3
        bias = m.bias(apart).permute(2, 0, 1).unsqueeze(0)
        return m.out(attend(m.qkv(m.tokens(x)), bias, 2).mean(dim=1))

    model = Net(run, tokens=words_in(), bias=nn.Embedding(7, 2), qkv=nn.Linear(WIDTH, 3 * WIDTH), out=head())
    return Case(model, words(6))


# --- the batch folded, joined, sorted or turned round inside the forward ----------------------------------------------


def lstm_folded() -> Case:
    def run(m: Any, x: Tensor) -> Any:
        out, _ = m.lstm(m.tokens(x))
        return m.fc(out.reshape(-1, 5)).view(*x.shape, -1)

    model = Net(run, tokens=words_in(), lstm=nn.LSTM(WIDTH, 5, batch_first=True), fc=head(5, VOCABULARY))
    return Case(model, words(6, 6))


def time_distributed(*, time_first: bool) -> Callable[[], Case]:
    def build() -> Case:
        def run(m: Any, x: Tensor) -> Any:
            frames = x.transpose(0, 1) if time_first else x
            found = m.conv(frames.flatten(0, 1)).relu().mean(dim=(2, 3))
            found = m.hidden(found).tanh().view(*frames.shape[:2], -1)
            return m.out(found.mean(dim=0 if time_first else 1))

        model = Net(run, conv=nn.Conv2d(2, 3, 3), hidden=nn.Linear(3, WIDTH), out=head())
        return Case(model, vectors(4, 2, 5, 5))

    return build


def flat_logits(*, time_first: bool = False, loss: bool = False, mixed: bool = False) -> Callable[[], Case]:
    """Logits [B * T, C] or [T * B, C], as language models return them; or (``loss``) their loss."""

    def run(m: Any, x: Tensor, y: Tensor) -> Any:
        h = m.words(x.t() if time_first else x).tanh()
        h = h - h.mean(dim=0) if mixed else h
        out = m.out(m.norm(m.hidden(h.reshape(-1, WIDTH)) * m.scale))
        return F.cross_entropy(out, (y.t() if time_first else y).reshape(-1)) if loss else out

    def losses(out: Tensor, batch: Batch) -> Tensor:
        size = len(batch["y"])
        out = out.view(-1, size, VOCABULARY).transpose(0, 1) if time_first else out.view(size, -1, VOCABULARY)
        return classes(out, batch)

    def build() -> Case:
        parts = {"words": words_in(), "hidden": nn.Linear(WIDTH, 5), "norm": nn.LayerNorm(5), "scale": weights(5)}
        model = Net(run, **parts, out=head(5, VOCABULARY))
        return Case(model, words(6, 6), lambda m, b: m(b["x"], b["y"]), (lambda out, _: out) if loss else losses)

    return build


def two_views() -> Case:
    def run(m: Any, x: Tensor) -> Any:
        one, other = m.encoder(torch.cat([x[:, 0], x[:, 1]])).chunk(2)
        return m.out(one * other)

    encoder = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, WIDTH))
    return Case(Net(run, encoder=encoder, out=head()), vectors(2, 5))


def of_lengths(run: Callable[..., Tensor], *, shortest: int = 1) -> Callable[[], Case]:
    """A model called with tokens and how many of them count."""

    def build() -> Case:
        data = words(6) | {"lengths": torch.randint(shortest, 7, (N,))}
        model = Net(run, tokens=words_in(), lstm=nn.LSTM(WIDTH, 5, batch_first=True), out=head(5))
        return Case(model, data, lambda m, b: m(b["x"], b["lengths"]))

    return build


def packed(m: Any, x: Tensor, lengths: Tensor) -> Any:
    sequence = rnn.pack_padded_sequence(m.tokens(x), lengths, batch_first=True, enforce_sorted=False)
    out, _ = rnn.pad_packed_sequence(m.lstm(sequence)[0], batch_first=True)
    return m.out(out.sum(dim=1))


def sorted_by_length(m: Any, x: Tensor, lengths: Tensor) -> Any:
    order = lengths.argsort(descending=True, stable=True)
    out, _ = m.lstm(m.tokens(x[order]))
    keep = torch.arange(x.shape[1]) < lengths[order][:, None]
    return m.out((out * keep[..., None]).sum(dim=1))[order.argsort()]


def flipped() -> Case:
    def run(m: Any, x: Tensor) -> Any:
        return m.out(m.hidden(x.flip(0)).tanh().flip(0))

    return Case(Net(run, hidden=nn.Linear(5, 6), out=head(6)), vectors(5))


# --- weights that are computed, or used outside of their module -------------------------------------------------------


def convolved(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], Case]:
    """A convolution and two linear layers, wrapped; the second is used twice."""

    def build() -> Case:
        def run(m: Any, x: Tensor) -> Any:
            x = m.conv(x).tanh().flatten(1)
            x = m.again(m.again(m.hidden(x)).tanh())
            return m.out(x)

        parts = {"conv": nn.Conv1d(2, 3, 3), "hidden": nn.Linear(9, WIDTH), "again": nn.Linear(WIDTH, WIDTH)}
        return Case(Net(run, **{name: wrap(part) for name, part in parts.items()}, out=head()), vectors(2, 5))

    return build


def steady_spectral_norm(module: nn.Module) -> nn.Module:
    """Without further power iterations: they would change the weight from forward to forward."""
    module = parametrizations.spectral_norm(module)
    module.parametrizations["weight"].eval()
    return module


def pruned(module: nn.Module) -> nn.Module:
    return prune.l1_unstructured(module, "weight", amount=0.3)


def functional_linear() -> Case:
    def run(m: Any, x: Tensor) -> Any:
        return F.linear(m.hidden(x).tanh(), m.w, m.b)

    return Case(Net(run, hidden=nn.Linear(5, WIDTH), w=weights(CLASSES, WIDTH), b=weights(CLASSES)), vectors(5))


def functional_inside() -> Case:
    """The same in modules below the model, one of them without a batch dimension in front."""

    def run(m: Any, x: Tensor) -> Any:
        return m.out(m.first(x).tanh().transpose(0, 1)).mean(dim=0)

    def product(m: Any, x: Tensor) -> Any:
        return F.linear(x, m.w)

    model = Net(run, first=Net(product, w=weights(WIDTH, 5)), out=Net(product, w=weights(CLASSES, WIDTH)))
    return Case(model, vectors(6, 5))


def checkpointed(*, dropout: float = 0.0) -> Callable[[], Case]:
    """Parameters that are taken from the graph, in a part of it that runs again during the backward."""

    def run(m: Any, x: Tensor) -> Any:
        def inner(h: Tensor) -> Tensor:
            h = F.dropout(F.linear(h * m.scale, m.mix), dropout) + m.place.exp()
            return m.out(h.tanh().mean(dim=1))  # type: ignore[no-any-return]

        return checkpoint(inner, m.words(x), use_reentrant=False)

    def build() -> Case:
        parts = {"scale": weights(WIDTH), "mix": weights(WIDTH, WIDTH), "place": weights(4, WIDTH)}
        return Case(Net(run, words=words_in(), out=head(), **parts), words(4))

    return build


def inside_torch_func(function: Callable[[Any, Tensor], Tensor]) -> Callable[[], Case]:
    """Layers that torch.func calls, one example at a time."""

    def run(m: Any, x: Tensor) -> Any:
        return m.out(torch.func.vmap(lambda one: function(m, one))(x))

    return lambda: Case(Net(run, inner=nn.Linear(5, 5), norm=nn.LayerNorm(5), out=nn.Linear(5, CLASSES)), vectors(5))


def energy(m: Any, one: Tensor) -> Any:
    return torch.func.grad(lambda x: m.norm(m.inner(x)).tanh().sum())(one)


def distances() -> Case:
    """From centres; the vmapped backward of cdist is wrong in torch 2.13."""

    def run(m: Any, x: Tensor) -> Any:
        return m.out((-torch.cdist(x, m.centres)).exp())

    return Case(Net(run, centres=weights(WIDTH, 5), out=head()), vectors(5))


def merged_in_small_batches() -> Case:
    """Two graphs of the same nodes, tied together in two ways."""

    def run(m: Any, x: Tensor) -> Any:
        return x @ (m.a @ m.b) if len(x) == 5 else (x @ m.a) @ m.b

    return Case(Net(run, a=weights(5, WIDTH), b=weights(WIDTH, CLASSES)), vectors(5))


def shared_in_small_batches() -> Case:
    """One graph, in which the places of the words have a row for each example or one for all."""

    def run(m: Any, x: Tensor) -> Any:
        places = torch.arange(x.shape[1]).expand(1 if len(x) == 5 else len(x), -1)
        return m.out((m.words(x) + F.embedding(places, m.table).tanh()).relu().mean(dim=1))

    return Case(Net(run, words=words_in(), table=weights(4, WIDTH), out=head()), words(4))


def parameter_list() -> Case:
    def run(m: Any, x: Tensor) -> Any:
        for w in m.ws:
            x = (x @ w).tanh()
        return x @ m.last["w"] + m.last["b"]

    last = nn.ParameterDict({"w": weights(WIDTH, CLASSES), "b": weights(CLASSES)})
    return Case(Net(run, ws=nn.ParameterList([weights(5, 6), weights(6, WIDTH)]), last=last), vectors(5))


def functional_conv() -> Case:
    def run(m: Any, x: Tensor) -> Any:
        x = F.conv1d(F.pad(x, (2, 0)), m.conv.weight, m.conv.bias)
        return m.out(x.tanh().mean(dim=2))

    return Case(Net(run, conv=nn.Conv1d(2, WIDTH, 3), out=head()), vectors(2, 5))


def tied_bias() -> Case:
    """BERT's masked language model: the decoder has the embedding's weight, and the bias of the module around it."""

    def predict(m: Any, x: Tensor) -> Any:
        return m.decoder(m.norm(F.gelu(m.dense(x))))

    def run(m: Any, x: Tensor) -> Any:
        return m.predictions(m.layer(m.tokens(x)))

    decoder, bias = nn.Linear(WIDTH, VOCABULARY), nn.Parameter(torch.zeros(VOCABULARY))
    around = Net(predict, dense=nn.Linear(WIDTH, WIDTH), norm=nn.LayerNorm(WIDTH), decoder=decoder, bias=bias)
    model = Net(run, tokens=words_in(), layer=attention(), predictions=around)
    decoder.weight, decoder.bias = model.tokens.weight, bias
    return Case(model, words(6, 6))


# --- random numbers ---------------------------------------------------------------------------------------------------


def vit_dropout() -> Case:
    def run(m: Any, x: Tensor) -> Any:
        x = m.patches(x).flatten(2).transpose(1, 2)
        x = m.drop(torch.cat([m.token.expand(len(x), -1, -1), x], dim=1) + m.places)
        return m.out(m.layer(x)[:, 0])

    model = Net(
        run,
        patches=nn.Conv2d(1, WIDTH, 2, 2),
        token=weights(1, 1, WIDTH),
        places=weights(1, 5, WIDTH),
        drop=nn.Dropout(0.1),
        layer=attention(dropout=0.1),
        out=head(),
    )
    return Case(model, vectors(1, 4, 4))


class DropPath(nn.Module):
    """Stochastic depth: a residual branch is left out of some examples."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.keep = 1 - drop

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(self.keep)
        return x * mask.div_(self.keep)


def convnext() -> Case:
    def block(m: Any, x: Tensor) -> Any:
        inner = m.norm(m.depthwise(x).permute(0, 2, 3, 1))
        inner = m.gamma * m.down(F.gelu(m.up(inner)))
        return x + m.drop(inner.permute(0, 3, 1, 2))

    def run(m: Any, x: Tensor) -> Any:
        return m.out(m.blocks(m.stem(x)).mean(dim=(2, 3)))

    blocks = [
        Net(
            block,
            depthwise=nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
            norm=nn.LayerNorm(WIDTH),
            up=nn.Linear(WIDTH, 8),
            gamma=weights(WIDTH),
            down=nn.Linear(8, WIDTH),
            drop=DropPath(0.3),
        )
        for _ in range(2)
    ]
    return Case(Net(run, stem=nn.Conv2d(1, WIDTH, 2, 2), blocks=nn.Sequential(*blocks), out=head()), vectors(1, 8, 8))


def lstm_dropout() -> Case:
    def run(m: Any, x: Tensor) -> Any:
        return m.out(m.lstm(m.tokens(x))[0])

    lstm = nn.LSTM(WIDTH, 5, 2, batch_first=True, dropout=0.3)
    return Case(Net(run, tokens=words_in(), lstm=lstm, out=head(5, VOCABULARY)), words(6, 6))


# --- mixtures of experts ----------------------------------------------------------------------------------------------


def experts(route: Callable[..., Tensor]) -> Callable[[], Case]:
    """Tokens [B, T, width], two experts, and a rule that sends the one to the other."""

    def build() -> Case:
        def run(m: Any, x: Tensor) -> Any:
            x = m.tokens(x)
            return m.out((x + route(m, x, m.router(x).softmax(dim=-1))).mean(dim=1))

        two = [nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH)) for _ in range(2)]
        router = nn.Linear(WIDTH, 2, bias=False)
        return Case(Net(run, tokens=words_in(), router=router, experts=nn.ModuleList(two), out=head()), words(6))

    return build


def dropless(m: Any, x: Tensor, p: Tensor) -> Any:
    """Each expert is given its tokens in one list, from whichever examples they are."""
    tokens, (gate, choice) = x.flatten(0, 1), p.flatten(0, 1).max(dim=-1)
    out = torch.zeros_like(tokens)
    for e, expert in enumerate(m.experts):
        (chosen,) = torch.where(choice == e)
        out = out.index_add(0, chosen, expert(tokens[chosen]) * gate[chosen, None])
    return out.view_as(x)


def with_capacity(m: Any, x: Tensor, p: Tensor, capacity: int = 4) -> Any:
    """Token choice: an expert has room for the first few tokens of a group (the first dimension) that choose it."""
    gate, choice = p.max(dim=-1)
    chosen = F.one_hot(choice, 2)
    place = chosen.cumsum(dim=1) * chosen - 1  # [group, T, expert], -1 if not chosen
    room = F.one_hot(place.clamp(min=0), x.shape[1])[..., :capacity] * chosen[..., None]
    send = room.to(x.dtype)  # [group, T, expert, place]
    given = torch.einsum("gtec,gtd->egcd", send, x)
    done = torch.stack([expert(one) for expert, one in zip(m.experts, given, strict=True)])
    return torch.einsum("gtec,egcd->gtd", send * gate[..., None, None], done)


def expert_choice(m: Any, x: Tensor, p: Tensor, capacity: int = 4) -> Any:
    """Each expert takes the tokens of a group that want it most."""
    gate, chosen = p.transpose(1, 2).topk(capacity, dim=-1)  # [group, expert, place]
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        index = chosen[:, e, :, None].expand(-1, -1, x.shape[-1])
        out = out.scatter_add(1, index, expert(x.gather(1, index)) * gate[:, e, :, None])
    return out


def over_the_batch(route: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The whole batch as one group: an example's tokens compete with those of the others."""

    def run(m: Any, x: Tensor, p: Tensor) -> Any:
        tokens, chances = x.flatten(0, 1)[None], p.flatten(0, 1)[None]
        return route(m, tokens, chances, capacity=min(8, tokens.shape[1])).view_as(x)

    return run


# --- how the model is called ------------------------------------------------------------------------------------------


def called_with_a_dict() -> Case:
    def run(m: Any, inputs: dict[str, Tensor]) -> Any:
        return m.layers((inputs["x"] - inputs["mean"]) / inputs["std"])

    def call(m: nn.Module, batch: Batch) -> Any:
        one = torch.ones(1, dtype=torch.float64)
        return m({"mean": 0.1 * one, "std": 2 * one, "x": batch["x"]})

    return Case(Net(run, layers=nn.Sequential(nn.Linear(5, 6), nn.Tanh(), head(6))), vectors(5), call)


def positions_by_keyword() -> Case:
    def run(m: Any, *, position_ids: Tensor, input_ids: Tensor) -> Any:
        return m.out(m.layer(m.tokens(input_ids) + m.places(position_ids)))

    model = Net(run, tokens=words_in(), places=nn.Embedding(6, WIDTH), layer=attention(), out=head(WIDTH, VOCABULARY))
    return Case(model, words(6, 6), lambda m, b: m(position_ids=torch.arange(6)[None], input_ids=b["x"]))


def time_then_examples() -> Case:
    """A diffusion model's signature, with one time for the whole batch."""

    def run(m: Any, t: Tensor, x: Tensor) -> Any:
        return m.out((m.hidden(x) + m.time(t[:, None])).tanh())

    model = Net(run, hidden=nn.Linear(5, 6), time=nn.Linear(1, 6), out=head(6))
    return Case(model, vectors(5), lambda m, b: m(torch.full((1,), 0.3, dtype=torch.float64), b["x"]))


def list_of_images() -> Case:
    def run(m: Any, images: list[Tensor]) -> Any:
        return m.out(m.conv(torch.stack(images)).tanh().mean(dim=(2, 3)))

    return Case(Net(run, conv=nn.Conv2d(1, WIDTH, 3), out=head()), vectors(1, 5, 5), lambda m, b: m(list(b["x"])))


def channels_last() -> Case:
    layers = [nn.Conv2d(2, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, 6, 3, stride=2)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head(6))
    model = model.to(memory_format=torch.channels_last)
    return Case(model, vectors(2, 6, 6), lambda m, b: m(b["x"].to(memory_format=torch.channels_last)))


# --- transformers -----------------------------------------------------------------------------------------------------


def of_transformers(
    name: str,
    data: Callable[[], Batch],
    options: dict[str, Any],
    losses: Callable[[Any, Batch], Tensor] = lambda output, batch: output.loss,
) -> Callable[[], Case]:
    """A model with random weights, called with keywords."""

    def build() -> Case:
        transformers = pytest.importorskip("transformers")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some of its modules are written with torch.jit.script
            kind = getattr(transformers, name)
        model = kind(kind.config_class(**options)).train()
        return Case(model, data(), lambda m, b: m(**b), losses)

    return build


def text(**more: Callable[[Tensor], Tensor]) -> Callable[[], Batch]:
    """Token ids without padding, and what is made of them."""

    def data() -> Batch:
        ids = torch.randint(3, VOCABULARY, (N, 6))
        return {"input_ids": ids} | {name: one(ids) for name, one in more.items()}

    return data


def two_places(ids: Tensor) -> Tensor:
    """Labels of two tokens of each example."""
    places = torch.rand(ids.shape).topk(2).indices
    return torch.full_like(ids, -100).scatter(1, places, ids.gather(1, places))


def a_class(ids: Tensor) -> Tensor:
    return torch.randint(CLASSES, (len(ids),))


def pictures(size: int, *, labels: bool) -> Callable[[], Batch]:
    def data() -> Batch:
        images = torch.randn(N, 3, size, size)
        return {"pixel_values": images} | ({"labels": a_class(images)} if labels else {})

    return data


def detections(output: Any, batch: Batch) -> Any:
    """[B]: as if it were known which query finds what."""
    logits, boxes = output.logits, output.pred_boxes
    wanted = torch.arange(logits.shape[1]).expand(len(logits), -1)
    apart = boxes - batch["pixel_values"][:, 0, :3, :4].sigmoid()
    return F.cross_entropy(logits.movedim(-1, 1), wanted, reduction="none").mean(dim=1) + apart.abs().mean(dim=(1, 2))


causal = text(labels=torch.clone)
IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
DECODER = IDS | SIZES | {"intermediate_size": 6, "use_cache": False}
BERT = IDS | SIZES | {"intermediate_size": 6, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BOTH_SIDES = {
    f"{side}_{name}": number
    for side in ("encoder", "decoder")
    for name, number in {"layers": 1, "ffn_dim": 6, "attention_heads": 2}.items()
}
GPT2 = {"n_positions": 8, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "use_cache": False}
T5 = {"d_model": WIDTH, "d_kv": 2, "d_ff": 6, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
SWIN = {"image_size": 8, "patch_size": 2, "embed_dim": WIDTH, "depths": [2], "num_heads": [2], "window_size": 2}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4, "share_att_key": True}
RESNET = {"model_type": "resnet", "embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic"}
TRANSFORMERS = {
    "t5": of_transformers(
        "T5ForConditionalGeneration", causal, IDS | T5 | {"decoder_start_token_id": 0, "use_cache": False}
    ),
    "bart": of_transformers(
        "BartForConditionalGeneration", causal, DECODER | BOTH_SIDES | {"d_model": WIDTH, "dropout": 0.0}
    ),
    "opt": of_transformers(
        "OPTForCausalLM", causal, DECODER | {"word_embed_proj_dim": WIDTH, "ffn_dim": 6, "dropout": 0.0}
    ),
    "deberta": of_transformers(
        "DebertaV2ForSequenceClassification",
        text(labels=a_class),
        BERT | DEBERTA | {"norm_rel_ebd": "layer_norm", "num_labels": CLASSES, "pooler_hidden_size": WIDTH},
    ),
    "swin": of_transformers(
        "SwinForImageClassification",
        pictures(8, labels=True),
        SWIN | {"drop_path_rate": 0.0, "num_labels": CLASSES},
    ),
    "mamba": of_transformers("MambaForCausalLM", causal, DECODER | {"state_size": 3, "time_step_rank": 2}),
    "mixtral": of_transformers(
        "MixtralForCausalLM",
        causal,
        # The other implementations have no float64.
        DECODER | {"num_key_value_heads": 1, "num_local_experts": 3, "experts_implementation": "eager"},
    ),
    "gemma": of_transformers("GemmaForCausalLM", causal, DECODER | {"num_key_value_heads": 1, "head_dim": 4}),
    "clip": of_transformers(
        "CLIPModel",
        lambda: text()() | pictures(4, labels=False)(),
        {
            "projection_dim": WIDTH,
            "text_config": DECODER,
            "vision_config": SIZES | {"intermediate_size": 6, "image_size": 4, "patch_size": 2},
        },
        lambda output, batch: (output.image_embeds - output.text_embeds).square().sum(dim=1),
    ),
    "bert-mlm": of_transformers("BertForMaskedLM", text(labels=two_places), BERT),
    "gpt2": of_transformers(
        "GPT2LMHeadModel", causal, IDS | GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ),
    "detr": of_transformers(
        "DetrForObjectDetection",
        pictures(8, labels=False),
        BOTH_SIDES
        | {"use_timm_backbone": False, "backbone": None, "backbone_config": RESNET | {"out_features": ["stage1"]}}
        | {"d_model": WIDTH, "num_queries": 3, "num_labels": CLASSES, "dropout": 0.0, "init_std": 0.2},
        detections,
    ),
}

SETTINGS = [
    Setting("nanogpt", nanogpt_loss, batch_size=8),
    Setting("nanogpt-as-long-as-the-batch", nanogpt_loss),
    Setting("nanogpt-dropout", nanogpt_dropout, draws=True),
    Setting("prototypes", prototypes(3)),
    Setting("prototypes-as-many-as-the-batch", prototypes(6)),
    Setting("positions-first-row", positions(lambda found, size: found[0])),
    Setting("positions-mean", positions(lambda found, size: found.mean(0))),
    Setting("positions-repeated", positions(lambda found, size: found.repeat(size, 1, 1))),
    Setting("prompt-tuning", prompt_tuning),
    Setting("detr-queries", queries),
    Setting("swin-bias", swin_bias),
    Setting("t5-bias", t5_bias, batch_size=8),
    Setting("t5-bias-as-long-as-the-batch", t5_bias),
    Setting("lstm-folded", lstm_folded),
    Setting("time-distributed-cnn", time_distributed(time_first=False)),
    Setting("time-distributed-cnn-time-first", time_distributed(time_first=True)),
    Setting("two-views", two_views),
    Setting("flat-logits", flat_logits(), batch_size=5),
    Setting("flat-logits-as-long-as-the-batch", flat_logits()),
    Setting("flat-logits-time-first", flat_logits(time_first=True), batch_size=5),
    Setting("flat-logits-in-a-loss", flat_logits(loss=True)),
    Setting("flat-logits-of-a-mixed-batch", flat_logits(mixed=True), expected="refused"),
    # Which example comes where inside differs from batch to batch.
    Setting("packed", of_lengths(packed)),
    Setting("packed-of-like-lengths", of_lengths(packed, shortest=3)),
    Setting("sorted-by-length", of_lengths(sorted_by_length)),
    Setting("sorted-by-like-lengths", of_lengths(sorted_by_length, shortest=3)),
    Setting("flipped", flipped),
    Setting("weight-norm", convolved(parametrizations.weight_norm)),
    Setting("spectral-norm", convolved(steady_spectral_norm)),
    Setting("orthogonal", convolved(parametrizations.orthogonal)),
    Setting("pruned", convolved(pruned)),
    Setting("functional-linear", functional_linear),
    Setting("functional-inside", functional_inside),
    Setting("checkpointed", checkpointed()),
    Setting("checkpointed-dropout", checkpointed(dropout=0.3), draws=True),
    Setting("torch-func-vmap", inside_torch_func(lambda m, x: m.norm(m.inner(x)).tanh())),
    Setting("torch-func-grad", inside_torch_func(energy)),
    Setting("distances", distances),
    Setting("merged-in-small-batches", merged_in_small_batches),
    Setting("shared-in-small-batches", shared_in_small_batches),
    Setting("parameter-list", parameter_list),
    Setting("functional-conv", functional_conv),
    Setting("tied-bias", tied_bias),
    Setting("vit-dropout", vit_dropout, draws=True),
    Setting("convnext-stochastic-depth", convnext, draws=True),
    Setting("lstm-dropout", lstm_dropout, draws=True),
    Setting("experts-dropless", experts(dropless)),
    Setting("experts-capacity", experts(with_capacity)),
    Setting("experts-choose", experts(expert_choice)),
    # There is no loop to compare with: an example's output depends on the other examples.
    Setting("experts-capacity-over-the-batch", experts(over_the_batch(with_capacity)), expected="refused"),
    Setting("experts-choose-over-the-batch", experts(over_the_batch(expert_choice)), expected="refused"),
    Setting("called-with-a-dict", called_with_a_dict),
    Setting("positions-by-keyword", positions_by_keyword),
    Setting("time-then-examples", time_then_examples),
    Setting("list-of-images", list_of_images),
    Setting("channels-last", channels_last),
    *(Setting(name, build) for name, build in TRANSFORMERS.items()),
]
