"""Nothing of an inspected pass is kept once its step is over."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers import Regression, batches, small_model
from torch import nn
from torch.nn.functional import cross_entropy

from ordain import GraB
from ordain.gradients.sources.inspection import Inspection


class Scaled(nn.Module):
    """A parameter that is taken from the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layers = nn.Parameter(torch.ones(5, dtype=torch.float64)), small_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.scale)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what else is alive
@pytest.mark.parametrize("params", [None, "head"])
@pytest.mark.parametrize("build", [small_model, Scaled])
def test_inspections_are_released(build: type[nn.Module], params: str | None) -> None:
    gc.collect()
    before = [one for one in gc.get_objects() if type(one) is Inspection]  # of other tests: passes that broke off
    known, (model, data) = {id(one) for one in before}, (build(), Regression(60))
    order = GraB(model, 60, params=params)
    for batch in batches(order, 4):
        cross_entropy(model(data.x[batch]), data.y[batch]).backward()
        order.step()
    kept = [one for one in gc.get_objects() if type(one) is Inspection and id(one) not in known]
    assert not any(found for one in kept for found in (*one.found, *one.uses))  # before a collection
    del kept
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Inspection and id(one) not in known]
