from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Deterministic examples (no order dependence, no flakes); compiled loops may make a first example slow.
settings.register_profile(
    "ordain", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ordain")
