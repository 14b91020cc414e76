"""One step of all ranks: who has how many examples, and what they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from ordain.distributed.codec import decode, encode
from ordain.distributed.global_batch import GlobalBatch, concat
from ordain.distributed.ranks import Ranks, agreed, disagreed, failed_on, gather_texts
from ordain.errors import RanksError
from ordain.gradients import Collected
from ordain.gradients.factored import Placed

_FAILED, _STEPPED, _SKIPPED, _JOINED = range(4)


class Exchange:
    """The ranks' meeting point. Descriptions are sent once; a step costs one short message and the numbers."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._known: dict[int, str] = {}  # by digest: the same on every rank, since all hear of each at once

    def meet(
        self, collect: Callable[[], Sequence[Collected | int]] | None, stands: tuple[int, int, int]
    ) -> Iterator[Meeting]:
        """One meeting for each batch of the rank that has most.

        Args:
            collect: returns this rank's batches, and may raise: then every rank does. None: this rank has no more
                batches in this epoch and only takes part while others have.
            stands: (epoch, examples done, digest of the order), which must be the same everywhere.
        """
        error: BaseException | None = None
        batches: Sequence[Collected | int] = []
        for number in count():
            size, kind, text, data = 0, 0, "", torch.empty(0, dtype=torch.uint8)
            status = _JOINED if collect is None else _STEPPED
            try:
                if number == 0 and collect is not None:
                    batches = collect()
                mine = batches[number] if number < len(batches) else 0
                if isinstance(mine, int):
                    size, status = mine, _SKIPPED if mine else status
                elif mine.examples:
                    size, kind = mine.examples, 2 * mine.gradients.dim + (mine.gradients.dtype == torch.float64)
                    placed, scale = mine.gradients.by_parameter()
                    text, data = encode(placed, size=mine.gradients.size, scale=scale)
            except Exception as raised:  # every rank must hear of it, or wait forever
                error, status = raised, _FAILED
            more = number + 1 < len(batches)
            row = torch.tensor([status, more, size, fingerprint(text.encode()), len(data), kind, *stands])
            try:
                heads = self.ranks.gather(row)
            except RanksError as lost:
                if error is not None:  # this rank's own trouble is what the others never came to hear of
                    raise error from lost
                raise
            self._check(heads, error)
            texts = self._texts(heads[:, 3].tolist(), text)
            longest = int(heads[:, 4].max())
            every = self.ranks.gather(nn.functional.pad(data, (0, longest - len(data)))) if longest else None
            yield Meeting(self.ranks, heads, texts, every)
            stands = (stands[0], -1, stands[2])  # every rank has advanced by the same number of examples
            if not heads[:, 1].any():
                return

    def _check(self, heads: Tensor, error: BaseException | None) -> None:
        if error is not None:
            raise agreed(error)
        failed = (heads[:, 0] == _FAILED).nonzero().flatten().tolist()
        if failed:
            raise failed_on(f"rank {failed[0]}")
        kinds = {kind: rank for rank, kind in enumerate(heads[:, 5].tolist()) if kind}
        if len(kinds) > 1:
            told = (f"{kind // 2} numbers of float{32 + kind % 2 * 32} on rank {rank}" for kind, rank in kinds.items())
            raise disagreed(
                f"ranks with different gradients: {', '.join(told)}",
                expected="gradients of the same length and dtype on every rank",
                remedy="Use the same model, or the same parameters, on every rank.",
            )
        for place, what in ((6, "epoch"), (7, "number of examples done"), (8, "order")):
            values = heads[heads[:, 0] != _JOINED, place].tolist()
            if len(set(values)) > 1:
                raise disagreed(
                    f"ranks with different {what}: {values[:16]}",
                    expected=f"the same {what} on every rank at every step",
                    remedy="Load the same state on every rank, draw from order.sampler on every rank, and call "
                    "order.step() (or order.skip()) equally often on each.",
                )

    def _texts(self, wanted: list[int], text: str) -> list[str]:
        if any(one not in self._known for one in wanted):
            every = gather_texts(self.ranks, text)
            self._known |= {one: told.strip() for one, told in zip(wanted, every, strict=True)}
        return [self._known[one] for one in wanted]


@dataclass(frozen=True)
class Meeting:
    """What came of one: see :class:`Exchange`. A row of ``heads`` is what a rank said in :meth:`Exchange.meet`."""

    ranks: Ranks
    heads: Tensor
    texts: list[str]
    data: Tensor | None

    @property
    def sizes(self) -> list[int]:
        """How many examples each rank has."""
        return self.heads[:, 2].tolist()

    @property
    def skipped(self) -> list[bool]:
        """Which ranks pass theirs over."""
        return (self.heads[:, 0] == _SKIPPED).tolist()

    def batch(self, kept: Sequence[Tensor], places: Sequence[Tensor], *, device: torch.device) -> GlobalBatch:
        """All ranks' gradients.

        Args:
            kept: for each rank, which of its examples count.
            places: for each rank, which row of the whole each of those is.
            device: where the answers live.
        """
        kind = int(self.heads[:, 5].max())
        like = torch.empty(0, kind // 2, dtype=torch.float64 if kind % 2 else torch.float32, device=device)
        batches: list[Placed] = [[] for _ in kept]
        scales = [0.0] * len(kept)
        for rank, (text, rows) in enumerate(zip(self.texts, kept, strict=True)):
            if text and len(rows) and self.data is not None:
                size, scales[rank], placed = decode(text, self.data[rank])
                whole = len(rows) == size
                batches[rank] = placed if whole else [(offset, grads.select(rows)) for offset, grads in placed]
        common = max(scales)
        every = concat(batches, places, [scale / common if scale else 1.0 for scale in scales])
        total = sum(len(place) for place in places)
        most = int(self.heads[:, 4].max()) // like.element_size()  # as many numbers as a rank has sent already
        return GlobalBatch(every, ranks=self.ranks, dim=like.shape[1], size=total, scale=common, like=like, most=most)


def fingerprint(data: bytes) -> int:
    """A number of 56 bits, which fits among the others of a message."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")
