"""Every layer rule against the loop, in float64 to 1e-9."""

from __future__ import annotations

import pytest
import settings_conv_norm
import settings_linear
import settings_sequence
from engine import Setting, call, check, combinations

from ordain.gradients import ExactSource

SETTINGS = [*settings_linear.SETTINGS, *settings_conv_norm.SETTINGS, *settings_sequence.SETTINGS]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("setting", "size", "reduction"), combinations(SETTINGS))
def test_a_rule_is_the_loop(setting: Setting, size: int, reduction: str) -> None:
    check(setting, size, reduction)


@pytest.mark.parametrize("setting", settings_linear.SETTINGS, ids=lambda s: s.name)
def test_a_linear_layer_needs_no_graph(setting: Setting) -> None:
    """The gradients of the graph are right too, and far slower."""
    model = setting.build()
    source = ExactSource(model, batch_dim=setting.batch_dim)
    call(model, setting.inputs(5)).square().mean().backward()
    assert len(source.collect()) == 1
    assert source.from_graph == {}
    source.detach()
