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
"""Degrees of freedom that the median of all rows, or columns, has in the variance of one. The limits hold for any
number, for the passes that they come from are measured in the same way; with 4 a row whose own error is small by chance
has half of the median's."""

_TINY = 1e-80
"""Added to each variance: an error where no pass has one, in an element that is zero, is beyond any limit."""

_MOST_KEPT_ERRORS = 1 << 23
"""Largest number of errors of all passes that are kept, 64 MiB, instead of being computed three times: a million
elements, eight passes, where gradients are judged a fifth sooner (`benchmarks.assertion_time`)."""

_AT_ONCE = 1 << 16
"""Elements that are measured at once: what a core's cache holds of some arrays of float64."""

_ROWS_OF_COLUMNS = 64
"""Rows of all passes together from which on one estimate of the columns serves all passes; with fewer rows, the columns
too are estimated anew for each pass, from the other passes."""

_SIGNS = 8
"""Vectors of random signs: an estimate by them is off by a third at most, where it is below ten."""

_MOST_FREEDOM = 64.0
"""Largest degrees of freedom: from here on the factor is the least one for three passes of a few rows."""


class ErrorLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest figures that a healthy device may have."""

    row: Real
    element: Real
    scale: Real
    """`row`, `element`, `scale`: limits of the three figures."""
    drawn: int
    """Rows of all passes together, as many as have independent errors."""
    freedom: int
    """Degrees of freedom of a row."""
    largest: Real
    """The largest error in the passes, in the tensor's own unit."""
    by_columns: bool = False
    """Whether rows are the columns of the tensor."""

    def of_figures(self) -> dict[str, Real | bool]:
        """Return the limit of each figure by its name, and under `by_columns` whether rows are columns."""
        return {"row": self.row, "element": self.element, "scale": self.scale, "by_columns": self.by_columns}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFigures:
    """The three figures of an error, each as a ratio to its limit."""

    row: float
    element: float
    scale: float

    @property
    def ratio(self) -> float:
        """Return the largest of the three ratios; NaN if any is NaN."""
        ratios = (self.row, self.element, self.scale)
        if any(map(math.isnan, ratios)):
            return math.nan
        return max(ratios)

    def stated(self, measure: Measure) -> Measure:
        """Return the measure with the largest figure as its ratio, and the tolerance that gives its error this ratio.

        The error is that of the element with the measure's own ratio, where it has one, else the largest. The tolerance
        is None where the new ratio is zero, or one of both is not finite.
        """
        error = float(measure.max_abs)
        if measure.allowed is not None and measure.ratio is not None:
            error = float(measure.ratio) * float(measure.allowed)
        has_tolerance = 0 < self.ratio < math.inf and math.isfinite(error)
        allowed = Real(error / self.ratio) if has_tolerance else None
        return msgspec.structs.replace(measure, ratio=Real(self.ratio), allowed=allowed)

    def evidence(self) -> dict[str, float]:
        """Return the ratio of each figure to its limit, by the name that a record has for it."""
        return {"row_ratio": self.row, "element_ratio": self.element, "scale_ratio": self.scale}

    @property
    def word(self) -> Word | None:
        """Return `wrong-scale` where the scale is off and no row or element is; None where the figures tell no word."""
        # a row or an element that is off may put the scale off as well, so the scale is blamed only where it is alone
        is_wrong_scale = self.scale > 1 >= max(self.row, self.element)
        return words.WRONG_SCALE if is_wrong_scale else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The variance of the error that rounding makes in a tensor, and the limits of a device's error."""

    rows: torch.Tensor
    columns: torch.Tensor
    """`rows`, `columns`: `(rows, 1)` and `(1, columns)`, float64: the variance of an element is the product. Columns
    are the last dimension of the tensor, or its rows by `limits.by_columns`."""
    limits: ErrorLimits

    @classmethod
    def of(cls, drawn: Sequence[torch.Tensor], exact: torch.Tensor, *, of_a_sum: bool = False) -> Spread:
        """Measure passes with noise, two at least, against the exact tensor (float64, of the same shape).

        Rows are taken for independent, as tokens are; but not those `of_a_sum` over tokens, as a gradient is. Of such a
        tensor the columns are taken instead, where they are longer: a mean of more elements varies less.

        Raises
        ------
        ValueError
            There are fewer than two passes.
        """
        if len(drawn) < 2:
            raise ValueError(f"two passes with noise at least show a spread, got {len(drawn)}")
        by_columns = of_a_sum and len(_matrix(exact)) > _matrix(exact).shape[1]
        exact_matrix, *pass_matrices = [_matrix(tensor, by_columns=by_columns) for tensor in (exact, *drawn)]
        passes = _Passes(pass_matrices, exact_matrix, UNIT_ROUNDOFF[drawn[0].dtype])
        rows, columns = passes.factors(range(len(drawn)))
        limits = passes.limits(rows, columns, of_a_sum=of_a_sum)
        return cls(rows=rows, columns=columns, limits=msgspec.structs.replace(limits, by_columns=by_columns))

    def of_part(self, part: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int]) -> Spread:
        """Return the spread of a part of the tensor, with the same limits.

        Parameters
        ----------
        part : callable
            Takes the part out of any tensor of the whole shape.
        shape : sequence of int
            Shape of the whole tensor.
        """
        size, by_columns = (len(self.rows), self.columns.shape[1]), self.limits.by_columns
        parts = []
        for factor in (self.rows, self.columns):
            whole = factor.expand(size)
            if by_columns:
                whole = whole.T
            parts.append(part(whole.reshape(shape)))
        rows, columns = (_matrix(factor, by_columns=by_columns) for factor in parts)
        # all columns of the expanded row factor are equal, and all rows of the column factor
        return Spread(rows=rows[:, :1], columns=columns[:1], limits=self.limits)

    def figures(self, actual: torch.Tensor, exact: torch.Tensor) -> ErrorFigures:
        """Return the figures of a device's error over their limits; where exact values are not finite, equal is right.

        Parameters
        ----------
        actual, exact : torch.Tensor
            The device's tensor in its own dtype and the exact one (float64), of one shape.
        """
        actual_matrix, exact_matrix = (_matrix(tensor, by_columns=self.limits.by_columns) for tensor in (actual, exact))
        unit = UNIT_ROUNDOFF[actual.dtype]
        row = element = along = weight = 0.0
        for part in _row_slices(exact_matrix):
            x = exact_matrix[part]
            error = _error(actual_matrix[part], x)
            weights = 1 / _variance(self.rows[part], self.columns, x, unit)
            # an exact value that is NaN or infinite has no part in the component along the exact values
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
        """Return the error that each element of a tensor in `dtype` may have by itself: float64, of the exact shape."""
        by_columns = self.limits.by_columns
        matrix = _matrix(exact, by_columns=by_columns)
        deviation = _variance(self.rows, self.columns, matrix, UNIT_ROUNDOFF[dtype]).sqrt_()
        if by_columns:
            deviation = deviation.T
        return deviation.mul_(float(self.limits.element)).reshape(exact.shape)


class _Passes:
    """Passes with noise of a matrix, taken in parts of rows: a tensor of the size of logits is slow as a whole."""

    def __init__(self, drawn: Sequence[torch.Tensor], exact: torch.Tensor, unit: float) -> None:
        self._drawn = drawn
        self._exact = exact
        self._unit = unit
        self._parts = _row_slices(exact)
        self._kept_errors: list[list[torch.Tensor]] | None = None
        if len(drawn) * exact.numel() <= _MOST_KEPT_ERRORS:
            self._kept_errors = [self._errors_in(part) for part in self._parts]
        # a massive column would stand for its whole row, so rows are measured again in units of their columns
        self._rows, self._freedom = self._mean_squares(None), 1.0
        # columns are measured in units of rows, and rows of columns: each round makes the other's units better
        for _ in range(2):
            columns = self.factors(range(len(drawn)))[1]
            self._rows = self._mean_squares(columns)
            self._freedom = _freedom_of_passes(self._rows)

    def _mean_squares(self, columns: torch.Tensor | None) -> torch.Tensor:
        """Return the mean square of each row of each pass, `(passes, rows)`, in units of the columns if given."""
        squares = torch.empty(len(self._drawn), len(self._exact), dtype=torch.float64)
        weights = torch.ones(self._exact.shape[1], dtype=torch.float64) if columns is None else 1 / columns[0]
        for part, errors in self._errors():
            for number, error in enumerate(errors):
                squares[number, part] = torch.mv(error.square(), weights)
        return squares / self._exact.shape[1]

    def _errors(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """Yield each slice of rows with the errors of all passes in it."""
        for number, part in enumerate(self._parts):
            if self._kept_errors is not None:
                yield part, self._kept_errors[number]
            else:
                yield part, self._errors_in(part)

    def _errors_in(self, part: slice) -> list[torch.Tensor]:
        """Compute the error of each pass in some rows."""
        return [_error(noisy[part], self._exact[part]) for noisy in self._drawn]

    def factors(self, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of the variance, by the passes of these numbers.

        The first is the variance of each row, `(rows, 1)`; the second, `(1, columns)`, the variance of each column in
        units of its row's, of mean 1.
        """
        rows = self._row_variances(numbers)
        columns = torch.zeros(1, self._exact.shape[1], dtype=torch.float64)
        for part, errors in self._errors():
            # in units of each row's own error, or a few massive rows would decide every column
            scale = rows[part].clamp_min(_TINY).rsqrt()
            for number in numbers:
                columns += (errors[number] * scale).square_().sum(0, keepdim=True)
        weight = len(numbers) * len(rows)
        columns = (columns + _PRIOR * _positive_median(columns / weight)) / (weight + _PRIOR)
        # the rows have the size of the error already, so columns have mean 1
        mean = columns.mean()
        if mean > 0:
            return rows, columns / mean
        return rows, torch.ones_like(columns)

    def _row_variances(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return the variance of each row, `(rows, 1)`, drawn to the median of all with the weight of `_PRIOR`."""
        # the row of a pass has `_freedom` degrees of freedom, so the median counts as much as this many passes do
        prior = _PRIOR / self._freedom
        sums = self._rows[list(numbers)].sum(0)[:, None]
        prior_sum = prior * _positive_median(sums) / len(numbers)
        return (sums + prior_sum) / (len(numbers) + prior)

    def limits(self, rows: torch.Tensor, columns: torch.Tensor, *, of_a_sum: bool) -> ErrorLimits:
        """Return the limits, each pass measured by the others.

        Parameters
        ----------
        rows, columns : torch.Tensor
            The factors of the variance by all passes: in units of these the components along the exact values are
            taken.
        of_a_sum : bool
            Whether the rows are sums over the same tokens, and so not independent.
        """
        passes = len(self._drawn)
        measured = self._measure_passes(rows, columns, of_a_sum=of_a_sum)
        squares = measured.row_squares.flatten()
        independent = measured.count_independent(of_a_sum=of_a_sum)
        # the device's tensor has as many independent rows as one pass
        samples, freedom = -(-independent // passes), _freedom_of_rows(squares)
        row_factor = element_factor = 0.0
        # the widest limit of all degrees of freedom that the figures leave likely
        for degrees, chance in _chances(squares, independent, freedom):
            # independent elements in a row, each with one degree of freedom
            per_row = min(self._exact.shape[1], degrees)
            row_factor = max(row_factor, error_factor(samples, independent, degrees, chance=chance))
            of_elements = error_factor(samples * per_row, independent * per_row, chance=chance)
            element_factor = max(element_factor, of_elements)
        scale = _scale_limit(measured.components, measured.component_weights, independent)
        return ErrorLimits(
            row=Real(row_factor * math.sqrt(_larger(0.0, squares))),
            element=Real(element_factor * math.sqrt(measured.largest_square)),
            scale=Real(scale + self._unit),  # a constant that a kernel rounds is a scale
            drawn=independent,
            freedom=freedom,
            largest=Real(measured.largest_error),
        )

    def _factors_by_others(self, columns: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return for each pass the factors of the variance that the other passes show."""
        count, passes = len(self._exact), len(self._drawn)
        factors = []
        for judged in range(passes):
            others = [number for number in range(passes) if number != judged]
            if count * passes < _ROWS_OF_COLUMNS:
                factors.append(self.factors(others))
            else:  # one pass in many rows hardly moves a column
                factors.append((self._row_variances(others), columns))
        return factors

    def _measure_passes(self, rows: torch.Tensor, columns: torch.Tensor, *, of_a_sum: bool) -> _MeasuredPasses:
        """Measure each pass by the variance that the other passes show, in one go through the parts."""
        factors = self._factors_by_others(columns)
        measured = _MeasuredPasses(len(self._drawn), *self._exact.shape)
        for part, errors in self._errors():
            x = self._exact[part]
            finite = x.nan_to_num(0.0, 0.0, 0.0)
            # the variance of one rounding of the value, which is the same for each pass
            stored = (self._unit * finite).square_().div_(3).add_(_TINY)
            scaled = finite / torch.addcmul(stored, rows[part], columns)
            measured.component_weights[part] = torch.linalg.vecdot(finite, scaled)
            for number, error in enumerate(errors):
                variance = torch.addcmul(stored, factors[number][0][part], factors[number][1])
                square = error.square().div_(variance)
                measured.row_squares[number, part] = square.mean(1)
                measured.largest_square = _larger(measured.largest_square, square)
                measured.largest_error = _larger(measured.largest_error, error.abs())
                measured.components[number, part] = torch.linalg.vecdot(error, scaled)
                if of_a_sum:
                    measured.dependences[number].add(error / variance.sqrt_())
        return measured


class _MeasuredPasses:
    """The figures of passes with noise, which `_Passes` fills in part by part.

    Attributes
    ----------
    row_squares : torch.Tensor
        `(passes, rows)`, float64: the square of each row's figure.
    components : torch.Tensor
        `(passes, rows)`, float64: the component of each row's error along its exact values, times its weight.
    component_weights : torch.Tensor
        `(rows,)`, float64: the weight of each row in the component of the tensor.
    dependences : list of _RowDependence
        One for each pass; filled for a sum alone.
    largest_square : float
        The largest square of an element's figure.
    largest_error : float
        The largest error, in the tensor's own unit.
    """

    def __init__(self, passes: int, rows: int, columns: int) -> None:
        self.row_squares = torch.zeros(passes, rows, dtype=torch.float64)
        self.components = torch.zeros_like(self.row_squares)
        self.component_weights = torch.zeros(rows, dtype=torch.float64)
        self.dependences = [_RowDependence(columns) for _ in range(passes)]
        self.largest_square = 0.0
        self.largest_error = 0.0

    def count_independent(self, *, of_a_sum: bool) -> int:
        """Count the rows of all passes whose errors are independent.

        Tokens are; rows that are sums over the same tokens are as many as their errors have independent parts.
        """
        passes, rows = self.row_squares.shape
        if not of_a_sum:
            return rows * passes
        independent = sum(min(rows, dependence.independent) for dependence in self.dependences)
        if _have_common_factor(self.components, independent):
            return passes  # the rows of a pass are off by one factor together
        return independent


class _RowDependence:
    r"""Count the independent errors of the rows of one pass, in units of what rounding makes.

    The errors of rows that are sums over the same tokens are combinations of fewer. With Gram matrix G of the rows it
    is the participation number of its eigenvalues, :math:`(\mathrm{tr}\,G)^2 / \mathrm{tr}\,G^2`: that of the rows, if
    these are independent and long, 1 if they are multiples of one. The trace of the square is estimated by random signs
    (Hutchinson, *Communications in Statistics* 19, 1990).
    """

    def __init__(self, columns: int) -> None:
        self._signs = _random_signs(columns)
        # for rows E and signs s, the sum of E'(E s): the mean of its square over s is tr (E'E)², which is tr G²
        self._signed_sums = torch.zeros(columns, _SIGNS, dtype=torch.float64)
        self._trace = 0.0

    def add(self, errors: torch.Tensor) -> None:
        """Add some rows, `(rows, columns)`, float64."""
        self._trace += float(errors.square().sum())
        self._signed_sums += errors.T @ (errors @ self._signs)

    @property
    def independent(self) -> int:
        """Number of independent errors in the rows that were added; 1 where they are zero or not finite."""
        square = float(self._signed_sums.square().sum()) / _SIGNS
        if square > 0 and math.isfinite(square):
            return max(1, int(self._trace**2 / square))
        return 1


@functools.lru_cache(maxsize=8)
def _random_signs(columns: int) -> torch.Tensor:
    """Return `(columns, _SIGNS)` of 1 and -1, float64: the same for each call."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, 2, (columns, _SIGNS)) * 2.0 - 1)


@functools.cache
def student(freedom: int) -> float:
    """Return the two-sided limit of Student's distribution at `FALSE_ALARM`.

    From 4096 degrees of freedom on it is the limit of 4096. The deviate is a normal one over the root of the mean of
    chi-squared: the chance that it exceeds t is the mean of the chance of one deviate, erfc, over the distribution of
    the root.
    """
    freedom = min(freedom, 1 << 12)
    step = 0.5 / math.sqrt(2 * freedom)  # half the deviation of the logarithm
    x = torch.arange(-20.0, 1.0 + 5 / math.sqrt(freedom), step, dtype=torch.float64).exp() * math.sqrt(freedom)
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    # the density of the root of chi-squared, times the step: x goes in equal steps of its logarithm
    weights = 2 * step * (half * (x.square() / 2).log() - x.square() / 2 - torch.lgamma(half)).exp()
    # the logarithm of the limit, by bisection
    low, high = 0.0, math.log(1e10)
    for _ in range(30):
        middle = (low + high) / 2
        beyond = torch.special.erfc(math.exp(middle) * x / math.sqrt(2 * freedom))
        if float((weights * beyond).sum()) > FALSE_ALARM:
            low = middle
        else:
            high = middle
    return math.exp(high)


def _scale_limit(weighted: torch.Tensor, weights: torch.Tensor, independent: int) -> float:
    """Return the largest component along the exact values that passes explain; infinity where it is not known.

    Parameters
    ----------
    weighted : torch.Tensor
        `(passes, rows)`: the component of each row, times its weight.
    weights : torch.Tensor
        `(rows,)`: these weights.
    independent : int
        Independent errors of all passes.
    """
    total_weight = float(weights.sum())
    has_weight = total_weight > 0 and math.isfinite(total_weight)
    if not has_weight or not bool(weighted.isfinite().all()):
        return math.inf
    row_variances = weighted.square().mean(0)  # of each row's component, times the square of its weight
    # the participation number of the variances: where a few rows have most of the sum, only these count
    effective_rows = float(row_variances.sum().square() / row_variances.square().sum().clamp_min(1e-300))
    freedom = max(1, min(independent, int(effective_rows * len(weighted))))
    # rows that depend on each other add up to more than independent ones, which the sums of whole passes show
    variance_of_sums = float(weighted.sum(1).square().mean())
    deviation = math.sqrt(max(float(row_variances.sum()), variance_of_sums)) / total_weight
    return student(freedom) * deviation


def _have_common_factor(weighted: torch.Tensor, independent: int) -> bool:
    """Report whether the components of a pass's rows along the exact values add up, as those of one factor do.

    The mean square of their sum over the sum of their mean squares is 1 where n rows are independent, and n where they
    share a factor. Six tenths of n tell these apart. Of K passes it is chi-squared over K: below 5 rows it would be
    beyond 3 by chance in one of 50 tensors for K = 4 (8: in one of 500), whose limits are then wider than they need be.
    """
    sum_of_squares = float(weighted.square().sum(1).mean())
    square_of_sum = float(weighted.sum(1).square().mean())
    return square_of_sum > max(3.0, 0.6 * independent / len(weighted)) * sum_of_squares


def _freedom_of_passes(squares: torch.Tensor) -> float:
    """Return the degrees of freedom of one row of one pass, by the squared error of each: `(passes, rows)`."""
    count, total = len(squares), squares.sum(0)
    fractions = (squares / total)[:, total > 0]
    if not fractions.numel():
        return 1.0
    # K times the variance of a fraction, solved for the degrees of freedom: see the formula of the shares above
    spread = float((fractions - 1 / count).square().sum(0).mean())
    return max(1.0, 2 / count * ((1 - 1 / count) / max(spread, 1e-9) - 1))


def _freedom_of_rows(squares: torch.Tensor) -> int:
    """Return the degrees of freedom of rows, by the variance of their mean squares: `(passes * rows,)`."""
    if len(squares) < 2 or not bool(squares.any()):
        return 1
    freedom = float(2 * squares.mean().square() / squares.var().clamp_min(1e-300))
    return int(max(1.0, min(_MOST_FREEDOM, freedom)))


def _chances(squares: torch.Tensor, independent: int, freedom: int) -> list[tuple[int, float]]:
    """Return pairs of degrees of freedom that rows may have, and the chance for which `error_factor` is asked.

    The first is `freedom`, the estimate, at `FALSE_ALARM`. A few figures may be alike by chance, so fewer degrees count
    too, at `FALSE_ALARM` over their likelihood, which is that of multiples of chi-squared whose scale is unknown, over
    the largest of all.
    """
    positive = squares[squares > 0]
    if len(positive) < 2 or not bool(positive.isfinite().all()):
        return [(freedom, FALSE_ALARM)]
    sum_of_logs, log_of_sum = float(positive.log().sum()), math.log(float(positive.sum()))
    weight, count = independent / len(squares), len(positive)

    def log_likelihood(degrees: int) -> float:
        half = degrees / 2
        constant = math.lgamma(count * half) - count * math.lgamma(half)
        return weight * (constant + (half - 1) * sum_of_logs - count * half * log_of_sum)

    candidates = [degrees for degrees in FREEDOMS if degrees < freedom] + [freedom]
    log_likelihoods = {degrees: log_likelihood(degrees) for degrees in candidates}
    best = max(log_likelihoods.values())
    chances = [(freedom, FALSE_ALARM)]
    for degrees, logarithm in log_likelihoods.items():
        # in whole powers of ten, for which factors are known
        likelihood = 10.0 ** math.ceil((logarithm - best) / math.log(10))
        if likelihood > FALSE_ALARM and degrees < freedom:
            chances.append((degrees, FALSE_ALARM / likelihood))
    return chances


def _positive_median(values: torch.Tensor) -> float:
    """Return the median of the values that are not zero: rows that are masked have no error."""
    positive = values[values > 0]
    return float(positive.median()) if len(positive) else 0.0


def _variance(rows: torch.Tensor, columns: torch.Tensor, exact: torch.Tensor, unit: float) -> torch.Tensor:
    """Return the variance of each element's error: its row's times its column's, and one rounding of its value."""
    return torch.addcmul((unit * exact).square_().nan_to_num_(0.0, 0.0, 0.0).div_(3).add_(_TINY), rows, columns)


def _error(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the error in float64: none where both are the same NaN or infinity, NaN where one alone is."""
    wide = actual.to(torch.float64)
    error = wide - exact
    if math.isfinite(float(error.sum())):  # a third of the time of looking at each
        return error
    return torch.where((wide == exact) | (wide.isnan() & exact.isnan()), 0.0, error)


def _row_slices(matrix: torch.Tensor) -> list[slice]:
    """Return slices of rows, each of about `_AT_ONCE` elements, that cover a matrix."""
    step = max(1, _AT_ONCE // max(1, matrix.shape[1]))
    return [slice(start, start + step) for start in range(0, len(matrix), step)]


def _larger(figure: float, values: torch.Tensor) -> float:
    """Return the largest of a figure and of some values; NaN if any is NaN."""
    largest = float(values.max()) if values.numel() else 0.0
    if math.isnan(largest) or math.isnan(figure):
        return math.nan
    return max(figure, largest)


def _matrix(tensor: torch.Tensor, *, by_columns: bool = False) -> torch.Tensor:
    """View a tensor as `(rows, last dimension)`, a vector as one row; transposed for `by_columns`."""
    matrix = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)
    return matrix.T if by_columns else matrix


def _over(figure: float, limit: float) -> float:
    """Return a figure over its limit: 0 for no error even where the limit is 0, else infinity there."""
    if figure == 0:
        return 0.0
    return figure / limit if limit else math.inf
