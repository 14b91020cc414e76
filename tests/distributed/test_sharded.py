"""FSDP2: parameters that are shared out over ranks; the orders are those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed.fsdp
from launched import launched

pytestmark = pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "fully_shard"), reason="this torch has no FSDP2")


def test_sharded_models(tmp_path: Path) -> None:
    done = launched("sharded.py", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    found, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert found == other
    for name in ("mlp", "block", "head"):
        assert found[name]["orders"] == found[name]["expected"]
        assert len({tuple(one) for one in found[name]["orders"]}) == 4
        assert found[name]["apart"] < 1e-12
    assert all(sorted(one) == list(range(24)) for one in found["kept whole"]["orders"])
    assert len({tuple(one) for one in found["kept whole"]["orders"]}) == 4

    assert all(sorted(one) == list(range(24)) for one in found["bfloat16"])
    assert len({tuple(one) for one in found["bfloat16"]}) == 4

    for name, said in {
        "func": "UnsupportedModuleError: got a model with sharded parameters and gradients='func'",
        "microbatch": "UnsupportedModuleError: got a model with sharded parameters and gradients='microbatch'",
        "recurrent": "UnsupportedModuleError: got FSDPLSTM at '' with sharded parameters",
        "fsdp1": "UnsupportedModuleError: got FullyShardedDataParallel; expected DistributedDataParallel",
        "sharded later": "StateError: got a model with parameters that did not exist when the order was created",
        "tensor parallel": "UnsupportedModuleError: got Linear with parameters that stay sharded while it runs",
        "not explained": "UnsupportedModuleError: got parameter 'head.weight' with a gradient that the calls",
    }.items():
        assert found[name].startswith(said), found[name]
