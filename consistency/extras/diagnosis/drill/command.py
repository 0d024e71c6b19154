"""`consistency drill`: plant faults and check that each is found and named."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from consistency.case.options import Edge, add_options
from consistency.cli.commands.run import read_case
from consistency.cli.output import add_fail_fast_option, add_output_options, add_quiet_option, print_json
from consistency.cli.parser import BAD_USE

if TYPE_CHECKING:
    from consistency.extras.diagnosis.drill.drill import DrillRow
    from consistency.worker.protocol import Event

STALL_S = 30.0
"""A hung worker is given up after this; importing torch from a slow disk takes less."""

_OPTIONS = ("base", "adapter", "devices", "dtype", "allow_pickle", "trust_remote_code", "timeout", "threads")

EXAMPLES = (
    ("every fault that this host has the devices for: minutes", "consistency drill"),
    ("the names of the faults", "consistency drill --list"),
    ("every fault that applies to a case of your own", "consistency drill --base ./llama --adapter ./my-lora"),
    ("one fault, with its report", "consistency drill --only adapter-zeros --out drill-1"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    statuses = {0: "every planted fault was found and named", 1: "one was not", **BAD_USE}
    parser = command(
        "drill",
        _drill,
        "plant one fault at a time, and check that each is found and named",
        EXAMPLES,
        statuses=statuses,
    )
    parser.add_argument(
        "--only", dest="faults", action="append", default=[], metavar="FAULT", help="only this fault; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="list the faults, and plant none")
    add_options(parser.add_argument, Edge.COMMAND_LINE, only=_OPTIONS, one_case=True)
    parser.add_argument(
        "--stall",
        type=float,
        metavar="S",
        help=f"seconds a worker may be silent; some of the faults hang on purpose (default: {STALL_S:g})",
    )
    add_output_options(parser, "folder for the reports, in one folder per fault", json="print the rows as JSON")
    add_fail_fast_option(parser, "the first fault that is not found and named")
    add_quiet_option(parser)


def _drill(parsed: argparse.Namespace) -> int:
    from consistency.cli.progress import progress
    from consistency.extras.diagnosis.drill.drill import choose, drill, first_adapter, is_own, plan_of, prepare_trials
    from consistency.extras.diagnosis.drill.plantable import several_adapters
    from consistency.report.console import make_console, plain_cells, print_table, without_trailing_blanks
    from consistency.workflows.report_folder import refuse_archive
    from consistency.workflows.suite import expected

    if parsed.list:
        return _list(parsed)
    if parsed.out is not None:
        refuse_archive(parsed.out)
    options = dataclasses.replace(read_case(parsed), stall=parsed.stall or STALL_S)
    faults, folder = choose(parsed.faults), {"out": parsed.out, "replace": parsed.force}
    own = is_own(options)
    first = first_adapter(options)
    keep = None if parsed.out is None else parsed.out.resolve() / "second-adapter"  # which reports name
    with nullcontext() if first is None else several_adapters(first, keep) as second:
        several = options.adapters or second
        with progress(stages=False, quiet=parsed.quiet) if own else nullcontext(_unwatched) as watch:
            trials = prepare_trials(faults, options, several=several, watch=watch, **folder)
        with progress(expected=expected(plan_of(trials)), quiet=parsed.quiet) as watch:
            rows = drill(trials, watch=watch, fail_fast=parsed.fail_fast, **folder)
    planted = [row for row in rows if row.planted]
    if parsed.json:
        print_json(rows)
    else:
        cells = [
            plain_cells(
                row.fault,
                row.case,
                row.worker,
                row.expected,
                row.named or ("nothing" if row.planted else ""),
                _outcome(row),
                row.message,
            )
            for row in rows
        ]
        with without_trailing_blanks(console := make_console()):
            print_table(console, ("fault", "case", "planted in", "expected", "named", "", "finding"), cells)
            rest = len(rows) - len(planted)
            left_out = f"; {rest} {'not planted' if parsed.fail_fast else 'cannot be planted here'}" if rest else ""
            found = sum(row.passed for row in planted)
            console.print(f"\n{found} of {len(planted)} planted faults found and named{left_out}")
    return 0 if all(row.passed for row in planted) else 1


def _unwatched(_label: str, _event: Event) -> None:
    """Take no notice: nothing is run."""


def _outcome(row: DrillRow) -> str:
    if not row.planted:
        return "not planted"
    return "found" if row.passed else "NOT NAMED" if row.found else "NOT FOUND"


def _list(parsed: argparse.Namespace) -> int:
    from consistency.extras.diagnosis.drill.drill import listed
    from consistency.report.console import make_console, plain_cells, print_table, without_trailing_blanks

    rows = listed(parsed.faults)
    if parsed.json:
        print_json(rows)
        return 0
    cells = [plain_cells(row.fault, row.case, ", ".join(row.stages), row.expected, row.needs) for row in rows]
    with without_trailing_blanks(console := make_console()):
        print_table(console, ("fault", "case", "found by stage", "expected finding", "needs"), cells)
    return 0
