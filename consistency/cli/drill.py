"""Print the outcome of `consistency drill`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from consistency.report.console import plain_cells, print_table, without_trailing_blanks
from consistency.workflows.drill import DrillRow


def print_drill(rows: Sequence[DrillRow], console: Console) -> None:
    """Print the outcome of each planted fault."""
    cells = []
    for row in rows:
        outcome = "found" if row.passed else "NOT FOUND" if not row.found else "NOT NAMED"
        named = row.named or "nothing"
        cells.append(plain_cells(row.fault, row.case, row.worker, row.expected, named, outcome, row.message))
    with without_trailing_blanks(console):
        print_table(console, ("fault", "case", "planted in", "expected", "named", "", "finding"), cells)
        passed = sum(row.passed for row in rows)
        console.print(f"\n{passed} of {len(rows)} planted faults found and named")
