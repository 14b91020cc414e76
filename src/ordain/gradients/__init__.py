"""A batch of per-example gradients, known only through a few operations.

Balancing never asks for a per-example gradient: inner products and weighted sums are enough
(docs/architecture.md has the algebra), so a batch that never holds ``[B, d]`` numbers can stand in for one that does.
"""

from ordain.gradients.dense import Dense, as_gradients
from ordain.gradients.factored import Factored, rescaled
from ordain.gradients.one_at_a_time import per_example_loop
from ordain.gradients.param_grads import Materialized, ParamGrads
from ordain.gradients.preconditioned import preconditioned
from ordain.gradients.protocol import Collected, Gradients, Source
from ordain.gradients.rules import Use, register_rule
from ordain.gradients.sketch import Sketch, sketch
from ordain.gradients.sources import ExactSource, FuncSource, MicrobatchSource

__all__ = [
    "Collected",
    "Dense",
    "ExactSource",
    "Factored",
    "FuncSource",
    "Gradients",
    "Materialized",
    "MicrobatchSource",
    "ParamGrads",
    "Sketch",
    "Source",
    "Use",
    "as_gradients",
    "per_example_loop",
    "preconditioned",
    "register_rule",
    "rescaled",
    "sketch",
]
