"""Count the independent errors of an activation or a gradient: the number of samples behind the largest."""

from __future__ import annotations

import math

import torch

from consistency.numerics.file_tensor import Elements, Readable, elements_of, mapped


def independent_rows(actual: Readable, exact: Readable) -> int:
    r"""Count the rows of an activation that carry its error: :math:`(\sum E)^2 / \sum E^2`, E the row's squared error.

    The elements of one token share what they were computed from, so an activation has no more independent errors than
    it has rows, and fewer if the model amplifies the errors of a few tokens. This, the participation number, is the
    number of rows if all errors are equal, and 1 if one row carries all of it.
    """
    difference = mapped(actual).to(torch.float64) - mapped(exact)
    if difference.dim() < 2:  # each element is a row
        difference = difference.reshape(-1, 1)
    rows = torch.linalg.vector_norm(difference, dim=-1)
    return _participation(rows.square())


def independent_lines(actual: Readable, exact: Readable) -> int:
    """Count the rows or the columns of gradients that carry their error, whichever are fewer: see `independent_rows`.

    Both tensors are `(passes, *shape)` of one parameter.

    The gradient of a matrix is a sum over tokens of products of two vectors. Elements of a row share one of them,
    those of a column the other, so it has no more independent errors than the fewer of both; each is itself a sum over
    all tokens. A vector is one row: its elements may be off by one common factor. Gradients of separate passes share
    none.
    """
    passes, *shape = actual.shape
    # a vector is one row; of a tensor of more dimensions the first one has the rows
    rows, columns = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    actual_elements, exact_elements = elements_of(actual), elements_of(exact)
    row_energies, column_energies = [], []
    for index in range(passes):
        by_row, by_column = _energies(actual_elements, exact_elements, index * rows * columns, (rows, columns))
        row_energies.append(by_row)
        column_energies.append(by_column)
    return min(_participation(torch.cat(energies)) for energies in (row_energies, column_energies))


_ELEMENTS_AT_ONCE = 1 << 22
"""Elements of a gradient that are compared at once: 32 MiB of float64, for gradients of any size."""


def _energies(
    actual: Elements, exact: Elements, start: int, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the squared error of each row and of each column of the matrix that starts at an element."""
    rows, columns = shape
    step = max(1, _ELEMENTS_AT_ONCE // max(1, columns))
    by_row, by_column = [torch.zeros(0, dtype=torch.float64)], torch.zeros(columns, dtype=torch.float64)
    for row in range(0, rows, step):
        count = min(rows - row, step)
        part = slice(start + row * columns, start + (row + count) * columns)
        squares = _difference(actual(part), exact(part)).square_().view(count, columns)
        by_row.append(squares.sum(1))
        by_column += squares.sum(0)
        del squares  # before the next ones are made
    return torch.cat(by_row), by_column


def _difference(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Subtract in float64, in a frame of its own: the part that was read of a file is freed before the next is read."""
    return actual.to(torch.float64, copy=True).sub_(exact)


def _participation(energy: torch.Tensor) -> int:
    """Return how many squared errors carry their sum: all if they are equal, 1 if one carries it alone.

    Errors that are not finite count for nothing; where there is no error, all count.
    """
    energy = energy.nan_to_num(posinf=0.0)
    if not bool(energy.any()):
        return max(1, energy.numel())
    return max(1, int(energy.sum().square() / energy.square().sum()))
