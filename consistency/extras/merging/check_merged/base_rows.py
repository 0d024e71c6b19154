"""The rows of a matrix that are those of the base."""

from __future__ import annotations

import torch

from consistency.numerics.typed import HALF_TYPES

_FEW_ROWS = 8
"""Rows of a matrix that are compared with the base's before all of it."""

_FEW_COLUMNS = 32
"""Columns of a row that are compared with the base's before the whole row."""

_GATHERED = 16
"""One of how many rows, or elements, is copied out to be computed alone: for more it takes longer than for all."""


def is_cast(actual: torch.Tensor, base: torch.Tensor) -> bool:
    """Report whether a tensor is the base, cast to its dtype by way of a half type or not."""
    few = slice(None, None, max(1, len(actual) // _FEW_ROWS))
    return bool(_rows_of_base(actual[few], base[few]).all()) and bool(_rows_of_base(actual, base).all())


def like_base(actual: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return which rows of a matrix are the base's in some columns: `(rows,)` bool; all others are not."""
    few = slice(None, None, max(1, actual.shape[1] // _FEW_COLUMNS))
    return _rows_of_base(actual[:, few], base[:, few])


def rows_of_base(actual: torch.Tensor, base: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Return which rows of a matrix are the base's, cast to its dtype by way of a half type or not: `(rows,)` bool.

    Only `candidates`, `(rows,)` bool, are read.
    """
    rows = candidates.nonzero().reshape(-1)
    if len(rows) * _GATHERED > len(actual):
        return _rows_of_base(actual, base)
    found = torch.zeros_like(candidates)
    found[rows] = _rows_of_base(actual[rows], base[rows])
    return found


def _rows_of_base(actual: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    equal = _equal_rows(actual, base.to(actual.dtype))
    for half in HALF_TYPES:
        if half not in (actual.dtype, base.dtype) and not bool(equal.all()):
            equal |= _equal_rows(actual, base.to(half).to(actual.dtype))
    return equal


def _equal_rows(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    equal = actual == expected
    rows = equal.all(dim=1)
    if not bool(rows.all()) and not bool(actual.sum().isfinite()):
        # what is not finite is judged apart, and equals anything here
        rows = (equal | ~actual.isfinite()).all(dim=1)
    return rows
