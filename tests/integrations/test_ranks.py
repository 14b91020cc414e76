"""Every framework on 1, 2 and 3 processes: what each epoch visits, the orders and the weights are those of one loop."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import launched

for package in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from workers.frameworks import EPOCHS, GLOBAL, N, by_hand, language  # noqa: E402

from ordain.distributed.rank_view import dealt  # noqa: E402

one_loop = cache(by_hand)

TRAINED = [
    "by hand",
    *(f"{name}{how}" for name in ("accelerate", "trainer", "lightning") for how in ("", ", accumulated")),
]
RESUMED = ["accelerate, resumed", "trainer, resumed", "lightning, resumed"]
UNEVEN = ["accelerate, n = 22", "trainer, n = 22", "lightning, n = 22"]


@pytest.fixture(scope="module", params=[1, 2, 3])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by scenario."""
    out = tmp_path_factory.mktemp(f"{request.param} ranks")
    done = launched("frameworks.py", out, ranks=request.param)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((Path(out) / f"{rank}.json").read_text()) for rank in range(request.param)]


def same_weights(one: list[float], other: list[float], dtype: torch.dtype = torch.float64) -> None:
    """Up to the rounding of ``dtype``: ranks and accumulated batches are added up in another order than one batch."""
    weights = (torch.tensor(several, dtype=torch.float64) for several in (one, other))  # all below 1
    torch.testing.assert_close(*weights, rtol=0, atol=10 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", TRAINED)
def test_orders_and_weights_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    expected, ranks = one_loop(1), len(found)
    assert len({tuple(order) for order in expected["orders"]}) == EPOCHS
    for rank, one in enumerate(found):
        assert one[name]["orders"] == expected["orders"]
        same_weights(one[name]["weights"], expected["weights"])
        visited = [index for order in expected["orders"] for index in order[rank::ranks]]
        assert one[name]["seen"] == visited
        assert one[name].get("calls", 0) in (0, EPOCHS * N // GLOBAL * (2 if "accumulated" in name else 1))


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_in_mid_epoch(found: list[dict[str, Any]], name: str) -> None:
    """After one of the second epoch's two steps."""
    expected, ranks = one_loop(1), len(found)
    for rank, one in enumerate(found):
        assert one[name]["orders"] == expected["orders"]
        same_weights(one[name]["weights"], expected["weights"])
        visited = expected["orders"][1][GLOBAL:][rank::ranks] + expected["orders"][2][rank::ranks]
        assert one[name]["seen"] == visited


@pytest.mark.parametrize("name", UNEVEN)
def test_when_n_is_not_divisible(found: list[dict[str, Any]], name: str) -> None:
    """Some examples are visited twice if ranks need as many each, and none is left out."""
    ranks = len(found)
    for rank, one in enumerate(found):
        assert one[name]["orders"] == found[0][name]["orders"]
        places = dealt(22, ranks=ranks, rank=rank) % 22
        assert one[name]["seen"] == [order[place] for order in one[name]["orders"] for place in places]
    for epoch in range(EPOCHS):
        each = -(-22 // ranks)
        seen = [index for one in found for index in one[name]["seen"][epoch * each : (epoch + 1) * each]]
        assert set(seen) == set(range(22))
        assert len(seen) == each * ranks


@pytest.mark.filterwarnings("ignore")
def test_losses_over_all_labels_of_a_step(found: list[dict[str, Any]], tmp_path: Path) -> None:
    expected = language(tmp_path, 1)
    assert len({tuple(order) for order in expected["orders"]}) == EPOCHS
    for one in found:
        for name in ("language", "language, accumulated"):
            assert one[name]["orders"] == expected["orders"]
            # Llama's norms, its softmax and its loss are in float32, whatever its weights are in.
            same_weights(one[name]["weights"], expected["weights"], torch.float32)


def test_independent_ranks_keep_and_resume_their_own(found: list[dict[str, Any]]) -> None:
    shards = [one["independent"]["orders"] for one in found]
    assert sorted(index for shard in shards for index in shard[0]) == list(range(N))
    for one, shard in zip(found, shards, strict=True):
        assert one["independent"]["seen"] == [index for order in shard for index in order]
        assert one["independent, resumed"]["orders"] == shard
        assert one["independent, resumed"]["weights"] == one["independent"]["weights"]


def test_loaders_that_would_be_sharded_again(found: list[dict[str, Any]]) -> None:
    attempts = {name for name in found[0] if name.startswith("sharded again")}
    assert len(attempts) == (8 if len(found) > 1 else 0)
    for name in attempts:
        for rank, one in enumerate(found):
            if "dispatch" in name:
                assert rank or one[name].startswith("InputError: got a DataLoaderDispatcher")
            else:
                assert one[name].startswith("InputError: got a BatchSamplerShard around order.sampler")
                assert "ordain.integrations.accelerate.prepare(accelerator, order, loader)" in one[name]
    if len(found) > 1:
        assert all("OrderedTrainer" in one["trainer, plain"] for one in found)


def test_a_loader_without_the_order(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["lightning, no order"].startswith("InputError: got no order in OrderCallback()")
        assert "setup() of the LightningModule" in one["lightning, no order"]
