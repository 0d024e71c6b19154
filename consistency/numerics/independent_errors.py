"""Count the independent errors of an activation or a gradient: the number of samples behind the largest."""

from __future__ import annotations

import torch


def independent_rows(actual: torch.Tensor, exact: torch.Tensor) -> int:
    r"""Count the rows of an activation that carry its error: :math:`(\sum E)^2 / \sum E^2`, E the row's squared error.

    The elements of one token share what they were computed from, so an activation has no more independent errors than
    it has rows, and fewer if the model amplifies the errors of a few tokens. This, the participation number, is the
    number of rows if all errors are equal, and 1 if one row carries all of it.
    """
    difference = actual.detach().to(torch.float64) - exact.detach()
    rows = torch.linalg.vector_norm(difference if actual.dim() > 1 else difference.reshape(-1, 1), dim=-1)
    return _participation(rows.square())


def independent_lines(actual: torch.Tensor, exact: torch.Tensor) -> int:
    """Count the rows or the columns of gradients that carry their error, whichever are fewer: see `independent_rows`.

    Both tensors are `(passes, *shape)` of one parameter.

    The gradient of a matrix is a sum over tokens of products of two vectors. Elements of a row share one of them,
    those of a column the other, so it has no more independent errors than the fewer of both; each is itself a sum over
    all tokens. A vector is one row: its elements may be off by one common factor. Gradients of separate passes share
    none. Measured on a healthy kernel variant, 30 methods in float32: up to 2.5 times the CPU's error, and no more than
    half of what is allowed.
    """
    few, many = [], []
    for own, truth in zip(actual, exact, strict=True):
        rows = (1, -1) if own.dim() < 2 else (own.shape[0], -1)
        by_row, by_column = _energies(own.reshape(rows), truth.reshape(rows))
        few.append(by_row)
        many.append(by_column)
    return min(_participation(torch.cat(parts)) for parts in (few, many))


_ELEMENTS_AT_ONCE = 1 << 22
"""Elements at once: 32 MiB of float64, for gradients of any size."""


def _energies(actual: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the squared error of each row and of each column of a matrix."""
    step = max(1, _ELEMENTS_AT_ONCE // max(1, actual.shape[1]))
    by_row, by_column = [], torch.zeros(actual.shape[1], dtype=torch.float64)
    for own, truth in zip(actual.split(step), exact.split(step), strict=True):
        squares = (own.to(torch.float64) - truth).square_()
        by_row.append(squares.sum(1))
        by_column += squares.sum(0)
    return torch.cat(by_row), by_column


def _participation(energy: torch.Tensor) -> int:
    """Return how many of these carry their sum: all if they are equal, 1 if one carries it alone."""
    energy = energy.nan_to_num(posinf=0.0)
    return max(1, int(energy.sum().square() / energy.square().sum())) if bool(energy.any()) else max(1, energy.numel())
