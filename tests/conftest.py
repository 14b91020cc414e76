from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Deterministic examples (no order dependence, no flakes); compiled loops may make a first example slow.
settings.register_profile(
    "ordain", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
# ``make test-nightly``: other examples every time, and many.
settings.register_profile(
    "nightly", settings.get_profile("ordain"), derandomize=False, max_examples=2000, database=None
)
settings.load_profile(os.environ.get("ORDAIN_PROFILE", "ordain"))
