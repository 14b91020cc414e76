"""Adapters of PEFT: the orders are those of the paper's algorithm, fed by a loop over examples on a twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

for package in ("transformers", "peft"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import peft  # noqa: E402
import transformers  # noqa: E402

from ordain import GraB, Herding, herding, reference  # noqa: E402
from ordain.errors import InputError, StateError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore", "error::ordain.errors.OrdainWarning")
N, SIZE, EPOCHS, TOKENS, LENGTH = 11, 4, 2, 17, 5
SHAPE: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
ATTENTION = ["q_proj", "v_proj"]
TEXTS = torch.randint(1, TOKENS, (N, LENGTH), generator=torch.Generator().manual_seed(0))


def llama(tokens: int = TOKENS, kind: Any = transformers.LlamaForCausalLM) -> nn.Module:
    return kind(transformers.LlamaConfig(vocab_size=tokens, num_labels=3, pad_token_id=0, **SHAPE))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "target_modules": ATTENTION} | options)


def prompts(kind: Any, **options: Any) -> Any:
    return kind(num_virtual_tokens=3, task_type="CAUSAL_LM", **options)


ADAPTERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "LoRA": (llama, lora),
    "LoRA with dropout": (llama, lambda: lora(lora_dropout=0.2)),
    "LoRA of all layers, trained already": (
        llama,
        lambda: lora(target_modules="all-linear", init_lora_weights=False, use_rslora=True),
    ),
    "LoRA of an embedding": (llama, lambda: lora(target_modules=["q_proj", "embed_tokens"])),
    "LoRA and a head of its own": (llama, lambda: lora(modules_to_save=["lm_head"])),
    "LoRA of Conv1D": (gpt2, lambda: lora(target_modules=["c_attn"], fan_in_fan_out=True)),
    "DoRA": (llama, lambda: lora(use_dora=True, init_lora_weights=False)),
    "IA3": (
        llama,
        lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "prompt tuning": (llama, lambda: prompts(peft.PromptTuningConfig)),
    "prefix tuning": (llama, lambda: prompts(peft.PrefixTuningConfig)),
    "p-tuning": (llama, lambda: prompts(peft.PromptEncoderConfig, encoder_hidden_size=6)),
    "AdaLoRA": (llama, lambda: peft.AdaLoraConfig(init_r=2, target_r=1, total_step=90, target_modules=["q_proj"])),
    "LoHa": (llama, lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"])),
    "VeRA": (llama, lambda: peft.VeraConfig(r=2, target_modules=["q_proj"])),
    "OFT": (llama, lambda: peft.OFTConfig(r=0, oft_block_size=2, target_modules=["q_proj"])),
}


def make(base: Callable[[], nn.Module], config: Callable[[], Any]) -> nn.Module:
    torch.manual_seed(3)
    return peft.get_peft_model(base(), config()).double().train()


def losses(model: nn.Module, indices: list[int]) -> Tensor:
    """[B], with the same random numbers at every call."""
    torch.manual_seed(1)
    ids = TEXTS[indices]
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    if logits.ndim == 2:  # classes
        return nn.functional.cross_entropy(logits, ids[:, 0] % 3, reduction="none")
    logits = logits[:, -LENGTH:-1]  # without those of a prompt
    return nn.functional.cross_entropy(logits.movedim(-1, 1), ids[:, 1:], reduction="none").mean(1)


def check(make_one: Callable[[], nn.Module], build: Callable[..., Any], book_of: Any, names: Any = None) -> Any:
    """Train a model that an order watches, and a twin that nobody watches; the order of every epoch is the book's."""
    model, twin = make_one(), make_one()
    trained = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    chosen = [p for name, p in trained.items() if names is None or name in names]
    assert names is None or len(chosen) == len(names)
    order = build(model, N)
    optimizers = [torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.2) for one in (model, twin)]
    permutation = list(iter(order.sampler))
    book = book_of(permutation, sum(p.numel() for p in chosen))
    for epoch in range(1 if book_of is reference.PairGraB else EPOCHS):  # a mean needs a second one to be used
        for start in range(0, N, SIZE):
            indices = permutation[start : start + SIZE]
            watched, plain = losses(model, indices), losses(twin, indices)
            assert torch.equal(watched, plain)
            for one in plain:
                grads = torch.autograd.grad(one, chosen, retain_graph=True, allow_unused=True, materialize_grads=True)
                book.see(torch.cat([grad.flatten() for grad in grads]).numpy())
            for each, optimizer in zip((watched, plain), optimizers, strict=True):
                optimizer.zero_grad()
                each.mean().backward()
            order.step()
            for optimizer in optimizers:
                optimizer.step()
        permutation = list(iter(order.sampler))
        assert permutation == book.next_order(), f"after epoch {epoch}"
    dim = order.state_dict()["dim"]
    assert dim == sum(p.numel() for p in chosen)
    return order


class HerdingBook:
    """Herding of the gradients of an epoch, one at a time."""

    def __init__(self, first: list[int], dim: int) -> None:
        self.order, self.rows = list(first), []

    def see(self, row: np.ndarray) -> None:
        self.rows.append(row)

    def next_order(self) -> list[int]:
        found = herding.herd(torch.tensor(np.stack(self.rows)), rounds=10, tolerance=0.2)
        self.order, self.rows = [self.order[i] for i in found], []
        return self.order


BOOKS = {"mean": reference.GraB, "pair": reference.PairGraB}


@pytest.mark.parametrize("centering", BOOKS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_orders_are_those_of_the_loop(name: str, centering: Any) -> None:
    adapted = lambda: make(*ADAPTERS[name])  # noqa: E731
    order = check(adapted, lambda model, n: GraB(model, n, centering=centering), BOOKS[centering])
    assert "params" not in repr(order)


LAST = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.default.weight"
HEADS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], list[str]]] = {
    "A and B of the last adapted layer": (
        llama,
        lambda: lora(target_modules="all-linear"),
        [LAST.format("A"), LAST.format("B")],
    ),
    "not over a vocabulary": (
        lambda: llama(tokens=40),
        lambda: lora(target_modules=["down_proj", "lm_head"]),
        [LAST.format("A"), LAST.format("B")],
    ),
    "a layer that is trained beside them": (
        lambda: llama(kind=transformers.LlamaForSequenceClassification),
        lambda: lora(task_type="SEQ_CLS"),
        ["base_model.model.score.modules_to_save.default.weight"],
    ),
    "A and B, not the magnitude": (
        llama,
        lambda: lora(target_modules=["down_proj"], use_dora=True, init_lora_weights=False),
        [LAST.format("A"), LAST.format("B")],
    ),
}
BY_HEAD: dict[str, tuple[Callable[..., Any], Any]] = {
    "mean": (lambda model, n: GraB(model, n, params="head"), reference.GraB),
    "pair": (lambda model, n: GraB(model, n, params="head", centering="pair"), reference.PairGraB),
    "herding": (lambda model, n: Herding(model, n, params="head"), HerdingBook),
}


@pytest.mark.parametrize("kind", BY_HEAD)
@pytest.mark.parametrize("name", HEADS)
def test_the_head(name: str, kind: str) -> None:
    base, config, names = HEADS[name]
    order = check(lambda: make(base, config), *BY_HEAD[kind], names)
    said = repr(order)
    assert all(name in said for name in names)
    assert said.count("weight") == len(names)


@pytest.mark.parametrize("name", ["IA3", "prompt tuning"])
def test_adapters_without_a_linear_layer_have_no_head(name: str) -> None:
    model = make(*ADAPTERS[name])
    with pytest.raises(InputError, match=r"no trainable linear layer.*Leave params= out"):
        GraB(model, N, params="head")


def test_adapters_in_float32_of_a_model_in_bfloat16() -> None:
    """As PEFT makes them, and as ``prepare_model_for_kbit_training`` leaves them."""
    torch.manual_seed(3)
    model = peft.get_peft_model(llama().bfloat16(), lora()).train()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    order = GraB(model, N)
    train(model, order)
    assert sorted(order.sampler) == list(range(N))
    assert order.set_aside == 0
    assert order.state_dict()["dtype"] == "torch.float32"


def test_an_adapter_that_is_switched_off_for_a_pass() -> None:
    """The base model's own outputs, as in DPO: a pass without gradients, inside disable_adapter()."""
    found = []
    for off in (False, True):
        model = make(*ADAPTERS["LoRA"])
        order = GraB(model, N)
        for _ in range(2):
            for indices in torch.utils.data.BatchSampler(order.sampler, SIZE, drop_last=False):
                if off:
                    with torch.no_grad(), model.disable_adapter():
                        losses(model, indices)
                losses(model, indices).mean().backward()
                order.step()
        found.append(list(order.sampler))
    assert found[0] == found[1]


def train(model: nn.Module, order: Any) -> None:
    for indices in torch.utils.data.BatchSampler(order.sampler, SIZE, drop_last=False):
        losses(model, indices).mean().backward()
        order.step()


def test_an_adapter_that_comes_after_the_order() -> None:
    model = make(*ADAPTERS["LoRA"])
    order = GraB(model, N)
    model.add_adapter("other", lora())
    with pytest.raises(StateError, match="parameters that did not exist when the order was created"):
        train(model.double(), order)


def test_another_adapter_than_the_order_was_made_for() -> None:
    model = make(*ADAPTERS["LoRA"])
    model.add_adapter("other", lora())
    model.set_adapter("default")
    order = GraB(model.double(), N)
    train(model, order)
    model.set_adapter("other")
    with pytest.raises(StateError, match="none of the order's parameters"):
        train(model, order)
    order.detach()
    train(model, GraB(model, N))  # as the message says
