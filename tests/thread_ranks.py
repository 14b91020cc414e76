"""Ranks that are threads of one process: the collectives of a run without its processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ThreadRanks:
    """One of ``size`` ranks that meet at a barrier; what is gathered and added is the same everywhere."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.size = rank, size
        self.barrier, self._board = barrier, board
        self.sent = self.calls = 0

    def gather(self, tensor: Tensor) -> Tensor:
        self.sent += tensor.numel() * tensor.element_size()
        self.calls += 1
        self._board[self.rank] = tensor.clone()
        self.barrier.wait()
        every = torch.stack(self._board)
        self.barrier.wait()
        return every

    def add(self, tensor: Tensor) -> None:
        tensor.copy_(self.gather(tensor).sum(dim=0))


def run_ranks(size: int, job: Callable[[ThreadRanks], Any]) -> list[Any]:
    """``job(ranks)`` on every rank at once; what each returned. The first error of any is raised."""
    barrier, board = threading.Barrier(size, timeout=60), [None] * size
    answers: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            answers[rank] = job(ThreadRanks(rank, size, barrier, board))
        except BaseException as error:
            errors[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for _, error in sorted(errors.items()) if not isinstance(error, threading.BrokenBarrierError)]
    if real:
        raise real[0]
    return answers
