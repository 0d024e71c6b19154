"""The rules that decide a row's status. No torch here: the comparison runs without it.

* `bitwise`: bytes were moved; they must be equal.
* `bound`: a closed-form bound per element (see `consistency.numerics.bound`); the worker measures its worst ratio.
* `relative`: no closed form; a device passes when its error against float64 is at most twice the error that the CPU
  makes in the same dtype, plus the final store. Calibrated on some 45 adapter methods: healthy merged weights reached
  at most 0.73 of this, healthy logits 1.5 times the CPU's error. The largest of a few errors varies by chance, so the
  tolerance is looser for tensors with few elements: see `error_factor`.
* `user`: the user's tolerance per element (see `consistency.case.tolerance`) instead of one of the two above.
* `limit`: not a tensor but a fact about a device or a process, and its limit: unexpected bytes on a device, the peak
  memory of a merge, ids beyond a vocabulary. The worker that observes it judges it.
* `peer`: there is no reference outside the devices; they are compared bitwise with the reference worker.
"""

from __future__ import annotations

import enum
import functools
import math
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # the pytest plugin needs these rules in every session, and nothing that decodes records
    from consistency.numerics.measure import Measure

UNIT_ROUNDOFF: dict[str, float] = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding to nearest: half the distance from 1 to the next number."""

HALF_SMALLEST_SUBNORMAL: dict[str, float] = {
    "float64": 0.0,  # 2**-1075 is no float64, so a float64 reference cannot resolve it either
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
    USER = "user"
    PEER = "peer"
    LIMIT = "limit"


FALSE_ALARM = 1e-9
"""How often `error_factor` may fail a healthy tensor: 1000 machines produce some 10⁹ rows in a few years."""

_MOST_SAMPLES = 2**14
"""From here on the factor would be below 2; at half as many samples it is 2.03."""


def error_factor(samples: int) -> float:
    r"""Return by how much the largest of n errors may exceed the largest of n others of the same kind; 2 at least.

    Two healthy devices round in different orders. Model their errors as independent samples of one normal distribution,
    with :math:`F(x) = \mathrm{erf}(x / \sqrt 2)` for their magnitudes. Then the largest on the one exceeds c times the
    largest on the other with probability :math:`\int n F'(x) F(x)^{n-1} (1 - F(cx)^n)\,dx`, and the
    result is the c at which that is `FALSE_ALARM`: 24 for eight samples, 3.7 for 64, 2.5 for 512. For two it is 32
    thousand: a few values carry little information. From 16 on n is rounded down to four significant bits.

    Measured on healthy kernel variants: the 2 to 4 logits of 48 tiny classifiers exceeded the CPU's error by up to 9.1
    times, activations of 64 tokens by up to 1.9 times, and by up to 3.0 times where a strong adapter makes the model
    amplify the errors of a few tokens.
    """
    n = max(1, min(samples, _MOST_SAMPLES))
    step = 1 << max(0, n.bit_length() - 4)
    return _error_factor(n // step * step)


@functools.cache
def _error_factor(n: int) -> float:
    if n >= _MOST_SAMPLES:
        return 2.0
    nodes = _nodes(n)
    low, high = math.log(2.0), math.log(1e10)
    for _ in range(22):  # to 6 of 10⁶
        middle = (low + high) / 2
        low, high = (middle, high) if _exceeds(math.exp(middle), n, nodes) > FALSE_ALARM else (low, middle)
    return math.exp(high)


def _nodes(n: int) -> list[tuple[float, float]]:
    """Return the nodes of the integral of `error_factor` and their weights; it is taken over the logarithm of x."""
    found, step = [], 0.05
    for i in range(int(math.log(1e12 * 12) / step)):
        x = 1e-12 * math.exp(i * step)
        density = n * math.sqrt(2 / math.pi) * math.exp(-x * x / 2) * math.erf(x / math.sqrt(2)) ** (n - 1)
        if density * x * step > FALSE_ALARM * 1e-7:  # all other nodes together contribute less than a thousandth of it
            found.append((x, density * x * step))
    return found


def _exceeds(c: float, n: int, nodes: list[tuple[float, float]]) -> float:
    """Return the probability in `error_factor`, by the trapezoidal rule."""
    total = 0.0
    for x, weight in nodes:
        total -= weight * math.expm1(n * math.log1p(-min(math.erfc(c * x / math.sqrt(2)), 1 - 2**-53)))
    return total


def relative_allowance(reference_error: float, magnitude: float, dtype: str, *, samples: int = _MOST_SAMPLES) -> float:
    """Return the tolerance of a tensor by the `relative` rule, in its own unit.

    Parameters
    ----------
    reference_error : float
        Largest error of the CPU against float64 in this tensor and dtype.
    magnitude : float
        Largest magnitude of the exact tensor.
    samples : int
        Number of independent errors of which the CPU's is the largest.
    """
    return error_factor(samples) * reference_error + UNIT_ROUNDOFF[dtype] * magnitude + HALF_SMALLEST_SUBNORMAL[dtype]


class Verdict(NamedTuple):
    """The verdict of the `relative` rule on an error; `ratio` is the error over `allowed`."""

    ratio: float
    allowed: float
    status: Literal["equal", "within", "outside"]


def judge_relative(found: Measure, dtype: str, *, reference_error: float, samples: int) -> Verdict:
    """Judge a tensor's largest error against float64 by the CPU's own; see `relative_allowance`."""
    allowed = relative_allowance(reference_error, float(found.magnitude), dtype, samples=samples)
    share = ratio(float(found.max_abs), allowed)
    if share == 0 and found.mismatched == 0:
        return Verdict(share, allowed, "equal")
    return Verdict(share, allowed, "within" if passes(share) else "outside")


def ratio(error: float, allowed: float) -> float:
    """Return error over tolerance: 0 if there is no error, NaN if the error is NaN."""
    if error == 0:
        return 0.0
    return error / allowed if allowed else math.inf


def passes(bound_ratio: float) -> bool:
    """Return whether a ratio is within tolerance; NaN is not."""
    return bound_ratio <= 1.0
