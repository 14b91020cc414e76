"""A batch of per-example gradients, known only through three operations.

Balancing never asks for a per-example gradient: ``gram()``, ``dot(vectors)`` and
``weighted_sum(weights)`` are enough (docs/architecture.md has the algebra), so a form that never
holds ``[B, d]`` numbers can stand in for one that does.
"""

from ordain.gradients.base import Gradients, Source
from ordain.gradients.dense import Dense, as_gradients
from ordain.gradients.exact import ExactSource
from ordain.gradients.factored import Factored
from ordain.gradients.func import FuncSource
from ordain.gradients.loop import per_example_loop
from ordain.gradients.microbatch import MicrobatchSource
from ordain.gradients.rules import Use, register_rule
from ordain.gradients.sketch import Sketch, sketch

__all__ = [
    "Dense",
    "ExactSource",
    "Factored",
    "FuncSource",
    "Gradients",
    "MicrobatchSource",
    "Sketch",
    "Source",
    "Use",
    "as_gradients",
    "per_example_loop",
    "register_rule",
    "sketch",
]
