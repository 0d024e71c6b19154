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
    rows = torch.linalg.vector_norm(difference if difference.dim() > 1 else difference.reshape(-1, 1), dim=-1)
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
    rows, columns = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    own, truth = elements_of(actual), elements_of(exact)
    few, many = [], []
    for index in range(passes):
        by_row, by_column = _energies(own, truth, index * rows * columns, (rows, columns))
        few.append(by_row)
        many.append(by_column)
    return min(_participation(torch.cat(parts)) for parts in (few, many))


_ELEMENTS_AT_ONCE = 1 << 22
"""Elements at once: 32 MiB of float64, for gradients of any size."""


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
        del squares  # before there are others
    return torch.cat(by_row), by_column


def _difference(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Subtract in a frame of its own: what was read of a file goes before anything else is."""
    return actual.to(torch.float64, copy=True).sub_(exact)


def _participation(energy: torch.Tensor) -> int:
    """Return how many of these carry their sum: all if they are equal, 1 if one carries it alone."""
    energy = energy.nan_to_num(posinf=0.0)
    return max(1, int(energy.sum().square() / energy.square().sum())) if bool(energy.any()) else max(1, energy.numel())
