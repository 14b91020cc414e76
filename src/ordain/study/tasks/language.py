"""An LSTM language model on WikiText-2 (the paper's third task)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ordain.errors import InputError
from ordain.study.data import Splits
from ordain.study.tasks.classification import classifier
from ordain.study.tasks.task import LoadedTask, seeded

LENGTH = 35  # the paper's bptt
_WIDTH, _LAYERS = 32, 2
_CHUNK = 4  # one sequence's logits are 35 x 33,278 numbers: more than fit in the cache take twice as long


class LanguageModel(nn.Module):
    """Embedding, LSTM, decoder. Each sequence starts with a zero state, so gradients do not depend on the order."""

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


def lstm_on_wikitext2(splits: Splits, *, limit: int | None) -> LoadedTask:
    """An example is a sequence of 35 words."""
    notes = (
        f"An example is a sequence of {LENGTH} words; the hidden state starts anew for each.",
        "Accuracy is that of the next word.",
    )
    return classifier(
        splits,
        seeded(partial(LanguageModel, len(splits.vocabulary or ()))),
        encode=lambda part: sequences(part.x),
        loss=lambda logits, y: nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()),
        limit=limit,
        chunk=_CHUNK,
        notes=notes,
    )
