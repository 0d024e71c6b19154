"""`consistency drill`: plant faults and check that each is found and named."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from consistency.cli.output import add_output_options, print_json


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command("drill", _drill, "plant one fault at a time, and check that each is found and named")
    parser.add_argument("--only", action="append", default=[], metavar="FAULT", help="only this fault; may be repeated")
    add_output_options(parser, "folder for the reports, in one folder per fault", json="print the rows as JSON")


def _drill(parsed: argparse.Namespace) -> int:
    from consistency.cli.progress import progress
    from consistency.report.console import make_console, plain_cells, print_table, without_trailing_blanks
    from consistency.workflows.drill import choose, drill

    with progress() as watch:
        rows = drill(choose(parsed.only), out=parsed.out, watch=watch, replace=parsed.force)
    if parsed.json:
        print_json(rows)
    else:
        cells = [
            plain_cells(
                row.fault, row.case, row.worker, row.expected, row.named or "nothing",
                "found" if row.passed else "NOT NAMED" if row.found else "NOT FOUND", row.message,
            )
            for row in rows
        ]  # fmt: skip
        with without_trailing_blanks(console := make_console()):
            print_table(console, ("fault", "case", "planted in", "expected", "named", "", "finding"), cells)
            console.print(f"\n{sum(row.passed for row in rows)} of {len(rows)} planted faults found and named")
    return 0 if all(row.passed for row in rows) else 1
