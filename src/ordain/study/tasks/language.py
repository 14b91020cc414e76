"""An LSTM language model on WikiText-2 (the paper's third task)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ordain.errors import InputError
from ordain.study.data import load
from ordain.study.tasks.classification import few, hits, plain_forward, split
from ordain.study.tasks.task import Problem, Request, seeded

LENGTH = 35  # the paper's bptt
_WIDTH, _LAYERS = 32, 2
_CHUNK = 4  # one sequence's logits are 35 x 33,278 numbers: more than fit in the cache take twice as long


class LanguageModel(nn.Module):
    """Embedding, LSTM, decoder. Each sequence starts with a zero state, so gradients do not depend on the order.

    Args:
        vocabulary: the number of words.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, _WIDTH)
        self.lstm = nn.LSTM(_WIDTH, _WIDTH, _LAYERS, batch_first=True)
        self.decoder = nn.Linear(_WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """``[B, T]`` word ids to ``[B, T, vocabulary]`` logits."""
        logits: Tensor = self.decoder(self.lstm(self.tokens(ids))[0])
        return logits


def sequences(words: Any) -> tuple[Tensor, Tensor]:
    """``[n, T]`` words and the words that follow them; a shorter remainder is left out.

    >>> x, y = sequences(np.arange(75))
    >>> x[:, 0].tolist(), y[:, -1].tolist()
    ([0, 35], [35, 70])
    """
    ids = torch.from_numpy(np.array(words, dtype=np.int64))
    count = (len(ids) - 1) // LENGTH
    if count < 1:
        raise InputError(
            f"a text of {len(ids)} words", expected=f"more than {LENGTH}, one sequence", remedy="Use the whole file."
        )
    return ids[: count * LENGTH].view(count, LENGTH), ids[1 : count * LENGTH + 1].view(count, LENGTH)


def lstm_on_wikitext2(request: Request) -> Problem:
    """An example is a sequence of 35 words."""
    splits = load("wikitext2", request.folder, verify=request.verify)
    if splits.valid is None or splits.test is None or splits.vocabulary is None:
        raise InputError("WikiText-2 in part", expected="train, valid and test", remedy="Fetch the missing files.")
    (x, y), valid, test = (sequences(part.x) for part in (splits.train, splits.valid, splits.test))
    rows = split(len(x), valid=False, test=False, limit=request.limit).train
    valid_rows, test_rows = (few(len(part[0]), request.limit) for part in (valid, test))
    return Problem(
        train_x=x[rows],
        train_y=y[rows],
        valid_x=valid[0][valid_rows],
        valid_y=valid[1][valid_rows],
        test_x=test[0][test_rows],
        test_y=test[1][test_rows],
        build=seeded(partial(LanguageModel, len(splits.vocabulary))),
        forward=plain_forward,
        loss=_loss,
        correct=hits,
        chunk=_CHUNK,
        notes=(
            *splits.notes,
            f"An example is a sequence of {LENGTH} words; the hidden state starts anew for each.",
            "Accuracy is that of the next word.",
        ),
    )


def _loss(logits: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
