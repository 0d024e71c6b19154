"""The matrix of copies between devices in a terminal: a mark and GB/s for each ordered pair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.text import Text

from consistency.capture.names import HOST
from consistency.capture.wording import and_more
from consistency.comparison.findings.transfers import Cell, Matrix, matrices
from consistency.comparison.result import TensorComparison
from consistency.report.console import Writer
from consistency.report.marks import MARKS, style_of

MOST_PLACES = 12
"""Columns of a matrix: twelve of some eleven characters are as wide as a pipe is taken to be."""

_MOST_MATRICES = 4


def write_matrices(write: Writer, tensors: Iterable[TensorComparison]) -> None:
    """Write the matrices with wrong copies, or the only one, if it is of several devices.

    Of several machines only those with wrong copies are shown, and few of them: the findings name them all.
    """
    all_matrices = matrices(tensors)
    shown = []
    for matrix in all_matrices:
        devices = sum(name != HOST for name in matrix.places)
        if matrix.wrong or (len(all_matrices) == 1 and devices > 1):
            shown.append(matrix)
    for matrix in shown[:_MOST_MATRICES]:
        places = shown_places(matrix)
        titles = [write.text(name, "bold") for name in places]
        rows = []
        for source, title in zip(places, titles, strict=True):
            cells = [_cell(write, matrix.cells.get((source, destination))) for destination in places]
            rows.append((title, cells))
        write.grid(titles, rows, corner=write.text(f"copies {matrix.home}".rstrip(), "bold"))
        if left_out := and_more(len(matrix.places) - len(places), "device"):
            write.line(f"{left_out}: report.json has all of them", style="dim")
        write.line("from row to column; GB/s of the largest direct copy, while other workers copy too", style="dim")
        write.console.print()


def shown_places(matrix: Matrix) -> tuple[str, ...]:
    """Return the devices and the host, or of many, in their order, those for which there is room.

    The host and the ends of wrong copies have room before others.
    """
    if len(matrix.places) <= MOST_PLACES:
        return matrix.places
    first = {HOST}.union(*matrix.wrong)
    chosen = sorted(matrix.places, key=lambda name: name not in first)[:MOST_PLACES]
    return tuple(name for name in matrix.places if name in chosen)


def cell_status(cell: Cell | None) -> str:
    """Return `outside` where copies of this pair are wrong, `equal` where all are right, else `skipped`."""
    if cell is None or not (cell.tried or cell.own):
        return "skipped"
    return "outside" if cell.own else "equal"


def copies(cell: Cell) -> Iterator[tuple[str, str, str, str]]:
    """Yield each kind of copy, its status, its speed, and its diagnosis or why it was not tried."""
    for kind in cell.kinds:
        if kind in cell.own:
            status, remark = "outside", str(cell.word_of(kind))
        elif kind in cell.wrong:
            status, remark = "skipped", "wrong on one of its hops"
        elif kind in cell.tried:
            status, remark = "equal", ""
        else:
            status, remark = "skipped", cell.skipped[kind]
        speed = cell.speeds.get(kind)
        yield kind, status, "" if speed is None else f"{speed:.3g} GB/s", remark


def _cell(write: Writer, cell: Cell | None) -> Text:
    """Return the mark and, where copies are right, their GB/s."""
    status = cell_status(cell)
    text = MARKS[status][0]
    if cell is not None and cell.gb_per_s is not None and not cell.own:
        text += f" {cell.gb_per_s:.3g}"
    return write.text(text, style_of(status))
