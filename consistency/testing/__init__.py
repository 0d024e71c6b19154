"""Assertions that know what rounding may do: for tests of kernels, layers and models, without a tolerance by hand.

The function is computed in float64 and several times with random rounding errors on the CPU, from inputs that are
rounded once. What these passes are off by is what a healthy implementation may be off by, element by element.
"""

from consistency.devices.products import Products
from consistency.numerics.precision import Precision
from consistency.testing.options import Allow
from consistency.testing.result import ResultError
from consistency.testing.within import (
    RoundingTolerance,
    WithinRounding,
    assert_within_rounding,
    rounding_tolerance,
    within_rounding,
)

__all__ = [
    "Allow",
    "Precision",
    "Products",
    "ResultError",
    "RoundingTolerance",
    "WithinRounding",
    "assert_within_rounding",
    "rounding_tolerance",
    "within_rounding",
]
