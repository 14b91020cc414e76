"""Shared by all tests of the study."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def imported_modules_are_not_collected() -> Iterator[None]:
    """Every job begins with a garbage collection, most of which would go through what torch has imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
