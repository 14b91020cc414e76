"""Every layer rule against the loop, in float64 to 1e-9."""

from __future__ import annotations

import pytest
import settings_conv_norm
import settings_linear
import settings_sequence
from engine import Setting, check

SETTINGS = [*settings_linear.SETTINGS, *settings_conv_norm.SETTINGS, *settings_sequence.SETTINGS]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("setting", "size"), [pytest.param(s, size, id=f"{s.name}-{size}") for s in SETTINGS for size in s.sizes]
)
def test_a_rule_is_the_loop(setting: Setting, size: int, reduction: str) -> None:
    check(setting, size, reduction)
