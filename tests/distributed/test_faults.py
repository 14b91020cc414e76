"""Ranks that are lost: the others end with an error that says so, and nothing hangs."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from launched import launched

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the scenarios run in forked processes")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 found by scenario, and how the processes of both ranks ended."""
    out = tmp_path_factory.mktemp("faults")
    done = launched("faults.py", out, ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    ends = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
    names = [name for name, code in ends[0].items() if code == 0]
    said = {name: json.loads((out / f"{name}.0.json").read_text()) for name in names}
    return {"ends": ends, "said": said, "stderr": done.stderr}


@pytest.mark.parametrize(
    ("name", "end", "reason"),
    [
        ("killed", -9, "within timeout=120 s, or it has ended (rank 0 of 2: "),
        ("exited", 3, "within timeout=120 s, or it has ended (rank 0 of 2: "),
        ("raised", 1, "within timeout=120 s, or it has ended (rank 0 of 2: "),
        ("stuck", 0, "within timeout=8 s, or it has ended (rank 0 of 2: Timed out waiting 8000ms"),
    ],
)
def test_a_rank_lost_in_mid_epoch(found: dict[str, Any], name: str, end: int, reason: str) -> None:
    assert [one[name] for one in found["ends"]] == [0, end], found["stderr"][-4000:]
    answer = found["said"][name]
    assert answer["said"].startswith(f"RanksError: got no answer from another rank {reason}"), answer["said"]
    assert "Restart under torchrun from the last saved state." in answer["said"]
    assert answer["kept"], "what the order had learned before must be as it was, to be saved"
    assert answer["again"].startswith("RanksError: got a step after one that was interrupted on this rank")


def test_a_rank_that_does_not_make_the_order(found: dict[str, Any]) -> None:
    for name in ("not made", "ended before"):
        said = found["said"][name]["said"]
        assert said.startswith("RanksError: got no answer from another rank within timeout="), said
        assert "expected every rank to create the order" in said


def test_ranks_that_make_different_orders(found: dict[str, Any]) -> None:
    assert found["ends"][1]["made otherwise"] == found["ends"][1]["not a member"] == 0
    assert found["said"]["not a member"]["said"].startswith("InputError: got a group that rank 0 is not in")
    expected = "RanksError: got ranks with different seed: 0 on rank 0, 1 on rank 1"
    assert found["said"]["made otherwise"]["said"].startswith(expected)
