"""One family of errors. Every message says what came, what was expected, and what to do."""

from __future__ import annotations


class OrdainError(Exception):
    """Base of all errors that ordain raises on purpose.

    >>> print(InputError("n = 0", expected="at least one example", remedy="Pass len(dataset)."))
    got n = 0; expected at least one example. Pass len(dataset).
    """

    def __init__(self, came: str, *, expected: str, remedy: str) -> None:
        super().__init__(f"got {came}; expected {expected}. {remedy}")
        self.came = came


class InputError(OrdainError, ValueError):
    """An argument that cannot be used: a wrong n, a broken permutation, vectors of a wrong shape."""


class ArgumentError(InputError, TypeError):
    """An option that there is not, or an order in the place of its sampler."""


class GradientError(OrdainError, ValueError):
    """Gradients that cannot be used: another length, no batch dimension, mixed batch sizes."""


class StepError(OrdainError, RuntimeError):
    """A call out of turn: a step without a backward, more examples observed than drawn."""


class MemoryLimitError(OrdainError, MemoryError):
    """An order that would store more than the limit the user has set."""


class StateError(OrdainError, ValueError):
    """A saved state that does not belong to this order."""


class RanksError(OrdainError, RuntimeError):
    """Ranks that do not agree, or one that no longer answers."""


class UnsupportedModuleError(OrdainError, TypeError):
    """A module whose examples have no gradient of their own, or none that ordain can find."""


class BalancingFailedError(OrdainError, RuntimeError):
    """The self-balancing walk (Alg. 6) left its bound c."""


class FetchError(OrdainError, RuntimeError):
    """Data that could not be had from their publisher: no network, another file than it should be, a full disk."""


class MissingPackageError(OrdainError, ImportError):
    """A framework that is not installed."""


class OrdainWarning(UserWarning):
    """Something that does not stop training but that the user should know."""
