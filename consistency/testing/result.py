"""Judge the results of a call: the error of each element, in units of its rounding error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from consistency.errors import UsageError
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error_spread import ErrorFigures, Spread
from consistency.numerics.not_finite import count_not_finite
from consistency.numerics.real import Real
from consistency.numerics.rules import LEAST_FACTOR, error_factor, passes
from consistency.testing.explanation import WrongResult, explain

Status = Literal["within", "inconclusive", "outside"]

Spreads = dict[tuple[str, torch.dtype, int], Spread]
"""Spreads of results by name, dtype, and number of passes."""

MOST_OF_SIGNAL = 0.1
"""Where rounding may be a larger part of the values than this, a result that passes says little: torchtitan's gate."""

_ONE_ROUNDING = 3.0
"""The square of the largest error of one rounding, over its variance: u² x² over u² x² / 3."""

_BY_CHANCE = 6 * math.sqrt(0.8)
"""Six deviations of that square, whose mean is 1 and whose variance is 9/5 - 1 for a uniform error."""

_NOTHING_ROUNDS = 512
"""Exact elements of all passes from which on nothing rounds: in float32 one of twelve would be moved, so that all stay
with a chance of 10⁻²⁰."""

Undecided = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""Return where another value is right too, from a discrete result, the exact one, and those of the passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultError:
    """The error of one result, or of one gradient.

    Attributes
    ----------
    name : str
        ``result``, ``result[0]``, ``input 0 after the call``, ``gradient of input 1``; a module's by its parameters.
    status : {"within", "inconclusive", "outside"}
        The verdict. A result is ``inconclusive`` where rounding may be so large that a wrong result could pass.
    reason : str
        Why the status is not ``within``, in words.
    explanation : str
        How much of a result is outside, where, and what would explain it, in words.
    ratio : float
        The largest error divided by its limit, of a single element, of a row or of the scale of all; more than 1 is
        beyond what rounding may do.
    worst : tuple of int or None
        Index of the element with the largest error divided by its tolerance; None where no values were compared.
    got, exact, error, allowed : float
        Value, exact value, error and tolerance of the worst element, in the tensor's own unit.
    ulp : float
        Error of the worst element in units in the last place of its exact value.
    share : float
        The error that all elements together may have, divided by the values; of both the root of the mean square.
    """

    name: str
    status: Status
    reason: str = ""
    explanation: str = ""
    ratio: float = 0.0
    worst: tuple[int, ...] | None = None
    got: float = 0.0
    exact: float = 0.0
    error: float = 0.0
    allowed: float = 0.0
    ulp: float = 0.0
    share: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.status}"]
        if self.reason:
            lines[0] += f", {self.reason}"
        if self.explanation:
            lines.append(f"  {self.explanation}")
        if self.worst is not None:
            # beside a value that nearly cancels, the distance to the next number says nothing
            in_ulp = f" = {self.ulp:.3g} ulp" if self.error <= abs(self.exact) else ""
            lines += [
                f"  worst element {list(self.worst)}: got {self.got:.9g}, exact {self.exact:.9g}",
                f"  error {self.error:.3g}{in_ulp}, allowed {self.allowed:.3g};"
                f" all together may be off by {100 * self.share:.2g} % of the values",
            ]
        return "\n".join(lines)


def allowance(drawn: Sequence[torch.Tensor], exact: torch.Tensor) -> Spread:
    """Return the spread of rounding errors in a result, with its limits; all values are finite and real.

    Parameters
    ----------
    drawn : sequence of torch.Tensor
        The result of each noisy pass, in the dtype of the function under test.
    exact : torch.Tensor
        The result in float64. Its rows may be sums over the same terms, as the rows of a gradient are.
    """
    spread = Spread.of(drawn, exact, of_a_sum=True)
    count, limits = exact.numel(), spread.limits
    if float(limits.largest) == 0 and count * len(drawn) > _NOTHING_ROUNDS:
        return spread  # so many elements are exact in all passes that nothing rounds
    # A few elements may be exact in all passes by chance, and yet a device that rounds them once is right. So each
    # limit is at least the error of one rounding; the margin is larger the fewer errors it is known from.
    margin = error_factor(count, count * len(drawn)) / LEAST_FACTOR
    of_row = min(_ONE_ROUNDING, 1 + _BY_CHANCE / math.sqrt(spread.columns.shape[1]))
    return replace(
        spread,
        limits=msgspec.structs.replace(
            limits,
            element=Real(max(float(limits.element), margin * math.sqrt(_ONE_ROUNDING))),
            row=Real(max(float(limits.row), margin * math.sqrt(of_row))),
            scale=Real(max(float(limits.scale), margin * UNIT_ROUNDOFF[drawn[0].dtype])),
        ),
    )


def judged(
    name: str,
    actual: Any,
    exact: Any,
    drawn: Sequence[Any],
    undecided: Undecided,
    *,
    any_dtype: bool = False,
    others: Mapping[str, torch.Tensor] | None = None,
    spreads: Spreads | None = None,
) -> ResultError:
    """Judge one result: first its shape and its dtype, then its values.

    Parameters
    ----------
    actual, exact : torch.Tensor or other
        On the CPU; a tensor that is not of floating-point numbers, and anything else, is to be equal.
    drawn : sequence
        The result of each pass with noise, which has the same inputs as the function under test: in the dtype that the
        reference returns for them.
    undecided : callable
        Returns for discrete results where another value is right too.
    any_dtype : bool
        A tensor may have another dtype of the same kind (floating-point, complex, whole) than the reference's; it is
        judged as what it is.
    others : mapping of str to torch.Tensor, optional
        Exact values of other results, in float64, which a wrong one may have instead.
    spreads : dict, optional
        Spreads that are known from an earlier judgement by the same passes, and are filled in: of a large result they
        take most of the time.
    """
    if not isinstance(actual, torch.Tensor) or not isinstance(exact, torch.Tensor):
        is_of_one_type = type(actual) is type(exact)
        if is_of_one_type and isinstance(actual, float | complex):
            actual, *drawn = (as_tensor(number) for number in (actual, *drawn))
            return judged(name, actual, as_tensor(exact, wide=True), drawn, undecided)
        is_equal = is_of_one_type and actual == exact
        return _equal(name, is_equal, f"got {actual!r}, the reference has {exact!r}")
    if actual.shape != exact.shape:
        return _outside(name, f"its shape is {tuple(actual.shape)}, the reference's {tuple(exact.shape)}")
    wrong_dtype = _describe_wrong_dtype(actual.dtype, drawn[0].dtype, any_dtype=any_dtype)
    if wrong_dtype is not None:
        return _outside(name, wrong_dtype)
    spreads = {} if spreads is None else spreads
    return _judge_values(name, actual, exact, drawn, undecided, others or {}, spreads)


def _describe_wrong_dtype(actual: torch.dtype, wanted: torch.dtype, *, any_dtype: bool) -> str | None:
    """Return in words that a result has another dtype than it may have; None if it may have it."""
    if actual == wanted:
        return None
    is_of_one_kind = (actual.is_complex, actual.is_floating_point) == (wanted.is_complex, wanted.is_floating_point)
    if any_dtype and is_of_one_kind:
        return None
    reason = f"its dtype is {name_of(actual)}, the reference's {name_of(wanted)} for the same inputs"
    return f"{reason}: allow=Allow(dtype=True) accepts another" if is_of_one_kind else reason


def _judge_values(
    name: str,
    actual: torch.Tensor,
    exact: torch.Tensor,
    drawn: Sequence[torch.Tensor],
    undecided: Undecided,
    others: Mapping[str, torch.Tensor],
    spreads: Spreads,
) -> ResultError:
    """Judge the values of a tensor; the parameters are those of `judged`."""
    if actual.is_complex():
        actual, exact, *drawn = (parts_of(tensor) for tensor in (actual, exact, *drawn))
    if not actual.is_floating_point():
        wrong = _count_wrong_choices(actual, exact, drawn, undecided)
        return _equal(name, not wrong, f"{wrong} of {actual.numel()} elements differ where rounding decides nothing")
    if not actual.numel():
        return ResultError(name=name, status="within")
    if actual.dtype == torch.float64:  # which a function returns whose inputs are narrower: judged by the passes' dtype
        dtype = drawn[0].dtype if drawn[0].dtype in UNIT_ROUNDOFF else torch.float32
        actual = actual.to(dtype)
    check_dtype(name, actual.dtype)
    exact = exact.to(torch.float64)
    return _judge_numbers(name, actual, exact, [tensor.to(actual.dtype) for tensor in drawn], others, spreads)


def _count_wrong_choices(
    actual: torch.Tensor, exact: torch.Tensor, drawn: Sequence[torch.Tensor], undecided: Undecided
) -> int:
    """Return how many elements of a discrete result differ where no other value is right."""
    differs = actual != exact
    if not bool(differs.any()):  # most results: the passes with decisions are spared
        return 0
    return int((differs & ~undecided(actual, exact, drawn)).sum())


def _judge_numbers(
    name: str,
    actual: torch.Tensor,
    exact: torch.Tensor,
    drawn: list[torch.Tensor],
    others: Mapping[str, torch.Tensor],
    spreads: Spreads,
) -> ResultError:
    """Judge a result of floating-point numbers; `exact` is float64, and passes have the dtype of the result."""
    # values beyond the largest number of the dtype become infinite
    stored = exact.to(actual.dtype)
    if any(map(count_not_finite, (actual, stored, *drawn))):
        mismatch = _judge_not_finite(name, actual, exact, stored, drawn)
        if mismatch is not None:
            return mismatch
        is_not_finite = ~stored.isfinite()
        actual, exact, *drawn = (tensor.masked_fill(is_not_finite, 0) for tensor in (actual, exact, *drawn))
        spreads = {}  # those of other values
    key = name, actual.dtype, len(drawn)
    if key not in spreads:
        spreads[key] = allowance(drawn, exact)
    spread = spreads[key]
    figures, allowed = spread.figures(actual, exact), spread.allowed(exact, actual.dtype)
    error = (actual.to(torch.float64) - exact).abs()
    # the limit of a row over that of an element: `allowed` is of each element by itself
    row_factor = float(spread.limits.row) / max(float(spread.limits.element), 1e-300)
    share = row_factor * _rms(allowed) / max(_rms(exact), 1e-300)
    worst = _index_of_largest(error / allowed.clamp_min(1e-300))
    worst_error = float(error[worst])
    status: Status = "within"
    reason = explanation = ""
    if not passes(figures.ratio):
        status, reason = "outside", _figures_beyond_limit(figures)
        explanation = explain(WrongResult(got=actual, exact=exact, allowed=allowed), others)
    elif share > MOST_OF_SIGNAL and (figures.ratio or float(spread.limits.largest)):
        status, reason = "inconclusive", "rounding may be more than a tenth of the values"
    return ResultError(
        name=name,
        status=status,
        reason=reason,
        explanation=explanation,
        ratio=figures.ratio,
        worst=worst,
        got=float(actual[worst]),
        exact=float(exact[worst]),
        error=worst_error,
        allowed=float(allowed[worst]),
        share=share,
        ulp=worst_error / _spacing(float(exact[worst]), actual.dtype),
    )


def _judge_not_finite(
    name: str, actual: torch.Tensor, exact: torch.Tensor, stored: torch.Tensor, drawn: list[torch.Tensor]
) -> ResultError | None:
    """Judge the elements that are NaN or infinite, in the result or its reference; None where all are right.

    `stored` are the exact values in the dtype of the result. Where passes with noise overflow, a device may too: the
    result is inconclusive then.
    """
    is_judged = ~stored.isfinite() | ~actual.isfinite()
    is_same = (actual == stored) | (actual.isnan() & stored.isnan())
    same = torch.where(is_judged, is_same, True)
    overflow = exact.isfinite() & torch.stack([~noisy.isfinite() & (noisy != stored) for noisy in drawn]).any(0)
    if not bool((same | overflow).all()):
        worst = _index_of_largest(~same & ~overflow)
        return ResultError(
            name=name,
            status="outside",
            reason=f"{int((~same).sum())} elements are not the same NaN or infinity, or not finite",
            ratio=math.inf,
            worst=worst,
            got=float(actual[worst]),
            exact=float(stored[worst]),
            error=math.inf,
            ulp=math.inf,
        )
    if bool(overflow.any()):
        return ResultError(name=name, status="inconclusive", reason="passes with noise overflow")
    return None


def _figures_beyond_limit(figures: ErrorFigures) -> str:
    """Return in words the figures that are not within their limits."""
    ratios = {"rows": figures.row, "elements": figures.element, "scale": figures.scale}
    return ", ".join(f"{name} {ratio:.3g} times the limit" for name, ratio in ratios.items() if not passes(ratio))


def _equal(name: str, is_equal: bool, reason: str) -> ResultError:
    return ResultError(name=name, status="within") if is_equal else _outside(name, reason)


def _outside(name: str, reason: str) -> ResultError:
    return ResultError(name=name, status="outside", reason=reason, ratio=math.inf)


def as_tensor(number: float | complex, *, wide: bool = False) -> torch.Tensor:
    """Return a Python number as a tensor, in float32 unless `wide`: the tensor that made it was that or narrower."""
    if isinstance(number, complex):
        dtype = torch.complex128 if wide else torch.complex64
    else:
        dtype = torch.float64 if wide else torch.float32
    return torch.tensor(number, dtype=dtype)


def parts_of(value: torch.Tensor) -> torch.Tensor:
    """Return the real and the imaginary parts of a complex tensor, stacked: `(2, *shape)`."""
    value = value.resolve_conj()
    return torch.stack([value.real, value.imag])


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise an error about a result unless it is known how numbers of its dtype are rounded."""
    if dtype not in UNIT_ROUNDOFF:
        raise UsageError(
            f"{name} has a dtype whose rounding is not known",
            got=dtype,
            hint="return the values before they are cast to it",
        )


def _index_of_largest(values: torch.Tensor) -> tuple[int, ...]:
    """Return the index of the largest element; of a scalar, `()`."""
    flat_index = int(values.reshape(-1).to(torch.float64).argmax())
    # torch.unravel_index imports SymPy, a second of a first assertion
    return tuple(int(index) for index in np.unravel_index(flat_index, tuple(values.shape)))


def _rms(values: torch.Tensor) -> float:
    """Return the root of the mean square."""
    return math.sqrt(float(values.square().mean()))


def _spacing(value: float, dtype: torch.dtype) -> float:
    """Return the distance of a number from the next one."""
    exponent = math.floor(math.log2(max(abs(value), torch.finfo(dtype).tiny)))
    return 2 * UNIT_ROUNDOFF[dtype] * 2.0**exponent
