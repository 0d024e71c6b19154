"""The rules that decide a row's status. No torch here: the comparison runs without it.

* `bitwise`: bytes were moved; they must be equal.
* `bound`: a closed-form bound per element (see `consistency.numerics.bound`); the worker measures its worst ratio.
* `relative`: no closed form; a device passes when its error against float64 is at most about twice the one that
  rounding in the same dtype makes, plus the final store. What rounding makes is measured in passes on the CPU with
  random rounding errors (`consistency.numerics.rounding_noise`), so that it depends neither on the CPU's library nor on
  its luck. The largest of a few errors varies by chance: see `error_factor`.
* `block`: no closed form; each block of a model computes on the same inputs, and its error against float64 is judged
  by rows, by elements and along the exact values, in units of what rounding makes in each element (see
  `consistency.numerics.error_spread`). The worker measures the worst ratio.
* `user`: the user's tolerance per element (see `consistency.case.tolerance`) instead of one of the two above.
* `limit`: not a tensor but a fact about a device or a process, and its limit: unexpected bytes on a device, the peak
  memory of a merge, ids beyond a vocabulary. The worker that observes it judges it.
* `peer`: there is no reference outside the devices; they are compared bitwise with the reference worker.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from consistency.numerics.real import Real

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
    BLOCK = "block"
    USER = "user"
    PEER = "peer"
    LIMIT = "limit"


FALSE_ALARM = 1e-9
"""How often `error_factor` may fail a healthy tensor: 1000 machines produce some 10⁹ rows in a few years."""

_MOST_SAMPLES = 2**14
"""Most errors that `error_factor` counts: from here on the factor is below 2."""

LEAST_FACTOR = 2.0
"""The least `error_factor`: a device whose rounding errors are not random may exceed random ones a little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingError:
    """The error that rounding in the tested dtype makes in a tensor, measured in noisy passes."""

    largest: Real
    """The largest error against float64, in the tensor's own unit."""
    samples: int
    """Number of independent errors in one pass."""
    drawn: int
    """Number of independent errors in all noisy passes together; `largest` is the largest of these."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.drawn < 1:
            raise ValueError(f"one error at least is known, got {self.samples} of {self.drawn}")

    @property
    def allowed(self) -> float:
        """Return the largest error that a healthy device may have, before the result is rounded to its dtype."""
        return error_factor(self.samples, self.drawn) * self.largest


FREEDOMS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Degrees of freedom for which `error_factor` is computed; another number is rounded down, which makes it larger."""


def error_factor(samples: int, drawn: int, freedom: int = 1, *, chance: float = FALSE_ALARM) -> float:
    r"""Return by how much the largest of n errors may exceed the largest of m others of the same kind; 2 at least.

    Two healthy devices round in different orders. Model their errors as independent samples of one distribution with
    the function F, of the root of chi-squared with :math:`\nu` degrees of freedom: of single normal errors, that is
    :math:`F(x) = \mathrm{erf}(x / \sqrt 2)`, with :math:`\nu = 1`; of the root mean square of several, see
    `consistency.numerics.error_spread`. Then the largest of n exceeds c times the largest of m with probability
    :math:`\int m F'(x) F(x)^{m-1} (1 - F(cx)^n)\,dx`, and the result is the c at which that is `chance`: for 128 single
    errors 3.2 times the largest of as many, 2.7 times that of 256. A few values carry little information, which more
    passes make up for: for 8 of a device 24 times the largest of 8, 4.6 times that of 32, 2.9 times that of 128. From
    16 on both are rounded down to four significant bits.

    Parameters
    ----------
    samples : int
        Errors of the device that is judged: n.
    drawn : int
        Errors of which the largest is known: m.
    freedom : int, optional
        Degrees of freedom of each.
    """
    n, m = (_rounded_down(min(max(1, count), _MOST_SAMPLES)) for count in (samples, drawn))
    known_freedom = max(degrees for degrees in FREEDOMS if degrees <= max(1, freedom))
    return _error_factor(n, m, known_freedom, chance)


def _rounded_down(count: int) -> int:
    """Return a count rounded down to four significant bits, so that few different factors are computed."""
    step = 1 << max(0, count.bit_length() - 4)
    return count // step * step


@functools.cache
def _error_factor(n: int, m: int, freedom: int, chance: float) -> float:
    """Return the c of `error_factor`, at most 5e-6 of itself too large; `LEAST_FACTOR` at least."""
    nodes = _nodes(m, freedom)

    def excess(log_c: float) -> float:
        """Return the logarithm of the probability at c over `chance`; the integral is by the trapezoidal rule."""
        c = math.exp(log_c)
        tails = ((weight, min(_above(c * x, freedom), 1 - 2**-53)) for x, weight in nodes)
        probability = -math.fsum(weight * math.expm1(n * math.log1p(-tail)) for weight, tail in tails)
        return math.log(max(probability, 1e-300) / chance)

    low, high = math.log(LEAST_FACTOR), math.log(2 * LEAST_FACTOR)
    at_low, at_high = excess(low), excess(high)
    if at_low <= 0:
        return LEAST_FACTOR
    # the chance falls with c: go up until it is low enough, and then search in the last interval
    while at_high > 0:
        low, at_low, high = high, at_high, high + math.log(4)
        at_high = excess(high)
    while high - low > 5e-6:  # the Illinois method, which keeps an end on either side
        # never nearer to an end than 2e-6, or the interval would hardly shrink
        middle = min(max((low * at_high - high * at_low) / (at_high - at_low), low + 2e-6), high - 2e-6)
        at_middle = excess(middle)
        if at_middle > 0:
            low, at_low, at_high = middle, at_middle, at_high / 2
        else:
            high, at_high, at_low = middle, at_middle, at_low / 2
    return math.exp(high)


@functools.cache
def _nodes(m: int, freedom: int) -> tuple[tuple[float, float], ...]:
    """Return the nodes of the integral of `error_factor` and their weights; it is taken over the logarithm of x."""
    nodes, step, scale = [], 0.05, 2 / math.gamma(freedom / 2)
    least = FALSE_ALARM * 1e-7  # all nodes below it together contribute less than a thousandth
    for i in range(int(math.log(1e12 * (12 + math.sqrt(freedom))) / step)):
        x = 1e-12 * math.exp(i * step)
        density = m * scale * (x * x / 2) ** (freedom / 2) * math.exp(-x * x / 2)
        if density * step <= least:
            continue
        below = math.erf(x / math.sqrt(2)) if freedom == 1 else max(0.0, 1 - _above(x, freedom))
        weight = density * below ** (m - 1) * step
        if weight > least:
            nodes.append((x, weight))
    return tuple(nodes)


def _above(x: float, freedom: int) -> float:
    """Return the probability that the root of chi-squared exceeds x: a finite sum for whole degrees of freedom."""
    half = x * x / 2
    if freedom % 2:
        probability, power = math.erfc(x / math.sqrt(2)), 0.5
    else:
        probability, power = 0.0, 0.0
    term = math.exp(-half) * half**power / math.gamma(power + 1)
    for _ in range(freedom // 2):
        probability, power = probability + term, power + 1
        term *= half / power
    return probability


def relative_allowance(error: RoundingError, magnitude: float, dtype: str) -> float:
    """Return the tolerance of a tensor by the `relative` rule, in its own unit.

    Parameters
    ----------
    magnitude : float
        Largest magnitude of the exact tensor.
    """
    return error.allowed + UNIT_ROUNDOFF[dtype] * magnitude + HALF_SMALLEST_SUBNORMAL[dtype]


class Verdict(NamedTuple):
    """The verdict of the `relative` rule on an error; `ratio` is the error over its tolerance, `allowed`."""

    ratio: float
    allowed: float
    status: Literal["equal", "within", "outside"]


def judge_relative(found: Measure, dtype: str, error: RoundingError) -> Verdict:
    """Judge a tensor's largest error against float64 by the error that rounding makes; see `relative_allowance`."""
    allowed = relative_allowance(error, float(found.magnitude), dtype)
    error_ratio = ratio(float(found.max_abs), allowed)
    if error_ratio == 0 and found.mismatched == 0:
        return Verdict(error_ratio, allowed, "equal")
    if passes(error_ratio):
        return Verdict(error_ratio, allowed, "within")
    return Verdict(error_ratio, allowed, "outside")


def ratio(error: float, allowed: float) -> float:
    """Return error over tolerance: 0 if there is no error, NaN if the error is NaN."""
    if error == 0:
        return 0.0
    return error / allowed if allowed else math.inf


def passes(ratio: float) -> bool:
    """Return whether a ratio is within tolerance; NaN is not."""
    return ratio <= 1.0
