from __future__ import annotations

import gc
import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # of NumPy too, and in the processes that tests start

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # The other one also queues a seed for each kind of device, with the formatted stack: milliseconds under pytest.
    torch.manual_seed = torch.default_generator.manual_seed

# Deterministic examples (no order dependence, no flakes); compiled loops may make a first example slow.
settings.register_profile(
    "ordain", deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
# ``make test-nightly``: other examples every time, and many.
settings.register_profile(
    "nightly", settings.get_profile("ordain"), derandomize=False, max_examples=2000, database=None
)
settings.load_profile(os.environ.get("ORDAIN_PROFILE", "ordain"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """What is not a test is not imported in search of doctests: JAX is to be loaded in processes of its own only."""
    return True if collection_path.is_file() and not collection_path.name.startswith("test_") else None


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_not_collected() -> None:
    """Frameworks and jobs begin and end with collections, most of which would go through what has been imported."""
    gc.collect()
    gc.freeze()
