"""A batch of per-example gradients, known only through three operations.

Orders and balancers never ask for a per-example gradient: ``gram()``, ``dot(vectors)`` and
``weighted_sum(weights)`` are enough (docs/architecture.md has the algebra), so a form that never
holds ``[B, d]`` numbers can stand in for one that does.
"""

from ordain.gradients.base import Gradients, Source
from ordain.gradients.dense import Dense, as_gradients
from ordain.gradients.func import FuncSource

__all__ = ["Dense", "FuncSource", "Gradients", "Source", "as_gradients"]
