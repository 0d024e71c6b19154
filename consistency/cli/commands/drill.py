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
    from consistency.cli.drill import print_drill
    from consistency.cli.progress import progress
    from consistency.report.console import make_console
    from consistency.workflows.drill import choose, drill

    with progress() as watch:
        rows = drill(choose(parsed.only), out=parsed.out, watch=watch, replace=parsed.force)
    if parsed.json:
        print_json(rows)
    else:
        print_drill(rows, make_console())
    return 0 if all(row.passed for row in rows) else 1
