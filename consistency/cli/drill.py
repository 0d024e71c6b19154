"""Print the outcome of `consistency drill`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from consistency.report.terminal import without_trailing_blanks
from consistency.report.text import clean
from consistency.workflows.drill import DrillRow


def print_drill(rows: Sequence[DrillRow], console: Console) -> None:
    """Print the outcome of each planted fault."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("fault", "case", "planted in", "expected", "named", "", "finding"):
        table.add_column(title, header_style="bold", overflow="fold")
    for row in rows:
        outcome = "found" if row.passed else "NOT FOUND" if not row.found else "NOT NAMED"
        cells = (row.fault, row.case or "", row.worker, row.expected, row.named or "nothing", outcome, row.message)
        table.add_row(*(Text(clean(cell)) for cell in cells))
    with without_trailing_blanks(console):
        console.print(table)
        passed = sum(row.passed for row in rows)
        console.print(f"\n{passed} of {len(rows)} planted faults found and named")
