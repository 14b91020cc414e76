"""Step sizes and bounds of the paper's Theorems 1 and 3, and estimates of the constants they need.

See docs/theory.md for what the theorems say, and where their statements and proofs differ.
"""

from ordain.theory.bounds import (
    grab_bound,
    grab_bound_pl,
    grab_proved,
    grab_proved_pl,
    grab_step,
    grab_step_pl,
    herding_bound,
    herding_bound_pl,
    herding_proved,
    herding_proved_pl,
    herding_step,
    herding_step_pl,
)
from ordain.theory.constants import Constants, lambert_w, walk_bound
from ordain.theory.estimate import estimate_constants, example_smoothness, gradient_error, smoothness

__all__ = [
    "Constants",
    "estimate_constants",
    "example_smoothness",
    "grab_bound",
    "grab_bound_pl",
    "grab_proved",
    "grab_proved_pl",
    "grab_step",
    "grab_step_pl",
    "gradient_error",
    "herding_bound",
    "herding_bound_pl",
    "herding_proved",
    "herding_proved_pl",
    "herding_step",
    "herding_step_pl",
    "lambert_w",
    "smoothness",
    "walk_bound",
]
