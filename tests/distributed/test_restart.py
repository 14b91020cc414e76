"""A rank dies, torchrun starts all of them again, and the run ends as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import gradient_field
from launched import launched

from ordain import FlipFlop, GraB
from ordain.distributed import stateful
from ordain.errors import StateError


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank found in a run that was killed and started again, and in runs that were not."""
    out = tmp_path_factory.mktemp("restart")
    for what, ranks in (("killed", 2), ("others", 3)):
        done = launched("restart.py", out, what, ranks=ranks, restarts=int(what == "killed"))
        assert done.returncode == 0, done.stderr[-4000:]
    assert (out / "killed.fallen").exists()
    return {
        what: [json.loads((out / f"{what}.{rank}.json").read_text()) for rank in range(ranks)]
        for what, ranks in (("killed", 2), ("others", 3))
    }


def test_restarted_after_a_death(found: dict[str, list[dict[str, Any]]]) -> None:
    """Bit for bit: rank 1 ends itself after step 7, in the middle of the second epoch; the last file is of step 6."""
    for rank in range(2):
        killed, whole = found["killed"][rank]["killed"], found["others"][rank]["whole"]
        assert (killed["began"], whole["began"]) == (6, 0)
        assert killed["orders"] == whole["orders"]
        assert killed["weights"] == whole["weights"]
        assert len({tuple(one) for one in killed["orders"]}) == 3


def test_gone_on_with_under_other_numbers_of_ranks(found: dict[str, list[dict[str, Any]]]) -> None:
    """2 ranks until step 6, then 3, then 1: with the same global batches the permutations are the same."""
    whole, one = found["others"][0]["whole"], found["others"][0]["one"]
    three = [found["others"][rank]["three"] for rank in range(3)]
    assert (three[0]["began"], one["began"]) == (6, 8)
    assert all(each == three[0] for each in three)
    assert one["orders"] == whole["orders"]
    torch.testing.assert_close(torch.tensor(one["weights"]), torch.tensor(whole["weights"]), rtol=1e-6, atol=1e-9)


def test_torch_distributed_checkpoint_of_two_ranks(found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in range(2):
        for mode, (straight, loaded) in found["others"][rank]["checkpointed"].items():
            assert loaded == straight, (rank, mode)
            assert len({tuple(one) for one in straight}) == 3


def half_done(n: int = 12) -> GraB:
    order, field = GraB(None, n), gradient_field(n, 3)
    for count in (n, n // 2):
        drawn = list(order.sampler)[:count]
        order.observe(np.stack([field(i, order.epoch) for i in drawn]))
    return order


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_torch_distributed_checkpoint_of_one_process(tmp_path: Path) -> None:
    order, other, blind = half_done(), GraB(None, 12), FlipFlop(12)
    dcp.save({"order": stateful(order), "blind": stateful(blind)}, checkpoint_id=tmp_path / "it", no_dist=True)
    dcp.load({"order": stateful(other), "blind": stateful(FlipFlop(12))}, checkpoint_id=tmp_path / "it", no_dist=True)
    assert other.resume() == order.resume() == 1
    field = gradient_field(12, 3)
    for one in (order, other):
        one.observe(np.stack([field(i, 1) for i in one.sampler]))
        next(iter(one.sampler))
    assert other.history(2).tolist() == order.history(2).tolist() != order.history(1).tolist()
    torch.testing.assert_close(other.state_dict()["vectors"], order.state_dict()["vectors"], rtol=0, atol=0)


@pytest.mark.parametrize("state", [{}, {"state": b"not a file"}, {"state": 3}])
def test_other_states_are_refused(state: dict[str, Any]) -> None:
    order = half_done()
    before = order.state_dict()
    with pytest.raises(StateError, match="cannot be read"):
        stateful(order).load_state_dict(state)
    with pytest.raises(StateError, match="n=12"):
        stateful(GraB(None, 13)).load_state_dict(stateful(order).state_dict())
    assert order.state_dict()["taken"] == before["taken"]
