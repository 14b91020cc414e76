"""Every task by name. Reading data and building models is imported when a task is loaded."""

from __future__ import annotations

from ordain.study.tasks.images import lenet_on_cifar10
from ordain.study.tasks.language import lstm_on_wikitext2
from ordain.study.tasks.sentences import bert_on
from ordain.study.tasks.tables import logistic_regression, standardise
from ordain.study.tasks.task import Defaults, Task

__all__ = ["TASKS"]

_MNIST = Defaults(batch_size=64, rates=(0.1, 0.01, 0.001, 0.0001), epochs=100)  # the paper's appendix
_GLUE = (0.005, 0.001, 0.0005, 0.0001)  # the paper's rates
_TABLE = Defaults(batch_size=64, rates=(0.1, 0.01, 0.001), epochs=30)
_LOGISTIC = "logistic regression"
_BERT_TINY = 4_386_178

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "digits",
            "Logistic regression on digits",
            "digits",
            _LOGISTIC,
            1_294,
            650,
            0.03,
            Defaults(batch_size=32, rates=(0.3, 0.1, 0.03), epochs=30),
            logistic_regression("digits"),
        ),
        Task(
            "mnist",
            "Logistic regression on MNIST",
            "mnist",
            _LOGISTIC,
            54_000,
            7_850,
            0.5,
            _MNIST,
            logistic_regression("mnist"),
        ),
        Task(
            "fashion-mnist",
            "Logistic regression on Fashion-MNIST",
            "fashion-mnist",
            _LOGISTIC,
            54_000,
            7_850,
            0.5,
            _MNIST,
            logistic_regression("fashion-mnist"),
        ),
        Task(
            "cifar10",
            "LeNet on CIFAR-10",
            "cifar10",
            "LeNet, convolutions 6/16/120",
            45_000,
            62_006,
            27,
            Defaults(batch_size=16, rates=(0.1, 0.01, 0.001, 0.0001), epochs=100),
            lenet_on_cifar10,
        ),
        Task(
            "wikitext2",
            "LSTM on WikiText-2",
            "wikitext2",
            "LSTM, 2 layers, 32 wide",
            59_675,
            2_179_966,
            1400,
            # Rate and schedule are the paper's; batches of 20, the norm of 0.25 and no weight decay are those of the
            # word_language_model in pytorch/examples, which the paper refers to.
            Defaults(batch_size=20, rates=(5.0,), epochs=40, weight_decay=0.0, plateau=True, clip=0.25),
            lstm_on_wikitext2,
        ),
        Task(
            "sst2",
            "BERT-Tiny's shape on SST-2",
            "sst2",
            "BERT, 2 layers, 128 wide",
            60_615,
            _BERT_TINY,
            1500,
            Defaults(batch_size=1, rates=_GLUE, epochs=10, weight_decay=0.01),
            bert_on("sst2"),
            takes_weights=True,
        ),
        Task(
            "qnli",
            "BERT-Tiny's shape on QNLI",
            "qnli",
            "BERT, 2 layers, 128 wide",
            4_371,
            _BERT_TINY,
            60,
            Defaults(batch_size=2, rates=_GLUE, epochs=10, weight_decay=0.01),
            bert_on("qnli"),
            takes_weights=True,
        ),
        Task(
            "a9a",
            "Logistic regression on a9a",
            "a9a",
            _LOGISTIC,
            29_305,
            248,
            0.25,
            _TABLE,
            logistic_regression("a9a"),
        ),
        Task(
            "w8a",
            "Logistic regression on w8a",
            "w8a",
            _LOGISTIC,
            39_801,
            602,
            0.3,
            _TABLE,
            logistic_regression("w8a"),
        ),
        Task(
            "mushrooms",
            "Logistic regression on mushrooms",
            "mushrooms",
            _LOGISTIC,
            6_500,
            226,
            0.1,
            _TABLE,
            logistic_regression("mushrooms"),
        ),
        Task(
            "covtype",
            "Logistic regression on Covertype",
            "covtype",
            _LOGISTIC,
            464_810,
            385,
            3,
            _TABLE,
            logistic_regression(
                "covtype",
                scale=standardise,
                notes=("All seven classes; features standardised by the training examples' mean and deviation.",),
            ),
        ),
    )
}
