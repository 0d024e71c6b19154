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
from consistency.numerics.running_error import Tracked, over
from consistency.numerics.typed import Typed, stored
from consistency.stages.merged.forms.form import Form, Judged
from consistency.stages.merged.forms.low_rank_product import LowRankFactors
from consistency.stages.merged.forms.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted(Judged):
    """A tensor with what its factors are off at most, where each belongs to a column: `(columns,)`."""

    slack: np.ndarray = field(default_factory=lambda: np.zeros(0))


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
        known = Typed.known(magnitude.reshape(-1))
        self._magnitude = known.moved(lambda m: m[:, None] if by_row else m[None, :])
        self._of_columns: Typed | None = None

    @classmethod
    def of(cls, source: Source, factors: LowRankFactors | None, *, by_row: bool) -> Dora | None:
        """Return the form of a layer whose factors and magnitudes are in the file."""
        magnitude = source.tensor("lora_magnitude_vector")
        return None if factors is None or magnitude is None else cls(source, factors, magnitude, by_row=by_row)

    def prepare(self, tested: Judged) -> Judged:
        if self._by_row or tested.safe is None or tested.tolerance is not None:
            return tested
        with np.errstate(all="ignore"):
            factor = self._column_factors()
            fit = np.zeros((3, self.width))
            for rows in self._blocks():
                total = self._factors.delta(rows) + self.base(rows)
                fit += self._fit(total, self._beside(total, factor), self._actual(tested, rows))
            slack = _slack(fit, factor.moved(lambda f: f[0]))
        return _Fitted(actual=tested.actual, safe=tested.safe, slack=slack)

    def block(self, tensors: Sequence[Judged], rows: slice) -> Sequence[Typed]:
        delta = self._factors.delta(rows)
        total = self.base(rows) + delta
        found = []
        for tested in tensors:
            if tested.safe is None:
                found.append(delta)
                continue
            factor = self._factor(*self._squares(total), total.dtype, rows) if self._by_row else self._column_factors()
            beside = self._beside(total, factor)
            if tested.tolerance is not None:
                slack = factor.error  # a user's tolerance needs none
            elif isinstance(tested, _Fitted):
                slack = tested.slack[None, :]
            else:
                by_row = factor.moved(lambda f: f[:, 0])
                slack = _slack(self._fit(total, beside, self._actual(tested, rows)), by_row)[:, None]
            error = beside + slack * np.abs(total.value)
            found.append(Typed(value=factor.value * total.value, error=error, dtype=self.weight.dtype))
        return found

    def _blocks(self) -> Iterator[slice]:
        for start in range(0, self.rows, self.rows_per_block):
            yield slice(start, min(self.rows, start + self.rows_per_block))

    def _actual(self, tested: Judged, rows: slice) -> np.ndarray:
        found: np.ndarray = tested.actual.detach().reshape(self.rows, self.width)[rows].to(torch.float64).numpy()
        return found

    def _column_factors(self) -> Typed:
        """Return the factor of each column, `(1, columns)`, whose norms take a pass over all rows."""
        if self._of_columns is None:
            value, error, size = (np.zeros((1, self.width)) for _ in range(3))
            dtype = self.weight.dtype
            for rows in self._blocks():
                total = self._factors.delta(rows) + self.base(rows)
                dtype = total.dtype
                for sums, more in zip((value, error, size), self._squares(total), strict=True):
                    sums += more
            self._of_columns = self._factor(value, error, size, dtype, slice(None))
        return self._of_columns

    def _squares(self, total: Typed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return sums over each output's elements in a block: of squares, their errors, and their largest values."""
        of = np.abs(total.value)
        parts = (of * of, total.error * (2 * of + total.error), total.size**2)
        value, error, size = (part.sum(axis=self._axis, keepdims=True) for part in parts)
        return value, error, size

    def _factor(self, value: np.ndarray, error: np.ndarray, size: np.ndarray, dtype: torch.dtype, rows: slice) -> Typed:
        by = self._source.matmul(dtype)
        off = error + gamma(self._terms + 1, by.unit) * size + self._terms * by.floor
        norm = Tracked(value=value, error=off, by=by).sqrt().store()
        magnitude = self._magnitude.moved(lambda m: m[rows]) if self._by_row else self._magnitude
        return magnitude / Typed(value=norm.value, error=norm.error, dtype=dtype)

    def _beside(self, total: Typed, factor: Typed) -> np.ndarray:
        """Return what an element is off at most beside its factor's error."""
        product = torch.promote_types(factor.dtype, total.dtype)
        most = stored(factor.size * np.abs(total.value), factor.size * total.error, product)
        return most.to(self.weight.dtype).error

    def _fit(self, total: Typed, beside: np.ndarray, actual: np.ndarray) -> np.ndarray:
        """Return the sums of the fit over each output's elements in a block: of S a, of S squared, and of |S| t."""
        parts = (total.value * actual, total.value**2, np.abs(total.value) * beside)
        return np.stack([part.sum(axis=self._axis) for part in parts])


def _slack(fit: np.ndarray, factor: Typed) -> np.ndarray:
    """Return what the device's factor of each output is off at most; `factor` is `(outputs,)`."""
    product, square, off = fit
    fitted = np.abs(np.divide(product, square, out=np.full_like(square, np.inf), where=square > 0) - factor.value)
    found = np.minimum(factor.error, np.nan_to_num(fitted, nan=np.inf) + over(off, square))
    return np.asarray(found)
