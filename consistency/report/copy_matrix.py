"""The matrix of copies between devices, as a person reads it at a glance: a mark and GB/s for each ordered pair."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from rich.table import Table
from rich.text import Text

from consistency.capture.names import HOST
from consistency.comparison.findings.transfers import Cell, Matrix, matrices
from consistency.comparison.result import TensorComparison

MOST_PLACES = 12
"""Columns: twelve of some eleven characters are as wide as a pipe is taken to be."""

_MOST_MATRICES = 4


def worth_showing(tensors: Iterable[TensorComparison]) -> list[Matrix]:
    """Return the matrices that say something: of several devices, or of copies that go wrong.

    Of several machines those alone that have wrong copies, and few of them: the findings name them all.
    """
    found = matrices(tensors)
    shown = [m for m in found if m.wrong or (len(found) == 1 and sum(name != HOST for name in m.places) > 1)]
    return shown[:_MOST_MATRICES]


def shown_places(matrix: Matrix) -> tuple[str, ...]:
    """Return the places that have room: all, or those of wrong copies before others."""
    if len(matrix.places) <= MOST_PLACES:
        return matrix.places
    concerned = {name for pair in matrix.wrong for name in pair} | {HOST}
    ranked = sorted(matrix.places, key=lambda name: name not in concerned)[:MOST_PLACES]
    return tuple(name for name in matrix.places if name in ranked)


def cell_mark(cell: Cell | None) -> str:
    """Return `=`, `✗` or `–`."""
    return "–" if cell is None or not (cell.tried or cell.own) else "✗" if cell.own else "="


def cell_text(cell: Cell | None) -> str:
    """Return the mark and, where copies are right, their GB/s."""
    if cell is None or cell.own or cell.gb_per_s is None:
        return cell_mark(cell)
    return f"{cell_mark(cell)} {cell.gb_per_s:.3g}"


def draw(matrix: Matrix, text: Callable[[str, str], Text], marks: Mapping[str, str]) -> Table:
    """Return the matrix as a table, a line per source and a column per destination.

    Parameters
    ----------
    matrix : Matrix
    text : callable
        Makes what the terminal can show of a string, in a style.
    marks : mapping
        What stands for `=`, `✗` and `–` there.
    """
    places = shown_places(matrix)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(text(f"copies {matrix.home}".rstrip(), "bold"), no_wrap=True)
    for name in places:
        table.add_column(text(name, "bold"), no_wrap=True)
    for source in places:
        cells = (matrix.cells.get((source, destination)) for destination in places)
        table.add_row(text(source, "bold"), *(_draw_cell(cell, text, marks) for cell in cells))
    return table


def _draw_cell(cell: Cell | None, text: Callable[[str, str], Text], marks: Mapping[str, str]) -> Text:
    mark, shown = cell_mark(cell), cell_text(cell)
    return text(shown.replace(mark, marks[mark], 1), {"=": "green", "✗": "bold red"}.get(mark, "dim"))


def legend(matrix: Matrix) -> Iterator[str]:
    """Say what the table shows, and what it leaves out."""
    left_out = len(matrix.places) - len(shown_places(matrix))
    if left_out:
        yield f"and {left_out} devices more: report.json has them all"
    yield "from the device of the line to that of the column; GB/s of the largest copy, others running beside it"
