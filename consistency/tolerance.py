"""WHAT IS ALLOWED: the rules that decide a row's status. No torch here: the comparison runs without it.

* `bitwise`: bytes were moved; nothing may differ.
* `bound`: a closed-form bound per element (see `consistency.numerics.bound`); a worker measures its worst ratio.
* `relative`: no closed form; a device passes when its error against float64 is at most twice the error that the CPU
  makes in the same dtype, plus the final store. Calibrated on some 45 adapter methods: healthy merged weights reached
  at most 0.73 of this, healthy logits 1.5 times the CPU's error.
* `peer`: there is no reference outside the devices; they are held against the reference worker, bit by bit.
"""

from __future__ import annotations

import enum
import math

UNIT_ROUNDOFF: dict[str, float] = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
"""Largest relative error of one rounding to nearest: half the distance from 1 to the next number."""

HALF_SMALLEST_SUBNORMAL: dict[str, float] = {
    "float64": 0.0,  # 2**-1075 is no float64; a float64 reference cannot see it either
    "float32": 2.0**-150,
    "float16": 2.0**-25,
    "bfloat16": 2.0**-134,
}
"""Largest absolute error of one rounding to nearest where the result is subnormal."""


class Rule(enum.StrEnum):
    """How a tensor is judged."""

    BITWISE = "bitwise"
    BOUND = "bound"
    RELATIVE = "relative"
    PEER = "peer"


def relative_allowance(reference_error: float, magnitude: float, dtype: str) -> float:
    """Return what a tensor may be off at most, in its own unit, by the `relative` rule.

    Parameters
    ----------
    reference_error : float
        Largest error of the CPU against float64 in this tensor and dtype.
    magnitude : float
        Largest magnitude of the exact tensor.
    dtype : str
    """
    return 2 * reference_error + UNIT_ROUNDOFF[dtype] * magnitude + HALF_SMALLEST_SUBNORMAL[dtype]


def ratio(error: float, allowed: float) -> float:
    """Return error over allowance: 0 where nothing is off, NaN where the error is NaN."""
    if error == 0:
        return 0.0
    return error / allowed if allowed else math.inf


def passes(bound_ratio: float) -> bool:
    """Tell whether a ratio is inside its bound; NaN is not."""
    return bound_ratio <= 1.0
