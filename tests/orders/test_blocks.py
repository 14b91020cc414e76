"""Data that is read in blocks: units of neighbouring examples, and shards of any length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import gradient_field
from thread_ranks import ThreadRanks, run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ordain import FlipFlop, GraB, Herding, RandomReshuffling, ShuffleOnce, reference
from ordain.distributed import Distributed
from ordain.errors import InputError, StateError

CONTEXT, GROUP, BLOCKS, WORDS = 4, 3, 11, 7
N = GROUP * BLOCKS


def write(folder: Path) -> Path:
    path = folder / "train.bin"
    tokens = np.random.default_rng(0).integers(0, WORDS, N * CONTEXT + 3).astype(np.uint16)
    tokens.tofile(path)
    return path


class Tokens(Dataset[Tensor]):
    """As in examples/token_blocks.py; refuses to read anything but neighbours."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        assert indices == list(range(indices[0], indices[0] + len(indices)))
        tokens = np.memmap(self.path, dtype=np.uint16, mode="r")
        block = tokens[indices[0] * CONTEXT : (indices[-1] + 1) * CONTEXT + 1].astype(np.int64)
        return list(torch.from_numpy(block).unfold(0, CONTEXT + 1, CONTEXT))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 5), nn.Tanh(), nn.Linear(5, WORDS)).double()


def loss_of(one: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(one(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def blocks_in(order: list[int]) -> list[int]:
    """The blocks of an order that visits each of them from its first example to its last."""
    blocks = np.array(order).reshape(-1, GROUP)
    assert (blocks == blocks[:, :1] + np.arange(GROUP)).all()
    return (blocks[:, 0] // GROUP).tolist()


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("gradients", ["exact", "microbatch"])
@pytest.mark.parametrize("workers", [0, 2])
def test_blocks_are_ordered_by_their_mean_gradients(
    tmp_path: Path, centering: Any, gradients: str, workers: int
) -> None:
    data, (one, twin) = Tokens(write(tmp_path)), (model(), model())
    order = GraB(one, data, group=GROUP, contiguous=True, centering=centering, gradients=gradients)
    loader = DataLoader(data, batch_size=GROUP, sampler=order.sampler, num_workers=workers)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (one, twin)]
    kind: Any = reference.GraB if centering == "mean" else reference.PairGraB
    book = kind(blocks_in(order.history(0).tolist()), sum(p.numel() for p in twin.parameters()))
    for epoch in range(3):
        assert blocks_in(order.history(epoch).tolist()) == book.sigma
        for batch in loader:
            grads = [torch.autograd.grad(loss_of(twin, row[None]), list(twin.parameters())) for row in batch]
            rows = torch.stack([torch.cat([g.flatten() for g in row]) for row in grads])
            book.see(rows.mean(0).numpy())
            for each in (one, twin):
                loss_of(each, batch).backward()
            order.step()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        next(iter(order.sampler))
        book.next_order()
    assert blocks_in(order.history(3).tolist()) == book.sigma


@pytest.mark.parametrize("kind", [RandomReshuffling, ShuffleOnce, FlipFlop])
def test_orders_without_gradients_keep_blocks_together_too(kind: Any) -> None:
    order = kind(N, group=GROUP, contiguous=True, seed=3)
    visited = [blocks_in(order.history(epoch).tolist()) for epoch in range(3)]
    assert all(sorted(one) == list(range(BLOCKS)) for one in visited)
    assert visited[0] == blocks_in(GraB(None, N, group=GROUP, contiguous=True, seed=3).history(0).tolist())
    assert visited[0] != list(range(BLOCKS))
    assert kind is ShuffleOnce or visited[0] != visited[1]


def test_a_shorter_last_block_stays_together() -> None:
    n, field = N - 1, gradient_field(N, 4)
    for kind in (GraB, Herding):
        order = kind(None, n, group=GROUP, contiguous=True)
        assert order.history(0)[-2:].tolist() == [n - 2, n - 1]
        for _ in range(2):
            visited = list(order.sampler)
            order.observe(torch.from_numpy(np.stack([field(i, 0) for i in visited])))
        visited = list(order.sampler)
        assert sorted(visited) == list(range(n))
        for block in range(BLOCKS):
            members = [i for i in range(block * GROUP, (block + 1) * GROUP) if i < n]
            at = visited.index(members[0])
            assert visited[at : at + len(members)] == members


def test_of_single_examples_nothing_changes() -> None:
    assert GraB(None, 20, contiguous=True).history(0).tolist() == GraB(None, 20).history(0).tolist()


def a_rank(ranks: ThreadRanks | None, size: int, group: int) -> list[list[int]]:
    """Three epochs in batches of ``size``, from gradients that are given."""
    rule: Any = False if ranks is None else Distributed(ranks=ranks)
    order, field = GraB(None, N, group=group, contiguous=True, distributed=rule), gradient_field(N, 3)
    for epoch in range(3):
        mine = list(order.sampler)
        for start in range(0, len(mine), size):
            order.observe(np.stack([field(i, epoch) for i in mine[start : start + size]]))
    next(iter(order.sampler))
    return [order.history(epoch).tolist() for epoch in range(4)]


def test_ranks_have_the_order_of_one_process() -> None:
    expected = a_rank(None, 6, GROUP)
    assert all(found == expected for found in run_ranks(2, lambda ranks: a_rank(ranks, 3, GROUP)))
    assert len({tuple(one) for one in map(blocks_in, expected)}) > 2


def test_ranks_with_shards_of_their_own_are_refused() -> None:
    def build(ranks: ThreadRanks) -> None:
        rule = Distributed(ranks=ranks, mode="independent")
        with pytest.raises(InputError, match="contiguous=True with distributed='independent'"):
            GraB(None, N, group=GROUP, contiguous=True, distributed=rule)

    run_ranks(2, build)


def test_a_state_belongs_to_its_units() -> None:
    blocks, scattered = GraB(None, N, group=GROUP, contiguous=True), GraB(None, N, group=GROUP)
    for one, other in ((blocks, scattered), (scattered, blocks)):
        with pytest.raises(StateError, match="contiguous"):
            one.load_state_dict(other.state_dict())
    blocks.load_state_dict(blocks.state_dict())


class Shards(IterableDataset[tuple[int, Tensor]]):
    """Shards of different lengths, each read from its beginning; batches say of which shard they are."""

    lengths = (5, 2, 7, 3, 4, 6)

    def __init__(self) -> None:
        self.visited: list[int] = []

    def __iter__(self) -> Any:
        for shard in self.visited:
            rows = torch.randn(self.lengths[shard], 3, generator=torch.Generator().manual_seed(shard)).double()
            yield from ((shard, batch) for batch in rows.split(2))


@pytest.mark.parametrize("workers", [0, 1])
def test_shards_that_are_streamed(workers: int) -> None:
    """What docs/orders.md shows, in place of a loop over examples."""
    shards, torch_model = Shards(), nn.Linear(3, 1).double()
    parameters, optimizer = list(torch_model.parameters()), torch.optim.SGD(torch_model.parameters(), lr=0.01)
    order = GraB(None, len(shards.lengths), centering="pair")
    book = reference.PairGraB(order.history(0).tolist(), 4)
    for _ in range(3):
        shards.visited = list(order.sampler)
        assert shards.visited == book.sigma
        sums = {shard: torch.zeros(4, dtype=torch.float64) for shard in shards.visited}
        expected = {shard: np.zeros(4) for shard in shards.visited}
        for shard, x in DataLoader(shards, batch_size=None, num_workers=workers):
            residual = (torch_model(x) - 1).detach()  # by hand, of the squared loss
            gradient = 2 * torch.cat([(residual * x).sum(0), residual.sum(0)])
            expected[shard] += gradient.numpy() / shards.lengths[shard]
            (torch_model(x) - 1).square().sum().backward()
            sums[shard] += torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        for shard, total in sums.items():
            order.observe((total / shards.lengths[shard])[None])  # in the order visited
            book.see(expected[shard])
        next(iter(order.sampler))
        book.next_order()
    assert order.history(3).tolist() == book.sigma
