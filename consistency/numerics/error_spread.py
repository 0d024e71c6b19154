r"""The error that rounding makes in each element of a tensor, and the limit of a device's.

Trained models have massive activations: one element is ten thousand times another, and one token's error a hundred
times another's. So an error is taken in units of what rounding makes in that element, by its variance in passes with
noise (`consistency.numerics.rounding_noise`): that of its row times that of its column, and one rounding of its value,

.. math:: v_{ij} = r_i c_j + u^2 x_{ij}^2 / 3 .

Of a few passes a row may have a small error by chance, so each is drawn to the median of all, with the weight of
`_PRIOR` degrees of freedom; a column likewise. How many degrees one row of one pass has, the passes show: the shares
of K passes in the squared error of a row sum up to 1, and each has variance
:math:`(1/K) (1 - 1/K) / (K \nu / 2 + 1)` if these are multiples of chi-squared with :math:`\nu` degrees (Dirichlet).

**Three figures** of an error d are compared with those of the passes themselves, each measured by the variance that the
*other* passes show, as the device's is by one that it has no part in:

* of each row, the root of the mean of :math:`d^2 / v`;
* of each element, :math:`|d| / \sqrt v`;
* of the tensor, the component along its exact values, :math:`\sum d x / v \, / \sum x^2 / v`: a wrong scale.

**The limits.** If the errors of a row are those of a normal distribution, and depend on each other or not, the
square of its figure is, in good approximation, a multiple of chi-squared with :math:`\nu` degrees of freedom
(Satterthwaite, *Biometrics Bulletin* 2, 1946), and the figures of all rows of all passes give
:math:`\nu = 2 (\mathrm{mean})^2 / \mathrm{variance}`: 1 where a row is off as a whole, the number of columns where each
element is by itself. Rows that differ otherwise make the estimate smaller, and the limit wider. Of a few rows it is
uncertain, so fewer degrees count too, by their likelihood. With F the distribution function of the root, the limit is
`error_factor` times the largest figure of the passes.
Of elements :math:`\nu` is 1. Rows that are sums over the same tokens, as those of a gradient, are as many as their
errors have independent parts. The component has mean zero, and is a weighted mean of one per row, whose variances add
up; its limit is Student's for that many rows, and one rounding more: a constant that a kernel rounds is a scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from consistency.numerics import words
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from consistency.numerics.rules import FALSE_ALARM, FREEDOMS, error_factor
from consistency.numerics.words import Word

_PRIOR = 4
"""Degrees of freedom of the median of all rows, or columns, in the variance of one. The limits hold for any number, for
they are of passes that are measured so; with 4 a row whose own error is small by chance has half of the median's."""

_TINY = 1e-80
"""Added to each variance: an error where no pass has one, in an element that is zero, is beyond any limit."""

_KEPT = 1 << 23
"""Errors of all passes that are kept, 64 MiB at most, instead of being computed three times: a million elements, eight
passes, where gradients are judged a fifth sooner (`benchmarks.assertion_time`)."""

_AT_ONCE = 1 << 16
"""Elements that are measured at once: what a core's cache holds of some arrays of float64."""

_ROWS_OF_COLUMNS = 64
"""Of all passes together; of fewer, columns too are those of the other passes."""

_SIGNS = 8
"""Vectors of random signs: an estimate by them is off by a third at most, where it is below ten."""

_MOST_FREEDOM = 64.0
"""From here on the factor is the least one for three passes of a few rows."""


class ErrorLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest figures of a healthy device."""

    row: Real
    element: Real
    scale: Real
    """`row`, `element`, `scale`: """
    drawn: int
    """Rows of all passes together."""
    freedom: int
    """Degrees of freedom of a row."""
    largest: Real
    """The largest error in the passes, in the tensor's own unit."""
    by_columns: bool = False
    """Whether rows are the columns of the tensor."""

    def of_figures(self) -> dict[str, Real | bool]:
        """Return the limit of each figure, and whether rows are columns."""
        return {"row": self.row, "element": self.element, "scale": self.scale, "by_columns": self.by_columns}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFigures:
    """The figures of an error over their limits."""

    row: float
    element: float
    scale: float

    @property
    def ratio(self) -> float:
        """The largest of all; NaN where one is."""
        found = (self.row, self.element, self.scale)
        return math.nan if any(map(math.isnan, found)) else max(found)

    def stated(self, found: Measure) -> Measure:
        """Return a measure whose ratio is the largest figure, and whose tolerance is the error it shows over that."""
        error = float(found.max_abs)
        if found.allowed is not None and found.ratio is not None:
            error = float(found.ratio) * float(found.allowed)
        is_known = 0 < self.ratio < math.inf and math.isfinite(error)
        return msgspec.structs.replace(
            found, ratio=Real(self.ratio), allowed=Real(error / self.ratio) if is_known else None
        )

    def evidence(self) -> dict[str, float]:
        """Return each figure over its limit."""
        return {"row_ratio": self.row, "element_ratio": self.element, "scale_ratio": self.scale}

    @property
    def word(self) -> Word | None:
        """What the figures alone tell: a scale that is wrong where no element is."""
        return words.WRONG_SCALE if self.scale > 1 >= max(self.row, self.element) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The variance of the error that rounding makes in a tensor, and the limits of what it may be."""

    rows: torch.Tensor
    columns: torch.Tensor
    """`rows`, `columns`: `(rows, 1)` and `(1, columns)`, float64: the variance of an element is the product. Columns
    are the last dimension of the tensor, or its rows by `limits.by_columns`."""
    limits: ErrorLimits

    @classmethod
    def of(cls, drawn: Sequence[torch.Tensor], exact: torch.Tensor, *, of_a_sum: bool = False) -> Spread:
        """Measure passes with noise, two at least, against the exact tensor (float64, of the same shape).

        Rows are taken for independent, as tokens are; but not those `of_a_sum` over tokens, as a gradient is. Of such a
        one the columns are taken instead, where they are longer: a mean of more elements varies less.
        """
        if len(drawn) < 2:
            raise ValueError(f"two passes with noise at least show a spread, got {len(drawn)}")
        by_columns = of_a_sum and len(_matrix(exact)) > _matrix(exact).shape[1]
        matrices = [_matrix(one, by_columns=by_columns) for one in (exact, *drawn)]
        passes = _Passes(matrices[1:], matrices[0], UNIT_ROUNDOFF[drawn[0].dtype])
        rows, columns = passes.factors(range(len(drawn)))
        limits = passes.limits(rows, columns, of_a_sum=of_a_sum)
        return cls(rows=rows, columns=columns, limits=msgspec.structs.replace(limits, by_columns=by_columns))

    def of_part(self, part: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int]) -> Spread:
        """Return that of a part of the tensor, whose shape is `shape`; `part` takes it of any such tensor."""
        size, by_columns = (len(self.rows), self.columns.shape[1]), self.limits.by_columns
        whole = [one.expand(size) for one in (self.rows, self.columns)]
        parts = [part((one.T if by_columns else one).reshape(shape)) for one in whole]
        rows, columns = (_matrix(one, by_columns=by_columns) for one in parts)
        return Spread(rows=rows[:, :1], columns=columns[:1], limits=self.limits)

    def figures(self, actual: torch.Tensor, exact: torch.Tensor) -> ErrorFigures:
        """Return how an error stands to its limits; where exact values are not finite, equal ones are right."""
        own, truth = (_matrix(one, by_columns=self.limits.by_columns) for one in (actual, exact))
        unit = UNIT_ROUNDOFF[actual.dtype]
        row = element = along = weight = 0.0
        for part in _parts(truth):
            x = truth[part]
            error = _error(own[part], x)
            weights = 1 / _variance(self.rows[part], self.columns, x, unit)
            square, scaled = error.square(), x.nan_to_num(0.0, 0.0, 0.0) * weights
            row = _larger(row, (square * weights).mean(1))
            element = _larger(element, square * weights)
            along += float(torch.linalg.vecdot(error, scaled).sum())
            weight += float(torch.linalg.vecdot(x.nan_to_num(0.0, 0.0, 0.0), scaled).sum())
        limits = self.limits
        return ErrorFigures(
            row=_over(math.sqrt(row), float(limits.row)),
            element=_over(math.sqrt(element), float(limits.element)),
            scale=_over(abs(along) / max(weight, 1e-300), float(limits.scale)),
        )

    def allowed(self, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the error that each element may have by itself, float64."""
        by_columns = self.limits.by_columns
        found = _variance(self.rows, self.columns, _matrix(exact, by_columns=by_columns), UNIT_ROUNDOFF[dtype]).sqrt_()
        return (found.T if by_columns else found).mul_(float(self.limits.element)).reshape(exact.shape)


class _Passes:
    """Passes with noise of a matrix, taken in parts of rows: a tensor of the size of logits is slow as a whole."""

    def __init__(self, drawn: Sequence[torch.Tensor], exact: torch.Tensor, unit: float) -> None:
        self._drawn = drawn
        self._exact = exact
        self._unit = unit
        self._parts = _parts(exact)
        is_small = len(drawn) * exact.numel() <= _KEPT
        self._kept = [[_error(one[part], exact[part]) for one in drawn] for part in self._parts] if is_small else None
        # a massive column would stand for its whole row, so rows are measured again in units of their columns
        self._rows, self._freedom = self._mean_squares(None), 1.0
        for _ in range(2):
            columns = self.factors(range(len(drawn)))[1]
            self._rows = self._mean_squares(columns)
            self._freedom = _freedom_of_passes(self._rows)

    def _mean_squares(self, columns: torch.Tensor | None) -> torch.Tensor:
        """Return the mean square of each row of each pass, `(passes, rows)`."""
        found = torch.empty(len(self._drawn), len(self._exact), dtype=torch.float64)
        weights = torch.ones(self._exact.shape[1], dtype=torch.float64) if columns is None else 1 / columns[0]
        for part, errors in self._errors():
            for number, error in enumerate(errors):
                found[number, part] = torch.mv(error.square(), weights)
        return found / self._exact.shape[1]

    def _errors(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """Yield the errors of all passes, part by part."""
        for number, part in enumerate(self._parts):
            if self._kept is not None:
                yield part, self._kept[number]
            else:
                yield part, [_error(one[part], self._exact[part]) for one in self._drawn]

    def factors(self, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the variance of each row, and what each column is of that, by some of the passes."""
        rows = self._of_rows(numbers)
        columns = torch.zeros(1, self._exact.shape[1], dtype=torch.float64)
        for part, errors in self._errors():
            scale = rows[part].clamp_min(_TINY).rsqrt()
            for number in numbers:
                columns += (errors[number] * scale).square_().sum(0, keepdim=True)
        weight = len(numbers) * len(rows)
        columns = (columns + _PRIOR * _median(columns / weight)) / (weight + _PRIOR)
        mean = columns.mean()
        return rows, columns / mean if mean > 0 else torch.ones_like(columns)

    def _of_rows(self, numbers: Sequence[int]) -> torch.Tensor:
        prior, rows = _PRIOR / self._freedom, self._rows[list(numbers)].sum(0)[:, None]
        return (rows + prior * _median(rows) / len(numbers)) / (len(numbers) + prior)

    def limits(self, rows: torch.Tensor, columns: torch.Tensor, *, of_a_sum: bool) -> ErrorLimits:
        """Return the limits, each pass measured by the others."""
        count, passes = len(self._exact), len(self._drawn)
        others = [[number for number in range(passes) if number != own] for own in range(passes)]
        if count * passes < _ROWS_OF_COLUMNS:
            by = [self.factors(numbers) for numbers in others]
        else:  # one pass in many rows hardly moves a column
            by = [(self._of_rows(numbers), columns) for numbers in others]
        of_rows, elements, largest = torch.zeros(passes, count, dtype=torch.float64), 0.0, 0.0
        weighted, weights = torch.zeros_like(of_rows), torch.zeros(count, dtype=torch.float64)
        together = [_Together(self._exact.shape[1]) for _ in self._drawn]
        for part, errors in self._errors():
            x = self._exact[part]
            finite = x.nan_to_num(0.0, 0.0, 0.0)
            stored = (self._unit * finite).square_().div_(3).add_(_TINY)
            scaled = finite / torch.addcmul(stored, rows[part], columns)
            weights[part] = torch.linalg.vecdot(finite, scaled)
            for number, error in enumerate(errors):
                variance = torch.addcmul(stored, by[number][0][part], by[number][1])
                square = error.square().div_(variance)
                of_rows[number, part] = square.mean(1)
                elements = _larger(elements, square)
                largest = _larger(largest, error.abs())
                weighted[number, part] = torch.linalg.vecdot(error, scaled)
                if of_a_sum:
                    together[number].add(error / variance.sqrt_())
        found = of_rows.flatten()
        independent = count * passes
        if of_a_sum:
            independent = sum(min(count, one.independent) for one in together)
            if _have_common_factor(weighted, independent):
                independent = passes
        samples, freedom = -(-independent // passes), _freedom(found)
        of_row = of_element = 0.0
        for degrees, chance in _chances(found, independent, freedom):
            per_row = min(self._exact.shape[1], degrees)
            of_row = max(of_row, error_factor(samples, independent, degrees, chance=chance))
            of_element = max(of_element, error_factor(samples * per_row, independent * per_row, chance=chance))
        return ErrorLimits(
            row=Real(of_row * math.sqrt(_larger(0.0, found))),
            element=Real(of_element * math.sqrt(elements)),
            scale=Real(_scale_limit(weighted, weights, independent) + self._unit),
            drawn=independent,
            freedom=freedom,
            largest=Real(largest),
        )


class _Together:
    r"""Count the independent errors of the rows of one pass, in units of what rounding makes.

    The errors of rows that are sums over the same tokens are combinations of fewer. With Gram matrix G of the rows it
    is the participation number of its eigenvalues, :math:`(\mathrm{tr}\,G)^2 / \mathrm{tr}\,G^2`: that of the rows, if
    these are independent and long, 1 if they are multiples of one. The trace of the square is estimated by random signs
    (Hutchinson, *Communications in Statistics* 19, 1990).
    """

    def __init__(self, columns: int) -> None:
        self._signs = _signs(columns)
        self._back = torch.zeros(columns, _SIGNS, dtype=torch.float64)
        self._trace = 0.0

    def add(self, errors: torch.Tensor) -> None:
        """Add some rows."""
        self._trace += float(errors.square().sum())
        self._back += errors.T @ (errors @ self._signs)

    @property
    def independent(self) -> int:
        square = float(self._back.square().sum()) / _SIGNS
        return max(1, int(self._trace**2 / square)) if square > 0 and math.isfinite(square) else 1


@functools.lru_cache(maxsize=8)
def _signs(columns: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 2, (columns, _SIGNS)) * 2.0 - 1)


@functools.cache
def student(freedom: int) -> float:
    """Return the two-sided limit of Student's distribution at `FALSE_ALARM`; from 4096 degrees of freedom on, of that.

    It is a normal deviate over the root of the mean of chi-squared: the chance that it exceeds t is the mean of that
    for one deviate, erfc, over the distribution of the root.
    """
    freedom = min(freedom, 1 << 12)
    step = 0.5 / math.sqrt(2 * freedom)  # half the deviation of the logarithm
    x = torch.arange(-20.0, 1.0 + 5 / math.sqrt(freedom), step, dtype=torch.float64).exp() * math.sqrt(freedom)
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    weights = 2 * step * (half * (x.square() / 2).log() - x.square() / 2 - torch.lgamma(half)).exp()
    low, high = 0.0, math.log(1e10)
    for _ in range(30):
        middle = (low + high) / 2
        beyond = torch.special.erfc(math.exp(middle) * x / math.sqrt(2 * freedom))
        low, high = (middle, high) if float((weights * beyond).sum()) > FALSE_ALARM else (low, middle)
    return math.exp(high)


def _scale_limit(weighted: torch.Tensor, weights: torch.Tensor, independent: int) -> float:
    """Return the largest component along the exact values, from those of each row of each pass, times its weight.

    Parameters
    ----------
    independent : int
        Errors of all passes.
    """
    whole = float(weights.sum())
    if not whole > 0 or not math.isfinite(whole) or not bool(weighted.isfinite().all()):
        return math.inf
    of_rows = weighted.square().mean(0)  # variance of each row's, times the square of its weight
    rows = float(of_rows.sum().square() / of_rows.square().sum().clamp_min(1e-300))
    of_passes = float(weighted.sum(1).square().mean())
    deviation = math.sqrt(max(float(of_rows.sum()), of_passes)) / whole
    return student(max(1, min(independent, int(rows * len(weighted))))) * deviation


def _have_common_factor(weighted: torch.Tensor, independent: int) -> bool:
    """Report whether the components of a pass's rows along the exact values add up, as those of one factor do.

    The mean square of their sum over the sum of their mean squares is 1 where n rows are independent, and n where they
    share a factor. Six tenths of n tell these apart. Of K passes it is chi-squared over K: below 5 rows it would be
    beyond 3 by chance in one of 50 tensors for K = 4 (8: in one of 500), whose limits are then wider than they need be.
    """
    alone, together = float(weighted.square().sum(1).mean()), float(weighted.sum(1).square().mean())
    return together > max(3.0, 0.6 * independent / len(weighted)) * alone


def _freedom_of_passes(squares: torch.Tensor) -> float:
    """Return the degrees of freedom of one row of one pass, by the squared error of each: `(passes, rows)`."""
    count, whole = len(squares), squares.sum(0)
    shares = (squares / whole)[:, whole > 0]
    if not shares.numel():
        return 1.0
    spread = float((shares - 1 / count).square().sum(0).mean())
    return max(1.0, 2 / count * ((1 - 1 / count) / max(spread, 1e-9) - 1))


def _freedom(squares: torch.Tensor) -> int:
    """Return the degrees of freedom of rows, by the variance of their mean squares."""
    if len(squares) < 2 or not bool(squares.any()):
        return 1
    return int(max(1.0, min(_MOST_FREEDOM, float(2 * squares.mean().square() / squares.var().clamp_min(1e-300)))))


def _chances(squares: torch.Tensor, independent: int, freedom: int) -> list[tuple[int, float]]:
    """Return the degrees of freedom that rows may have, `freedom` at most, and the chance at which each has its limit.

    A few figures may be alike by chance. So fewer degrees count too, at `FALSE_ALARM` over their likelihood, which is
    that of multiples of chi-squared whose scale is unknown, over the largest of all.
    """
    some = squares[squares > 0]
    if len(some) < 2 or not bool(some.isfinite().all()):
        return [(freedom, FALSE_ALARM)]
    logs, whole, weight = float(some.log().sum()), math.log(float(some.sum())), independent / len(squares)
    count, known = len(some), [one for one in FREEDOMS if one < freedom] + [freedom]

    def likelihood(degrees: int) -> float:
        half = degrees / 2
        found = math.lgamma(count * half) - count * math.lgamma(half) + (half - 1) * logs - count * half * whole
        return weight * found

    found = {degrees: likelihood(degrees) for degrees in known}
    best = max(found.values())
    # in whole powers of ten, for which factors are known
    shares = {degrees: 10.0 ** math.ceil((one - best) / math.log(10)) for degrees, one in found.items()}
    return [(freedom, FALSE_ALARM)] + [
        (degrees, FALSE_ALARM / share) for degrees, share in shares.items() if share > FALSE_ALARM and degrees < freedom
    ]


def _median(values: torch.Tensor) -> float:
    """Return the median of what is not zero: rows that are masked have no error."""
    some = values[values > 0]
    return float(some.median()) if len(some) else 0.0


def _variance(rows: torch.Tensor, columns: torch.Tensor, exact: torch.Tensor, unit: float) -> torch.Tensor:
    return torch.addcmul((unit * exact).square_().nan_to_num_(0.0, 0.0, 0.0).div_(3).add_(_TINY), rows, columns)


def _error(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the error in float64: none where both are the same NaN or infinity, NaN where one alone is."""
    wide = actual.to(torch.float64)
    error = wide - exact
    if math.isfinite(float(error.sum())):  # a third of the time of looking at each
        return error
    return torch.where((wide == exact) | (wide.isnan() & exact.isnan()), 0.0, error)


def _parts(matrix: torch.Tensor) -> list[slice]:
    """Return slices of rows."""
    step = max(1, _AT_ONCE // max(1, matrix.shape[1]))
    return [slice(start, start + step) for start in range(0, len(matrix), step)]


def _larger(figure: float, values: torch.Tensor) -> float:
    """Return the largest of all; NaN where one is."""
    other = float(values.max()) if values.numel() else 0.0
    return math.nan if math.isnan(other) or math.isnan(figure) else max(figure, other)


def _matrix(tensor: torch.Tensor, *, by_columns: bool = False) -> torch.Tensor:
    found = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)
    return found.T if by_columns else found


def _over(figure: float, limit: float) -> float:
    return 0.0 if figure == 0 else figure / limit if limit else math.inf
