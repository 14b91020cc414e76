"""DistributedDataParallel over gloo: the same orders and weights as one process."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from launched import launched
from torch.utils.data import TensorDataset
from workers.ddp_exact import EPOCHS, made, optimizer_for, scenarios, train

from ordain import GraB, RandomReshuffling
from ordain.distributed.rank_view import dealt

ALL = {name: rest for name, *rest in scenarios()}
EXACT = [name for name in ALL if name.split("-")[0] not in ("independent", "rr", "rest", "join")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks found, by scenario."""
    out = tmp_path_factory.mktemp("ranks")
    done = launched("ddp_exact.py", out, ranks=4)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(4)]


def alone(name: str) -> dict[str, Any]:
    """One process that sees the same global batches in the same sequence."""
    ranks, task, options, loop = ALL[name]
    model, x, y = made(task)
    options = {key: value for key, value in options.items() if key not in ("mode", "tail")}
    n = options.pop("n", len(x))
    optimizer = optimizer_for(model, options)
    if options.get("gradients") == "microbatch":  # a row is a unit, and its weights move after `ranks` of them
        loop = loop | {"accumulate": ranks}
        units = {key: options[key] for key in ("group", "contiguous") if key in options}
        order: Any = GraB(model, n, distributed=False, **units)
        loop = {"batch": loop["batch"] * ranks}
    else:
        order = GraB(model, n, distributed=False, **options)
        loop = {"batch": loop["batch"] * ranks, "accumulate": loop.get("accumulate", 1)}
    return train(order, model, TensorDataset(x[:n], y[:n]), optimizer, **loop)


@pytest.mark.parametrize("name", EXACT)
def test_orders_and_weights_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    expected = alone(name)
    for rank in range(ALL[name][0]):
        got = found[rank][name]
        assert got["orders"] == expected["orders"]
        torch.testing.assert_close(
            torch.tensor(got["weights"]).double(), torch.tensor(expected["weights"]).double(), rtol=1e-6, atol=1e-9
        )
        assert got["sampler"]
    assert len({tuple(order) for order in expected["orders"]}) > 2


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith(("rest", "join"))])
def test_all_ranks_have_the_same_permutations(found: list[dict[str, Any]], name: str) -> None:
    ranks = ALL[name][0]
    orders = [found[rank][name]["orders"] for rank in range(ranks)]
    n = len(orders[0][0])
    assert all(one == orders[0] for one in orders)
    assert all(sorted(order) == list(range(n)) for order in orders[0])
    assert len({tuple(order) for order in orders[0]}) == EPOCHS + 1


def test_independent_ranks_keep_their_shards(found: list[dict[str, Any]]) -> None:
    for name in ("independent-mean-4", "independent-pair-4"):
        shards = [{tuple(sorted(order)) for order in found[rank][name]["orders"]} for rank in range(4)]
        assert all(len(one) == 1 for one in shards)
        assert sorted(i for one in shards for i in next(iter(one))) == list(range(48))


def test_each_rank_reads_whole_blocks(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        blocks = torch.tensor(found[rank]["blocks-2"]["mine"]).view(-1, 4)
        assert len(blocks) == 6
        assert torch.equal(blocks, blocks[:, :1] // 4 * 4 + torch.arange(4))


def test_random_reshuffling_over_ranks(found: list[dict[str, Any]]) -> None:
    order = RandomReshuffling(48, distributed=False)
    for rank in range(4):
        assert found[rank]["rr-4"]["orders"] == [order.history(epoch).tolist() for epoch in range(EPOCHS + 1)]


def test_lengths_of_uneven_shards(found: list[dict[str, Any]]) -> None:
    for name, tail in (("join-3", "uneven"), ("rest-4", "repeat")):
        ranks = ALL[name][0]
        lengths = [found[rank][name]["drawn"] for rank in range(ranks)]
        assert lengths == [len(dealt(46, ranks=ranks, rank=rank, tail=tail)) for rank in range(ranks)]


def test_traffic_is_that_of_factors(found: list[dict[str, Any]]) -> None:
    """Per step and rank: B (in + out) numbers a layer, the products of the global batch, and a short head."""
    steps = EPOCHS * 48 // 12
    sent = found[0]["exact-mean-2"]["sent"]
    factors = 6 * ((6 + 5) + (5 + 3)) * 8
    products = (12 * 13 // 2 + 2 * 12) * 8
    described = 4000  # descriptions and agreements, once
    assert sent <= steps * (factors + 4 * 16 + products + 8 * 8) + described
    assert sent >= steps * factors
