"""A model trained under an order, beside an order fed by hand with what the first should have learned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from given_source import GivenSource
from helpers import Regression, batches, is_permutation, loop_gradients, small_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ordain import GraB

N, BATCH, EPOCHS = 13, 3, 3
SOURCES: dict[str, dict[str, Any]] = {
    "exact": {},
    "func": {"gradients": "func"},
    "microbatch": {"gradients": "microbatch", "group": BATCH},
}


class Fault(Exception):
    """What a user's code raises."""


def plain_hooks(model: nn.Module) -> list[int]:
    """How many hooks of each kind there are on each module and parameter."""
    counts = [
        len(found) for module in model.modules() for name, found in sorted(vars(module).items()) if "hooks" in name
    ]
    return counts + [
        len(getattr(p, name) or ())
        for p in model.parameters()
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    ]


class Run:
    """A model trained under an order, and an order fed by hand with what the first should have learned."""

    def __init__(
        self,
        source: str = "exact",
        centering: str = "mean",
        build: Callable[[], nn.Module] = small_model,
        *,
        n: int = N,
        size: int = BATCH,
    ) -> None:
        options = SOURCES[source]
        self.n, self.size = n, size
        self.model, self.data = build(), Regression(n)
        self.before = plain_hooks(self.model)
        self.order = GraB(self.model, n, centering=centering, **options)
        self.whole_units = source == "microbatch"
        # Given whole units, it keeps the short one last, as a loader does.
        given = {"gradients": GivenSource.of(d=39, whole_units=True)} if self.whole_units else {}
        self.shadow = GraB(
            nn.Linear(1, 1) if given else None, n, centering=centering, group=options.get("group", 1), **given
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def rows(self, batch: list[int]) -> Tensor:
        """[B, d], by the loop, from a copy: those are not watched."""
        return loop_gradients(copy.deepcopy(self.model), cross_entropy, self.data.x[batch], self.data.y[batch])

    def loss(self, batch: list[int]) -> Tensor:
        return cross_entropy(self.model(self.data.x[batch]), self.data.y[batch])

    def learn(self, batch: list[int]) -> None:
        rows = self.rows(batch)
        self.loss(batch).backward()
        self.order.step()
        self.tell(rows)
        self.update()

    def tell(self, rows: Tensor) -> None:
        """Feed the shadow."""
        if not self.whole_units:
            self.shadow.observe(rows)
            return
        GivenSource.last.give(rows.mean(dim=0, keepdim=True), examples=len(rows))
        self.shadow.step()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def skip(self, batch: list[int]) -> None:
        self.optimizer.zero_grad()
        self.order.skip(len(batch))
        self.shadow.skip(len(batch))

    def epoch(self) -> Iterator[list[int]]:
        for batch, same in zip(batches(self.order, self.size), batches(self.shadow, self.size), strict=True):
            assert batch == same
            yield batch

    def check(self) -> None:
        """All invariants, and that the two orders agree."""
        one, other = list(self.order.sampler), list(self.shadow.sampler)
        assert one == other
        assert is_permutation(one, self.n)
        found, wanted = (one.state_dict()["vectors"] for one in (self.order, self.shadow))
        for name, vector in found.items():
            assert torch.isfinite(vector).all()
            torch.testing.assert_close(vector, wanted[name])
        self.order.detach()
        assert plain_hooks(self.model) == self.before
