"""transformers' Trainer in one process: orders against the reference, resume, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import reference_orders
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import Dataset, IterableDataset

for package in ("transformers", "accelerate"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import transformers  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

import ordain  # noqa: E402
from ordain import Deterministic, GraB, RandomReshuffling, Stratified  # noqa: E402
from ordain.errors import ArgumentError, InputError, StateError  # noqa: E402
from ordain.integrations.transformers import OrderedMixin, OrderedTrainer  # noqa: E402

# Of the frameworks; ours are errors.
pytestmark = pytest.mark.filterwarnings("ignore", "error::ordain.errors.OrdainWarning")
N, BATCH, EPOCHS, TOKENS = 9, 2, 3, 17


class Texts(Dataset[dict[str, Tensor]]):
    """Sequences of different lengths, padded."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(1, TOKENS, (6,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[3 + index % 4 :] = -100
        return {"input_ids": ids, "labels": labels}


class Classes(Texts):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": super().__getitem__(index)["input_ids"], "labels": torch.tensor(index % 2)}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.tie_word_embeddings = False
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=TOKENS, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
    )


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=TOKENS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers.BertForSequenceClassification(config)


MODELS: dict[str, tuple[Callable[[], Any], Dataset[Any], Any]] = {
    "gpt2": (gpt2, Texts(), "head"),
    "llama": (llama, Texts(), None),
    "bert": (bert, Classes(), "head"),
}


def by_head(model: nn.Module, n: int) -> GraB:
    return GraB(model, n, params="head")


def trainer_of(
    name: str, folder: Path, order: Any = by_head, kind: Any = OrderedTrainer, *, anew: bool = False, **options: Any
) -> Any:
    build, data, _ = MODELS[name]

    def model() -> nn.Module:
        torch.manual_seed(3)
        made: nn.Module = build().double()
        return made

    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **{"save_strategy": "no", "per_device_train_batch_size": BATCH, **options},
    )
    more: dict[str, Any] = {"order": order} if order is not None else {}
    more |= {"model_init": model} if anew else {"model": model()}
    return kind(args=args, train_dataset=data, eval_dataset=data, **more)


def orders(trainer: Any) -> list[list[int]]:
    return [trainer.order.history(epoch).tolist() for epoch in range(EPOCHS)]


def weights(trainer: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def hooks(model: nn.Module) -> list[int]:
    return [len(vars(module)["_forward_hooks"]) for module in model.modules()]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_of_an_example(name: str, accumulate: int, tmp_path: Path) -> None:
    """At weights that stay, orders are those of each example's own loss: the sum over its tokens."""
    params = MODELS[name][2]
    made = lambda model, n: GraB(model, n, params=params)  # noqa: E731
    trainer = trainer_of(name, tmp_path, made, gradient_accumulation_steps=accumulate, learning_rate=0.0)
    trainer.train()
    model, data = trainer.model, MODELS[name][1]
    head = model.classifier if name == "bert" else model.lm_head
    watched = list((head if params else model).parameters())

    def gradient(index: int, epoch: int) -> Any:
        one = {key: value.unsqueeze(0) for key, value in data[index].items()}
        tokens = 1 if name == "bert" else int((one["labels"][:, 1:] != -100).sum())
        grads = torch.autograd.grad(model(**one).loss * tokens, watched)
        return torch.cat([grad.flatten() for grad in grads]).numpy()

    first = trainer.order.history(0).tolist()
    dim = sum(p.numel() for p in watched)
    wanted = reference_orders(gradient, first, dim, EPOCHS - 1, paired=False, balancer=Deterministic())
    assert orders(trainer) == wanted
    assert len({tuple(one) for one in wanted}) == EPOCHS


@pytest.mark.parametrize("order", [by_head, RandomReshuffling])
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"dataloader_drop_last": True}], ids=str)
def test_resumed(order: Any, options: dict[str, Any], tmp_path: Path) -> None:
    whole = trainer_of("gpt2", tmp_path, order, save_strategy="steps", save_steps=1, **options)
    whole.train()
    epoch = whole.state.global_step // EPOCHS
    for step in (1, epoch, epoch + 2):  # in mid-epoch, between epochs, in mid-epoch
        rest = trainer_of("gpt2", tmp_path, order, **options)
        rest.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert orders(rest) == orders(whole)
        assert torch.equal(weights(rest), weights(whole))


def test_resumed_from_the_last(tmp_path: Path) -> None:
    whole = trainer_of("gpt2", tmp_path, save_strategy="steps", save_steps=4, max_steps=12)
    whole.train()
    first = trainer_of("gpt2", tmp_path / "again", save_strategy="steps", save_steps=4, max_steps=12)
    first.add_callback(_stopped_at(8))
    first.train()
    rest = trainer_of("gpt2", tmp_path / "again", max_steps=12)
    rest.train(resume_from_checkpoint=True)
    assert orders(rest) == orders(whole)


@pytest.mark.parametrize("order", [by_head, RandomReshuffling])
def test_resumed_with_other_steps(order: Any, tmp_path: Path) -> None:
    """Trainer counts steps, and would end an epoch before its last examples, or take it for done."""
    trainer_of("gpt2", tmp_path, order, save_strategy="steps", save_steps=1).train()
    for step, options in (
        (7, {"per_device_train_batch_size": 1}),  # 4 examples of the second epoch; for Trainer 7 of the first
        (6, {"gradient_accumulation_steps": 2}),  # 2 examples of the second epoch; for Trainer all of it
    ):
        checkpoint = str(tmp_path / f"checkpoint-{step}")
        with pytest.raises(StateError, match=rf"step {step} after 1\.\d epochs.*gradient_accumulation_steps.*ignore"):
            trainer_of("gpt2", tmp_path, order, **options).train(resume_from_checkpoint=checkpoint)
    rest = trainer_of("gpt2", tmp_path, order, gradient_accumulation_steps=2, ignore_data_skip=True)
    rest.train(resume_from_checkpoint=checkpoint)
    assert rest.order.epoch == 2


def _stopped_at(step: int) -> Any:
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == step

    return Stop()


def _broken_at(step: int) -> Any:
    class Broken(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                raise RuntimeError("broken")

    return Broken()


def test_a_saved_order_is_tensors_numbers_and_strings(tmp_path: Path) -> None:
    trainer = trainer_of("gpt2", tmp_path, save_strategy="epoch")
    trainer.train()
    saved = torch.load(tmp_path / "checkpoint-15" / "order.pt", weights_only=True)["order"]
    assert saved["epoch"] == EPOCHS - 1
    assert ordain.load(tmp_path / "checkpoint-5" / "order.pt")["order"]["epoch"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"eval_strategy": "steps", "eval_steps": 1},
        {"dataloader_num_workers": 1},
    ],
    ids=str,
)
def test_what_changes_no_order(options: dict[str, Any], tmp_path: Path) -> None:
    one, other = trainer_of("gpt2", tmp_path), trainer_of("gpt2", tmp_path, **options)
    one.train()
    other.train()
    assert orders(one) == orders(other)
    assert torch.equal(weights(one), weights(other))


def test_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TrainingArguments write torch_compile into the environment, where every later Trainer finds it."""
    torch._dynamo.reset()
    counters.clear()
    one = trainer_of("gpt2", tmp_path)
    one.train()
    assert not counters["stats"]["unique_graphs"]
    with monkeypatch.context() as environment:
        environment.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # so that it is put back
        environment.setenv("ACCELERATE_DYNAMO_MODE", "default")
        other = trainer_of("gpt2", tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
        other.train()
    assert counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    trainer_of("gpt2", tmp_path).train()  # what Accelerate's processes share is as it was
    assert not counters["stats"]["unique_graphs"]
    assert orders(one) == orders(other)
    torch.testing.assert_close(weights(one), weights(other))


def test_a_gradient_scaler(tmp_path: Path) -> None:
    """As fp16=True has it, without a GPU. Its scale is a power of two, and changes in mid-epoch."""
    options = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
    plain, scaled = (trainer_of("llama", tmp_path, GraB, **options) for _ in range(2))
    scaled.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    plain.train()
    scaled.train()
    assert orders(scaled) == orders(plain)
    torch.testing.assert_close(weights(scaled), weights(plain))
    assert scaler.get_scale() > 2.0**13


def test_bf16(tmp_path: Path) -> None:
    trainer = trainer_of("llama", tmp_path, GraB, bf16=True)
    trainer.model.float()
    trainer.train()
    assert all(sorted(one) == list(range(N)) for one in orders(trainer))
    assert len({tuple(one) for one in orders(trainer)}) == EPOCHS
    assert trainer.order.set_aside == 0


def test_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    monkeypatch.setitem(MODELS, "lora", (lambda: peft.get_peft_model(llama(), config), Texts(), None))
    whole = trainer_of("lora", tmp_path, GraB, save_strategy="steps", save_steps=7)
    whole.train()
    rest = trainer_of("lora", tmp_path, GraB)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert orders(rest) == orders(whole)
    assert torch.equal(weights(rest), weights(whole))
    assert len({tuple(one) for one in orders(whole)}) == EPOCHS


def test_other_trainers_and_factories(tmp_path: Path) -> None:
    class Louder(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            return (found[0] * 2, found[1]) if isinstance(found, tuple) else found * 2

    class Mine(OrderedMixin, Louder):
        pass

    for seed, made in ((3, partial(RandomReshuffling, seed=3)), (4, partial(GraB, params="head", seed=4))):
        trainer = trainer_of("gpt2", tmp_path, made, max_steps=1)
        trainer.train()
        assert trainer.order.seed == seed
    labels = [index % 2 for index in range(N)]
    trainer = trainer_of("gpt2", tmp_path, lambda model, n: Stratified(labels), kind=Mine)
    trainer.train()
    assert trainer.order.epoch == EPOCHS - 1
    assert orders(trainer) == [Stratified(labels).history(epoch).tolist() for epoch in range(EPOCHS)]
    one, other = (
        trainer_of("gpt2", tmp_path, kind=Mine, learning_rate=0.0),
        trainer_of("gpt2", tmp_path, learning_rate=0.0),
    )
    one.train()
    other.train()
    assert orders(one) == orders(other)  # a constant factor


def test_the_model_comes_back_as_it_was(tmp_path: Path) -> None:
    trainer = trainer_of("gpt2", tmp_path)
    before = hooks(trainer.model)
    trainer.train()
    assert hooks(trainer.model) == before
    trainer.add_callback(_broken_at(2))
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert hooks(trainer.model) == before


def test_trained_twice(tmp_path: Path) -> None:
    """The second order begins with nothing but the trained model."""
    options = {"optim": "sgd", "learning_rate": 0.5}
    twice = trainer_of("gpt2", tmp_path, **options)
    twice.train()
    first = orders(twice)
    once = trainer_of("gpt2", tmp_path, **options)
    once.model.load_state_dict(deepcopy(twice.model.state_dict()))
    twice.train()
    once.train()
    assert orders(twice) == orders(once) != first
    assert torch.equal(weights(twice), weights(once))

    kept: list[GraB] = []

    def same(model: nn.Module, n: int) -> GraB:
        kept.append(kept[0] if kept else GraB(model, n))
        return kept[-1]

    reused = trainer_of("gpt2", tmp_path, same)
    reused.train()
    with pytest.raises(
        ArgumentError, match=r"order= that returned the same order twice.*a new order for each train\(\)"
    ):
        reused.train()


def test_smaller_batches_after_a_lack_of_memory(tmp_path: Path) -> None:
    """Trainer begins again in the same train(), with the same model."""

    class Lacking(OrderedTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            sizes.append(len(inputs["labels"]))
            if sizes[-1] > 2:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return super().training_step(model, inputs, *args, **kwargs)

    sizes: list[int] = []
    found = trainer_of("gpt2", tmp_path, kind=Lacking, auto_find_batch_size=True, per_device_train_batch_size=4)
    found.train()
    wanted = trainer_of("gpt2", tmp_path, per_device_train_batch_size=sizes[-2])
    wanted.train()
    assert sizes[0] == 4
    assert orders(found) == orders(wanted)


def test_each_trial_of_a_search_has_a_model_and_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As optuna runs them, without optuna: other rates and batches, checkpoints in other folders, one that breaks."""
    tried = [{"learning_rate": 0.1}, {"learning_rate": 0.01}, {"learning_rate": 0.1, "per_device_train_batch_size": 3}]
    found, models = [], []

    def run(backend: Any, trainer: Any, n_trials: int, direction: str) -> None:
        for number in range(n_trials):
            if number == 1:
                trainer.add_callback(broken)
                with pytest.raises(RuntimeError, match="broken"):
                    trainer.train(trial=SimpleNamespace(number=number, params=tried[number]))
                trainer.remove_callback(broken)
            else:
                trainer.train(trial=SimpleNamespace(number=number, params=tried[number]))
            found.append((trainer.order, weights(trainer)))
            models.append(trainer.model)

    backend: Any = transformers.hyperparameter_search.OptunaBackend
    monkeypatch.setattr(backend, "is_available", lambda _: True)
    monkeypatch.setattr(backend, "run", run)
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)
    broken, saved = _broken_at(2), {"save_strategy": "steps", "save_steps": 1}
    trainer_of("gpt2", tmp_path, anew=True, **saved).hyperparameter_search(
        lambda trial: trial.params, n_trials=len(tried), backend="optuna"
    )
    assert len(set(map(id, models))) == len({id(order) for order, _ in found}) == len(tried)
    assert all(hooks(model) == hooks(gpt2()) for model in models)
    for number in (0, 2):
        alone = trainer_of("gpt2", tmp_path / "alone", **tried[number])
        alone.train()
        order, ended = found[number]
        assert [order.history(epoch).tolist() for epoch in range(EPOCHS)] == orders(alone)
        assert torch.equal(ended, weights(alone))
        rest = trainer_of("gpt2", tmp_path / "rest", **tried[number])
        rest.train(resume_from_checkpoint=str(tmp_path / f"run-{number}" / "checkpoint-2"))
        assert orders(rest) == orders(alone)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_refused(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    with pytest.raises(ArgumentError, match=r"order=3.*order=GraB"):
        trainer_of("gpt2", tmp_path, 3)
    with pytest.raises(ArgumentError, match=r"order=<class .*RandomSampler.*expected an order class"):
        trainer_of("gpt2", tmp_path, torch.utils.data.RandomSampler)
    with pytest.raises(ArgumentError, match=r"order= that takes \(n\).*order=lambda model, n: RandomReshuffling\(n\)"):
        trainer_of("gpt2", tmp_path, lambda n: RandomReshuffling(n)).train()
    with pytest.raises(ArgumentError, match="expected an order of the dataset's 9 examples"):
        trainer_of("gpt2", tmp_path, lambda model, n: GraB(model, n + 1)).train()
    with pytest.raises(InputError, match="train_sampling_strategy='group_by_length' with order="):
        trainer_of("gpt2", tmp_path, train_sampling_strategy="group_by_length").train()
    trainer = trainer_of("gpt2", tmp_path, max_steps=2)
    trainer.train_dataset = Stream()
    with pytest.raises(InputError, match="an iterable train_dataset"):
        trainer.train()
    plain = trainer_of("gpt2", tmp_path / "plain", None, Trainer, save_strategy="steps", save_steps=1, max_steps=2)
    plain.train()
    with pytest.raises(StateError, match="checkpoint-1 without a saved order"):
        trainer_of("gpt2", tmp_path / "plain").train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-1"))


def test_an_ordinary_trainer_that_resumes_with_our_sampler(tmp_path: Path) -> None:
    """It draws batches and throws them away."""

    class WithSampler(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return RandomReshuffling(N).sampler

    first = trainer_of("gpt2", tmp_path, None, WithSampler, save_strategy="steps", save_steps=1, max_steps=2)
    first.train()
    with pytest.raises(StateError, match=r"a SkipBatchSampler around.*draws 1 batches.*OrderedTrainer"):
        trainer_of("gpt2", tmp_path, None, WithSampler).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
