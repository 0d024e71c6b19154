"""`consistency drill`: plant faults and check that each is found and named."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from consistency.cli.output import add_output_options, print_json

EXAMPLES = (
    ("every fault that this host has the devices for: minutes", "consistency drill"),
    ("the names of the faults", "consistency drill --list"),
    ("one fault, with its report", "consistency drill --only adapter-zeros --out drill-1"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command("drill", _drill, "plant one fault at a time, and check that each is found and named", EXAMPLES)
    parser.add_argument("--only", action="append", default=[], metavar="FAULT", help="only this fault; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the faults, and plant none")
    add_output_options(parser, "folder for the reports, in one folder per fault", json="print the rows as JSON")


def _drill(parsed: argparse.Namespace) -> int:
    from consistency.cli.progress import progress
    from consistency.report.console import make_console, plain_cells, print_table, without_trailing_blanks
    from consistency.workflows.drill import choose, drill

    if parsed.list:
        return _list(parsed)
    with progress(stages=False) as watch:
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


def _list(parsed: argparse.Namespace) -> int:
    from consistency.report.console import make_console, plain_cells, print_table, without_trailing_blanks
    from consistency.workflows.drill import listed

    rows = listed(parsed.only)
    if parsed.json:
        print_json(rows)
        return 0
    cells = [plain_cells(row.fault, row.case, ", ".join(row.stages), row.expected, row.needs) for row in rows]
    with without_trailing_blanks(console := make_console()):
        print_table(console, ("fault", "case", "found by stage", "expected finding", "needs"), cells)
    return 0
