"""The tolerance report as CSV, for a spreadsheet: a line per tensor and architecture, with full figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator

from consistency.comparison.layers import LayerComparison
from consistency.numerics.real import Real
from consistency.text import one_line

COLUMNS = (
    "stage", "load_path", "layer", "tensor", "architecture", "workers", "status", "max_abs", "allowed", "ratio",
    "max_ulp", "classes",
)  # fmt: skip

_FORMULA = ("=", "+", "-", "@")
"""How a cell begins that a spreadsheet computes: names may come from a stranger."""


def render(layers: Iterable[LayerComparison]) -> Iterator[bytes]:
    """Yield the titles, and the lines of each tensor; workers of one class are bitwise equal."""
    yield _line(COLUMNS)
    for one in layers:
        for architecture, cell in one.architectures.items():
            names = (one.stage, one.load_path, one.layer, one.tensor, architecture, " ".join(cell.workers), cell.status)
            figures = (cell.max_abs, cell.allowed, cell.ratio, cell.max_ulp)
            classes = " | ".join(" ".join(workers) for workers in cell.classes)
            yield _line([*map(_text, names), *map(_figure, figures), _text(classes)])


def _line(cells: Iterable[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _text(name: str) -> str:
    text = one_line(name)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _figure(value: Real | int | None) -> str:
    return "" if value is None else repr(value) if isinstance(value, int) else repr(float(value))
