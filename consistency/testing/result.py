"""What a call is judged by: the error of each of its results in units of what rounding makes there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import torch

from consistency.errors import UsageError
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error_spread import Spread
from consistency.numerics.not_finite import count_not_finite
from consistency.numerics.real import Real
from consistency.numerics.rules import LEAST_FACTOR, error_factor, passes

Status = Literal["within", "inconclusive", "outside"]

MOST_OF_SIGNAL = 0.1
"""Where rounding may be more of the values than that, a result that passes says little: torchtitan's gate."""

_ONE_ROUNDING = 3.0
"""The square of the largest error of one rounding, over its variance: u² x² over u² x² / 3."""

_BY_CHANCE = 6 * math.sqrt(0.8)
"""Six deviations of that square, whose mean is 1 and whose variance is 9/5 - 1 for a uniform error."""

_NOTHING_ROUNDS = 512
"""Elements of all passes: float32 would be moved in one of twelve, so that all stay with a chance of 10⁻²⁰."""

Undecided = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""Of a discrete result, the exact one, and those of the passes: return where another one is right too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultError:
    """The error of one result, or of one gradient.

    Attributes
    ----------
    name : str
        ``result``, ``result[0]``, ``input 0 after the call``, ``gradient of input 1``; a module's by its parameters.
    status : {"within", "inconclusive", "outside"}
    reason : str
        In words.
    ratio : float
        The largest of the three figures over its limit: more than 1 is beyond what rounding may do.
    worst : tuple of int or None
        The element whose error is the largest, as a multiple of what it may be.
    got, exact, error, allowed : float
        Of that element, in the tensor's own unit.
    ulp : float
        The error in units in the last place of the exact value.
    share : float
        How large an error of all elements may be, as a share of the values, each the root of the mean square.
    """

    name: str
    status: Status
    reason: str = ""
    ratio: float = 0.0
    worst: tuple[int, ...] | None = None
    got: float = 0.0
    exact: float = 0.0
    error: float = 0.0
    allowed: float = 0.0
    ulp: float = 0.0
    share: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.status}" + (f", {self.reason}" if self.reason else "")]
        if self.worst is not None:
            lines += [
                f"  worst element {list(self.worst)}: got {self.got:.9g}, exact {self.exact:.9g}",
                f"  error {self.error:.3g} = {self.ulp:.3g} ulp, allowed {self.allowed:.3g};"
                f" all together may be off by {100 * self.share:.2g} % of the values",
            ]
        return "\n".join(lines)


def allowance(drawn: Sequence[torch.Tensor], exact: torch.Tensor) -> Spread:
    """Return what rounding makes in a result, and its limits, by passes with noise; all are finite and real.

    Rows may be sums over the same terms, as those of a gradient are. Of a few elements all passes may be exact by
    chance, and a result that is rounded once is right: the largest figure is that of one rounding at least, and as much
    more as a few errors tell less. Where so many elements are exact in all passes, nothing rounds.
    """
    spread = Spread.of(drawn, exact, of_a_sum=True)
    count, limits = exact.numel(), spread.limits
    if float(limits.largest) == 0 and count * len(drawn) > _NOTHING_ROUNDS:
        return spread
    chance = error_factor(count, count * len(drawn)) / LEAST_FACTOR
    of_row = min(_ONE_ROUNDING, 1 + _BY_CHANCE / math.sqrt(spread.columns.shape[1]))
    return replace(
        spread,
        limits=msgspec.structs.replace(
            limits,
            element=Real(max(float(limits.element), chance * math.sqrt(_ONE_ROUNDING))),
            row=Real(max(float(limits.row), chance * math.sqrt(of_row))),
            scale=Real(max(float(limits.scale), chance * UNIT_ROUNDOFF[drawn[0].dtype])),
        ),
    )


def judged(
    name: str, actual: Any, exact: Any, drawn: Sequence[Any], undecided: Undecided, *, any_dtype: bool = False
) -> ResultError:
    """Judge one result: first its shape and its dtype, then its values.

    Parameters
    ----------
    actual, exact : torch.Tensor or other
        On the CPU; a tensor that is not of floating-point numbers, and anything else, is to be equal.
    drawn : sequence
        The same of each pass with noise, which has the same inputs as the function under test: of the dtype that the
        reference returns for them.
    undecided : callable
        Tell of discrete results where another one is right too.
    any_dtype : bool
        A tensor may have another dtype of the same kind (floating-point, complex, whole) than the reference's; it is
        judged as what it is.
    """
    if not isinstance(actual, torch.Tensor) or not isinstance(exact, torch.Tensor):
        if type(actual) is type(exact) and isinstance(actual, float | complex):
            actual, *drawn = (as_tensor(number) for number in (actual, *drawn))
            return judged(name, actual, as_tensor(exact, wide=True), drawn, undecided)
        return _equal(
            name, type(actual) is type(exact) and actual == exact, f"got {actual!r}, the reference has {exact!r}"
        )
    if actual.shape != exact.shape:
        return _outside(name, f"its shape is {tuple(actual.shape)}, the reference's {tuple(exact.shape)}")
    wanted = drawn[0].dtype
    is_of_the_kind = (actual.is_complex(), actual.is_floating_point()) == (wanted.is_complex, wanted.is_floating_point)
    if actual.dtype != wanted and not (any_dtype and is_of_the_kind):
        reason = f"its dtype is {name_of(actual.dtype)}, the reference's {name_of(wanted)} for the same inputs"
        if is_of_the_kind:
            reason = f"{reason}: allow=Allow(dtype=True) accepts another"
        return _outside(name, reason)
    if actual.is_complex():
        actual, exact, *drawn = (parts_of(one) for one in (actual, exact, *drawn))
    if not actual.is_floating_point():
        differs = actual != exact
        wrong = int((differs & ~undecided(actual, exact, drawn)).sum()) if bool(differs.any()) else 0
        return _equal(name, not wrong, f"{wrong} of {actual.numel()} elements differ where rounding decides nothing")
    if not actual.numel():
        return ResultError(name=name, status="within")
    if actual.dtype == torch.float64:
        actual = actual.to(drawn[0].dtype if drawn[0].dtype in UNIT_ROUNDOFF else torch.float32)
    check_dtype(name, actual.dtype)
    return _of_numbers(name, actual, exact.to(torch.float64), [one.to(actual.dtype) for one in drawn])


def _of_numbers(name: str, actual: torch.Tensor, exact: torch.Tensor, drawn: list[torch.Tensor]) -> ResultError:
    stored = exact.to(actual.dtype)  # what is beyond the largest number is infinite
    if any(map(count_not_finite, (actual, stored, *drawn))):
        places = ~stored.isfinite()
        same = torch.where(places | ~actual.isfinite(), (actual == stored) | (actual.isnan() & stored.isnan()), True)
        overflow = exact.isfinite() & torch.stack([~one.isfinite() & (one != stored) for one in drawn]).any(0)
        if not bool((same | overflow).all()):
            worst = _index(~same & ~overflow)
            got, wanted = float(actual[worst]), float(stored[worst])
            return ResultError(
                name=name,
                status="outside",
                reason=f"{int((~same).sum())} elements are not the same NaN or infinity, or not finite",
                ratio=math.inf,
                worst=worst,
                got=got,
                exact=wanted,
                error=math.inf,
                ulp=math.inf,
            )
        if bool(overflow.any()):
            return ResultError(name=name, status="inconclusive", reason="passes with noise overflow")
        actual, exact, *drawn = (one.masked_fill(places, 0) for one in (actual, exact, *drawn))
    spread = allowance(drawn, exact)
    figures, allowed = spread.figures(actual, exact), spread.allowed(exact, actual.dtype)
    error = (actual.to(torch.float64) - exact).abs()
    of_row = float(spread.limits.row) / max(float(spread.limits.element), 1e-300)
    share = of_row * _rms(allowed) / max(_rms(exact), 1e-300)
    worst = _index(error / allowed.clamp_min(1e-300))
    largest = float(error[worst])
    status: Status = "outside"
    parts = {"rows": figures.row, "elements": figures.element, "scale": figures.scale}
    reason = ", ".join(f"{part} {ratio:.3g} times the limit" for part, ratio in parts.items() if not passes(ratio))
    if passes(figures.ratio):
        status = "within"
        if share > MOST_OF_SIGNAL and (figures.ratio or float(spread.limits.largest)):
            status, reason = "inconclusive", "rounding may be more than a tenth of the values"
    return ResultError(
        name=name,
        status=status,
        reason=reason,
        ratio=figures.ratio,
        worst=worst,
        got=float(actual[worst]),
        exact=float(exact[worst]),
        error=largest,
        allowed=float(allowed[worst]),
        share=share,
        ulp=largest / _spacing(float(exact[worst]), actual.dtype),
    )


def _equal(name: str, is_equal: bool, reason: str) -> ResultError:
    return ResultError(name=name, status="within") if is_equal else _outside(name, reason)


def _outside(name: str, reason: str) -> ResultError:
    return ResultError(name=name, status="outside", reason=reason, ratio=math.inf)


def as_tensor(number: float | complex, *, wide: bool = False) -> torch.Tensor:
    """Return a Python number as a tensor, in float32 unless `wide`: what made it was a tensor of that or narrower."""
    if isinstance(number, complex):
        return torch.tensor(number, dtype=torch.complex128 if wide else torch.complex64)
    return torch.tensor(number, dtype=torch.float64 if wide else torch.float32)


def parts_of(value: torch.Tensor) -> torch.Tensor:
    """Return the real and the imaginary parts, one after the other."""
    value = value.resolve_conj()
    return torch.stack([value.real, value.imag])


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise an error unless it is known how numbers of a dtype are rounded."""
    if dtype not in UNIT_ROUNDOFF:
        raise UsageError(
            f"{name} has a dtype whose rounding is not known",
            got=dtype,
            hint="return the values before they are cast to it",
        )


def _index(values: torch.Tensor) -> tuple[int, ...]:
    """Return the place of the largest."""
    found = int(values.reshape(-1).to(torch.float64).argmax())
    return tuple(int(one) for one in torch.unravel_index(torch.tensor(found), values.shape)) if values.dim() else ()


def _rms(values: torch.Tensor) -> float:
    return math.sqrt(float(values.square().mean()))


def _spacing(value: float, dtype: torch.dtype) -> float:
    """Return the distance of a number from the next one."""
    exponent = math.floor(math.log2(max(abs(value), torch.finfo(dtype).tiny)))
    return 2 * UNIT_ROUNDOFF[dtype] * 2.0**exponent
