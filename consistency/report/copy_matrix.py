"""The matrix of copies between devices, as a person reads it at a glance: a mark and GB/s for each ordered pair."""

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
"""Columns: twelve of some eleven characters are as wide as a pipe is taken to be."""

_MOST_MATRICES = 4


def write_matrices(write: Writer, tensors: Iterable[TensorComparison]) -> None:
    """Write the matrices that say something: of several devices, or of copies that go wrong.

    Of several machines only those with wrong copies, and few of them: the findings name them all.
    """
    found = matrices(tensors)
    shown = [m for m in found if m.wrong or (len(found) == 1 and sum(name != HOST for name in m.places) > 1)]
    for matrix in shown[:_MOST_MATRICES]:
        places = shown_places(matrix)
        titles = [write.text(name, "bold") for name in places]
        rows = [
            (title, [_cell(write, matrix.cells.get((source, destination))) for destination in places])
            for source, title in zip(places, titles, strict=True)
        ]
        write.grid(titles, rows, corner=write.text(f"copies {matrix.home}".rstrip(), "bold"))
        if rest := and_more(len(matrix.places) - len(places), "device"):
            write.line(f"{rest}: report.json has all of them", style="dim")
        write.line("from row to column; GB/s of the largest direct copy, while other workers copy too", style="dim")
        write.console.print()


def shown_places(matrix: Matrix) -> tuple[str, ...]:
    """Return the places that have room: all, or those of wrong copies before others."""
    if len(matrix.places) <= MOST_PLACES:
        return matrix.places
    concerned = {name for pair in matrix.wrong for name in pair} | {HOST}
    ranked = sorted(matrix.places, key=lambda name: name not in concerned)[:MOST_PLACES]
    return tuple(name for name in matrix.places if name in ranked)


def cell_status(cell: Cell | None) -> str:
    """Return `equal`, `outside` or `skipped`."""
    return "skipped" if cell is None or not (cell.tried or cell.own) else "outside" if cell.own else "equal"


def copies(cell: Cell) -> Iterator[tuple[str, str, str, str]]:
    """Yield each kind of copy, its status, its speed, and its diagnosis or why it was not tried."""
    for kind in cell.kinds:
        if kind in cell.own:
            status, word = "outside", str(cell.word_of(kind))
        elif kind in cell.wrong:
            status, word = "skipped", "wrong on one of its hops"
        else:
            status, word = ("equal", "") if kind in cell.tried else ("skipped", cell.skipped[kind])
        speed = cell.speeds.get(kind)
        yield kind, status, "" if speed is None else f"{speed:.3g} GB/s", word


def _cell(write: Writer, cell: Cell | None) -> Text:
    """Return the mark and, where copies are right, their GB/s."""
    status = cell_status(cell)
    known = cell is not None and cell.gb_per_s is not None and not cell.own
    speed = f" {cell.gb_per_s:.3g}" if cell is not None and known else ""
    return write.text(f"{MARKS[status][0]}{speed}", style_of(status))
