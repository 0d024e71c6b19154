"""The transfer matrix of the page: every kind of copy of each ordered pair, and how fast it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from consistency.comparison.findings.transfers import Cell, matrices
from consistency.comparison.result import TensorComparison
from consistency.report.copy_matrix import cell_mark
from consistency.report.text import one_line

_STATUS = {"=": "equal", "✗": "outside", "–": "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyText:
    """One kind of copy."""

    kind: str
    status: str
    mark: str
    gb_per_s: str = ""
    word: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairText:
    """All kinds of copy from one device to another."""

    status: str
    copies: tuple[CopyText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixText:
    """A machine's pairs; `home` is empty where one capture is shown."""

    home: str
    places: tuple[str, ...]
    pairs: dict[tuple[str, str], PairText]


def matrix_texts(tensors: Iterable[TensorComparison]) -> list[MatrixText]:
    """Return one matrix per machine, cell by cell what the terminal's matrix says."""
    return [
        MatrixText(
            home=one_line(matrix.home),
            places=tuple(map(one_line, matrix.places)),
            pairs={
                (one_line(source), one_line(destination)): PairText(
                    status=_STATUS[cell_mark(cell)], copies=tuple(_copies(cell))
                )
                for (source, destination), cell in matrix.cells.items()
            },
        )
        for matrix in matrices(tensors)
    ]


def _copies(cell: Cell) -> Iterator[CopyText]:
    for kind in cell.kinds:
        if kind in cell.own:
            mark, word = "✗", cell.word_of(kind).value
        elif kind in cell.wrong:
            mark, word = "–", "wrong on one of its hops"
        else:
            mark, word = ("=", "") if kind in cell.tried else ("–", cell.skipped[kind])
        speed = cell.speeds.get(kind)
        yield CopyText(
            kind=one_line(kind),
            status=_STATUS[mark],
            mark=mark,
            gb_per_s="" if speed is None else f"{speed:.3g} GB/s",
            word=one_line(word),
        )
