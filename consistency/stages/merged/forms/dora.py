r"""DoRA: :math:`W' = f \odot S` with :math:`S = W + s\,B A`, :math:`f_o = m_o / \lVert S_o \rVert` for each output o.

PEFT computes S in the wider dtype of weight and delta, its norms, the quotient of magnitude and norm, and the product
with S, and rounds it to the dtype of the weight. With :math:`E` the error of S (`low_rank_product`, one more
rounding) the sum of n squares is off by at most :math:`\sum (2 |S| E + E^2) + \gamma_{n+1} \sum (|S| + E)^2` in any
order, and root and quotient follow (`running_error`). That bounds the factor: :math:`|\hat f - f| \le \eta`.

:math:`\gamma_{n+1}` is the worst order of all: n roundings, of rows of thousands, where devices make few. But the
factor is one number for all elements of an output. Let :math:`t` bound what an element is off beside it:
:math:`|a - \hat f S| \le t = (|f| + \eta) E` and the roundings of the product. The least squares fit of the
device's own elements, :math:`c = \sum S a / \sum S^2`, is off from :math:`\hat f` by at most
:math:`\tau = \sum |S| t / \sum S^2`. So :math:`|\hat f - f| \le \min(\eta, |c - f| + \tau)`, and an element is allowed

.. math:: |a - f S| \le t + \min(\eta, |c - f| + \tau) |S|

which holds on every healthy device, and finds one wrong element as if the norm were known. One that is far off moves
the fit: by its own error times its share of :math:`\sum S^2`, and never further than :math:`\eta`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from consistency.numerics.bound import gamma
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.running_error import Tracked, over
from consistency.numerics.typed import Typed, stored
from consistency.stages.merged.forms.form import Form, Judged
from consistency.stages.merged.forms.low_rank_product import LowRankFactors
from consistency.stages.merged.forms.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted(Judged):
    """A tensor with the largest error of its device's factors, where an output is a column."""

    slack: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Largest error of the factor of each column, `(columns,)`."""


class Dora(Form):
    """The delta and the merged weight of a DoRA layer.

    Parameters
    ----------
    by_row : bool
        Whether an output is a row of the weight, or a column.
    """

    def __init__(self, source: Source, factors: LowRankFactors, magnitude: torch.Tensor, *, by_row: bool) -> None:
        super().__init__(source.weight)
        self._source = source
        self._factors = factors
        self._by_row = by_row
        self._axis = 1 if by_row else 0
        self._terms = self.width if by_row else self.rows
        self._flat_magnitude = magnitude.reshape(-1)
        flat = Typed.known(self._flat_magnitude)
        if by_row:
            self._magnitude = flat.moved(lambda m: m[:, None])
        else:
            self._magnitude = flat.moved(lambda m: m[None, :])
        self._cached_column_factors: Typed | None = None
        self._delta_dtype: torch.dtype | None = None

    def with_rounded_delta(self) -> Dora:
        """Return the form of a merge that rounds the delta to the weight's dtype, and sums in it, as MLX fuses DoRA."""
        form = Dora(self._source, self._factors, self._flat_magnitude, by_row=self._by_row)
        form._delta_dtype = self.weight.dtype
        return form

    @classmethod
    def of(cls, source: Source, factors: LowRankFactors | None, *, by_row: bool) -> Dora | None:
        """Return the form of a layer whose factors and magnitudes are in the file."""
        magnitude = source.tensor("lora_magnitude_vector")
        return None if factors is None or magnitude is None else cls(source, factors, magnitude, by_row=by_row)

    def prepare(self, tested: Judged) -> Judged:
        """Return a merged weight whose outputs are columns with the error of its factors, fitted over all rows.

        The fit of a row needs that row alone: `block` makes it.
        """
        if self._by_row or tested.safe is None or tested.tolerance is not None:
            return tested
        with np.errstate(all="ignore"):
            factor = self._column_factors()
            fit = np.zeros((3, self.width))
            for rows in self._blocks():
                total = self._delta(rows) + self.base(rows)
                fit += self._fit(total, self._beside(total, factor), self._actual(tested, rows))
            slack = _slack(fit, factor.moved(lambda f: f[0]))
        return _Fitted(actual=tested.actual, safe=tested.safe, slack=slack)

    def block(self, tensors: Sequence[Judged], rows: slice) -> Sequence[Typed]:
        """Return rows of the exact delta or merged weight of each tensor, with their bounds."""
        delta = self._delta(rows)
        total = self.base(rows) + delta
        exact_rows = []
        for tested in tensors:
            if tested.safe is None:
                exact_rows.append(delta)
                continue
            factor = self._factors_in(rows, total)
            beside = self._beside(total, factor)
            slack = self._slack_of(tested, total, beside, factor, rows)
            error = beside + slack * np.abs(total.value)
            exact_rows.append(Typed(value=factor.value * total.value, error=error, dtype=self.weight.dtype))
        return exact_rows

    def _delta(self, rows: slice) -> Typed:
        """Return rows of the low-rank product, in the dtype in which the merge adds it."""
        delta = self._factors.delta(rows)
        return delta if self._delta_dtype is None else delta.to(self._delta_dtype)

    def _factors_in(self, rows: slice, total: Typed) -> Typed:
        """Return the factors of the outputs in a block, `(n, 1)` or `(1, columns)`."""
        if self._by_row:
            return self._factor(*self._squares(total), total.dtype, rows)
        return self._column_factors()

    def _slack_of(self, tested: Judged, total: Typed, beside: np.ndarray, factor: Typed, rows: slice) -> np.ndarray:
        """Return the largest error of the device's factors in a block, `(n, 1)` or `(1, columns)`."""
        if tested.tolerance is not None:
            return factor.error  # no bound is needed: the user's tolerance replaces it
        if isinstance(tested, _Fitted):
            return tested.slack[None, :]
        fit = self._fit(total, beside, self._actual(tested, rows))
        return _slack(fit, factor.moved(lambda f: f[:, 0]))[:, None]

    def _blocks(self) -> Iterator[slice]:
        for start in range(0, self.rows, self.rows_per_block):
            yield slice(start, min(self.rows, start + self.rows_per_block))

    def _actual(self, tested: Judged, rows: slice) -> np.ndarray:
        """Return rows of the device's tensor in float64."""
        matrix = tested.actual.detach().reshape(self.rows, self.width)
        values: np.ndarray = matrix[rows].to(torch.float64).numpy()
        return values

    def _column_factors(self) -> Typed:
        """Return the factors of all columns, `(1, columns)`; their norms take a pass over all rows."""
        if self._cached_column_factors is None:
            value, error, size = (np.zeros((1, self.width)) for _ in range(3))
            dtype = self.weight.dtype
            for rows in self._blocks():
                total = self._delta(rows) + self.base(rows)
                dtype = total.dtype
                for sums, block_sums in zip((value, error, size), self._squares(total), strict=True):
                    sums += block_sums
            self._cached_column_factors = self._factor(value, error, size, dtype, slice(None))
        return self._cached_column_factors

    def _squares(self, total: Typed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return sums over each output's elements in a block: of squares, their errors, and their largest values."""
        magnitude = np.abs(total.value)
        terms = (magnitude * magnitude, total.error * (2 * magnitude + total.error), total.size**2)
        value, error, size = (term.sum(axis=self._axis, keepdims=True) for term in terms)
        return value, error, size

    def _factor(self, value: np.ndarray, error: np.ndarray, size: np.ndarray, dtype: torch.dtype, rows: slice) -> Typed:
        """Return magnitude over norm of the outputs in some rows, from the sums that `_squares` makes."""
        arithmetic = self._source.matmul(dtype)
        if self._delta_dtype is not None:  # each square is rounded to it, too
            error = error + UNIT_ROUNDOFF[self._delta_dtype] * size
        sum_error = error + gamma(self._terms + 1, arithmetic.unit) * size + self._terms * arithmetic.floor
        norm = Tracked(value=value, error=sum_error, by=arithmetic).sqrt().store()
        magnitude = self._magnitude.moved(lambda m: m[rows]) if self._by_row else self._magnitude
        return magnitude / Typed(value=norm.value, error=norm.error, dtype=dtype)

    def _beside(self, total: Typed, factor: Typed) -> np.ndarray:
        """Return the largest error of each element beside that of its factor: t in the docstring of this module."""
        product_dtype = torch.promote_types(factor.dtype, total.dtype)
        product = stored(factor.size * np.abs(total.value), factor.size * total.error, product_dtype)
        return product.to(self.weight.dtype).error

    def _fit(self, total: Typed, beside: np.ndarray, actual: np.ndarray) -> np.ndarray:
        """Return the sums of the fit over each output's elements in a block: of S a, of S squared, and of |S| t."""
        terms = (total.value * actual, total.value**2, np.abs(total.value) * beside)
        return np.stack([term.sum(axis=self._axis) for term in terms])


def _slack(fit: np.ndarray, factor: Typed) -> np.ndarray:
    """Return the largest error of the device's factor of each output: min(η, |c - f| + τ).

    Parameters
    ----------
    fit : array of shape `(3, outputs)`
        The sums of `Dora._fit`.
    factor : Typed
        The exact factors, `(outputs,)`.
    """
    product, square, error = fit
    fitted = np.divide(product, square, out=np.full_like(square, np.inf), where=square > 0)
    distance = np.nan_to_num(np.abs(fitted - factor.value), nan=np.inf)
    return np.asarray(np.minimum(factor.error, distance + over(error, square)))
