"""The public names, and that importing them brings in nothing heavy or optional."""

from __future__ import annotations

import subprocess
import sys

import ordain
import ordain.gradients
import ordain.herding
import ordain.orders
import ordain.theory


def test_all_names_exist_and_are_sorted() -> None:
    for module in (ordain, ordain.orders, ordain.gradients, ordain.herding, ordain.theory):
        assert all(hasattr(module, name) for name in module.__all__)
        assert len(set(module.__all__)) == len(module.__all__)
    assert {"GraB", "RandomReshuffling", "ShuffleOnce", "FlipFlop", "WithReplacement"} <= set(ordain.__all__)
    assert {"FixedOrder", "Greedy", "Herding", "Deterministic", "SelfBalancingWalk"} <= set(ordain.__all__)


def test_the_core_imports_nothing_optional() -> None:
    optional = ["numba", "matplotlib", "sklearn", "scipy", "rich", "typer", "jinja2", "transformers", "lightning"]
    optional += ["accelerate", "pytorch_lightning", "peft", "jax"]
    code = (
        "import sys, torch, numpy; had = set(sys.modules); import ordain.integrations; "
        f"print([name for name in {optional!r} if name in sys.modules and name not in had])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert out.stdout.strip() == "[]"


def test_every_order_says_what_it_is() -> None:
    assert repr(ordain.GraB(None, 10, group=2, seed=3)) == "GraB(n=10, group=2, seed=3)"
    assert repr(ordain.FlipFlop(4)) == "FlipFlop(n=4, seed=0)"
    assert "10 examples" in repr(ordain.GraB(None, 10).sampler)
