"""All tasks by name. Data is read and models are built when a task is loaded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ordain.study.tasks.bert import bert
from ordain.study.tasks.classification import logistic_regression, standardise
from ordain.study.tasks.images import on_cifar10, resnet
from ordain.study.tasks.language import gpt, lstm
from ordain.study.tasks.task import Defaults, Task

_RATES = (0.1, 0.01, 0.001, 0.0001)  # the paper's
_MNIST = Defaults(batch_size=64, rates=_RATES, epochs=100)  # the paper's appendix
_TABLE = Defaults(batch_size=64, rates=(0.1, 0.01, 0.001), epochs=30)
_DIGITS = Defaults(batch_size=32, rates=(0.3, 0.1, 0.03), epochs=30)
_LENET = Defaults(batch_size=16, rates=_RATES, epochs=100)
_GPT = Defaults(batch_size=16, rates=(0.003, 0.001, 0.0003), epochs=6, weight_decay=0.01)
# Rate and schedule are the paper's; the batch size, the norm of 0.25 and no weight decay are those of the
# word_language_model in pytorch/examples, which the paper refers to.
_LSTM = Defaults(batch_size=20, rates=(5.0,), epochs=40, weight_decay=0.0, plateau=True, clip=0.25)
_COVTYPE_NOTE = "All seven classes; features standardised by the training examples' mean and deviation."
_MODELS = {
    "lenet": "LeNet, convolutions 6/16/120",
    "resnet": "ResNet, 3 blocks, batch normalisation",
    "lstm": "LSTM, 2 layers, 32 wide",
    "gpt": "GPT, 2 layers, 64 wide",
    "bert": "BERT, 2 layers, 128 wide",
}
_AUGMENTED = partial(on_cifar10, augmented=True)


def _logistic(
    name: str, on: str, examples: int, parameters: int, seconds: float, defaults: Defaults = _TABLE, **options: Any
) -> Task:
    title, make = f"Logistic regression on {on}", partial(logistic_regression, **options)
    return Task(name, title, name, "logistic regression", examples, parameters, seconds, defaults, make)


def _bert(name: str, on: str, examples: int, seconds: float, *, batch_size: int) -> Task:
    defaults = Defaults(batch_size=batch_size, rates=(0.005, 0.001, 0.0005, 0.0001), epochs=10, weight_decay=0.01)
    title = f"Small BERT on {on}"
    return Task(name, title, name, _MODELS["bert"], examples, 4_386_178, seconds, defaults, bert, takes_weights=True)


# Name, title, data, model, examples, parameters, seconds of an epoch, defaults, make.
_CIFAR10 = Task("cifar10", "LeNet on CIFAR-10", "cifar10", _MODELS["lenet"], 45_000, 62_006, 27, _LENET, on_cifar10)
_RESNET = replace(
    _CIFAR10,
    name="cifar10-resnet",
    title="ResNet on augmented CIFAR-10",
    model=_MODELS["resnet"],
    parameters=121_450,
    seconds_per_epoch=45,
    defaults=Defaults(batch_size=64, rates=(0.1, 0.03, 0.01), epochs=30),
    make=partial(_AUGMENTED, model=resnet),
)
_SST2 = _bert("sst2", "SST-2", 60_615, 1500, batch_size=1)
_HEAD = replace(
    _SST2,
    name="sst2-head",
    title="Small BERT on SST-2, head only",
    model="the classifier of that BERT",
    parameters=258,
    seconds_per_epoch=500,
    defaults=replace(_SST2.defaults, rates=(0.03, 0.01, 0.003)),
    make=partial(bert, trained="head"),
)
_LORA = replace(
    _HEAD,
    name="sst2-lora",
    title="Small BERT on SST-2, LoRA",
    model="LoRA on that BERT",
    parameters=8_450,
    seconds_per_epoch=900,
    make=partial(bert, trained="lora"),
)
_TASKS = (
    _logistic("digits", "digits", 1_294, 650, 0.03, _DIGITS),
    _logistic("mnist", "MNIST", 54_000, 7_850, 0.5, _MNIST),
    _logistic("fashion-mnist", "Fashion-MNIST", 54_000, 7_850, 0.5, _MNIST),
    _CIFAR10,
    replace(_CIFAR10, name="cifar10-augmented", title="LeNet on augmented CIFAR-10", make=_AUGMENTED),
    _RESNET,
    Task("wikitext2", "LSTM on WikiText-2", "wikitext2", _MODELS["lstm"], 59_675, 2_179_966, 1400, _LSTM, lstm),
    Task("gpt", "GPT on the characters of WikiText-2", "wikitext2", _MODELS["gpt"], 168_444, 120_704, 250, _GPT, gpt),
    _SST2,
    _HEAD,
    _LORA,
    _bert("qnli", "QNLI", 4_371, 60, batch_size=2),
    _logistic("a9a", "a9a", 29_305, 248, 0.25),
    _logistic("w8a", "w8a", 39_801, 602, 0.3),
    _logistic("mushrooms", "mushrooms", 6_500, 226, 0.1),
    _logistic("covtype", "Covertype", 464_810, 385, 3, scale=standardise, notes=(_COVTYPE_NOTE,)),
)
TASKS: dict[str, Task] = {task.name: task for task in _TASKS}
