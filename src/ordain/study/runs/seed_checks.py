"""Checks that all jobs of a seed start alike, and the saved order that ``"retrain"`` uses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ordain import Order, RandomReshuffling
from ordain.errors import InputError, StateError
from ordain.study.files import replacing, write_bytes
from ordain.study.runs.job import Job
from ordain.study.strict_json import validated


def check_seed(out: Path, seed: int, model: nn.Module, order: Order | None) -> None:
    """Check that all arms of a seed share the initial weights and the first epoch; otherwise raise StateError."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    path = out / "seeds" / f"seed-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = {"weights": digest.hexdigest()}
    if path.exists():
        if validated(dict[str, Any], path.read_bytes(), str(path)) != mine:
            raise StateError(
                f"other initial weights for seed {seed} than those of the arms that ran before",
                expected="the same weights, according to the digest in seeds/",
                remedy="Use the versions listed in config.json, or a new folder.",
            )
    else:
        write_bytes(path, json.dumps(mine).encode())
    if order is None:
        return
    first = RandomReshuffling(order.n, seed=seed, distributed=False).history(0)
    if not np.array_equal(order.history(0), first):
        raise StateError(
            f"{order!r}, whose first epoch is different",
            expected="the first epoch shared by all orders of a seed",
            remedy="This is a bug in that order; please report it.",
        )


def keep_order(order: Order, path: Path) -> None:
    """Save the order of the last epoch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.save(file, order.history(order.epoch).astype(np.int32))


def kept_order(job: Job, out: Path) -> NDArray[Any]:
    """Load the order that :func:`keep_order` saved for ``job``."""
    path = job.order(out)
    try:
        found: NDArray[Any] = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{path}, which is not a complete .npy file",
            expected="the order of GraB's last epoch",
            remedy=f"Delete it and {job.record(out)}; running the same command creates both again.",
        ) from error
    return found
