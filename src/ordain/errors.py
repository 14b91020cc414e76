"""All errors. Every message says what was passed, what was expected, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OrdainError(Exception):
    """Base of all errors that ordain raises on purpose.

    >>> print(InputError("n = 0", expected="at least one example", remedy="Pass len(dataset)."))
    got n = 0; expected at least one example. Pass len(dataset).
    """

    def __init__(self, came: str, *, expected: str, remedy: str) -> None:
        super().__init__(f"got {came}; expected {expected}. {remedy}")
        self.came = came


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str) -> str:
    """The remedy for a misspelt word.

    >>> did_you_mean("digit", ["mnist", "digits"], otherwise="See: ordain tasks")
    "Did you mean 'digits'?"
    """
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {near[0]!r}?" if near else otherwise


class InputError(OrdainError, ValueError):
    """An invalid argument: a wrong n, a broken permutation, vectors of a wrong shape."""


class ArgumentError(InputError, TypeError):
    """An unknown option, or an order passed where its sampler was expected."""


class GradientError(OrdainError, ValueError):
    """Invalid gradients: a different length, no batch dimension, mixed batch sizes."""


class StepError(OrdainError, RuntimeError):
    """A call at the wrong time: a step without a backward, more examples observed than drawn."""


class MemoryLimitError(OrdainError, MemoryError):
    """More memory is needed than the limit allows, or than is available."""


class StateError(OrdainError, ValueError):
    """A saved state that does not belong to this order."""


class RanksError(OrdainError, RuntimeError):
    """Ranks that disagree, or a rank that no longer responds."""


class UnsupportedModuleError(OrdainError, TypeError):
    """A module whose per-example gradients do not exist or cannot be found."""


class BalancingFailedError(OrdainError, RuntimeError):
    """The self-balancing walk (Alg. 6) left its bound c."""


class FetchError(OrdainError, RuntimeError):
    """Data that could not be downloaded: no network, an unexpected file, a full disk."""


class MissingPackageError(OrdainError, ImportError):
    """A framework that is not installed."""


class OrdainWarning(UserWarning):
    """A problem that does not stop training but that you should know about."""
