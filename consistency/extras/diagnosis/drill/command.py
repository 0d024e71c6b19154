"""`consistency drill`: plant faults and check that each is found and named."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from consistency.case.options import Edge, add_options
from consistency.cli.commands.run import read_case
from consistency.cli.output import add_fail_fast_option, add_output_options, add_quiet_option, print_json
from consistency.cli.parser import BAD_USE

if TYPE_CHECKING:
    from consistency.case.named_adapters import NamedAdapter
    from consistency.case.options import Options
    from consistency.extras.diagnosis.drill.drill import DrillRow
    from consistency.worker.faults.fault import Fault
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
    from consistency.extras.diagnosis.drill.drill import choose, first_adapter
    from consistency.extras.diagnosis.drill.plantable import several_adapters
    from consistency.workflows.report_folder import refuse_archive

    if parsed.list:
        return _list(parsed)
    if parsed.out is not None:
        refuse_archive(parsed.out)
    options = dataclasses.replace(read_case(parsed), stall=parsed.stall or STALL_S)
    faults = choose(parsed.faults)
    first = first_adapter(options)
    # reports name the second adapter, so it is kept beside them
    adapter_folder = None if parsed.out is None else parsed.out.resolve() / "second-adapter"
    with nullcontext() if first is None else several_adapters(first, adapter_folder) as adapters:
        rows = _plant(parsed, faults, options, options.adapters or adapters)
    if parsed.json:
        print_json(rows)
    else:
        _print_rows(rows, fail_fast=parsed.fail_fast)
    return 0 if all(row.passed for row in rows if row.planted) else 1


def _plant(
    parsed: argparse.Namespace, faults: tuple[Fault, ...], options: Options, several: tuple[NamedAdapter, ...] | None
) -> tuple[DrillRow, ...]:
    """Plant faults in a case, and return their outcomes; `several` are the adapters for faults that take two."""
    from consistency.cli.progress import progress
    from consistency.extras.diagnosis.drill.drill import drill, is_own, plan_of, prepare_trials
    from consistency.workflows.suite import expected

    # a user's own case is run without a fault first, which takes time
    watching = progress(stages=False, quiet=parsed.quiet) if is_own(options) else nullcontext(_unwatched)
    with watching as watch:
        trials = prepare_trials(faults, options, several=several, watch=watch, out=parsed.out, replace=parsed.force)
    with progress(expected=expected(plan_of(trials)), quiet=parsed.quiet) as watch:
        return drill(trials, watch=watch, fail_fast=parsed.fail_fast, out=parsed.out, replace=parsed.force)


def _print_rows(rows: Sequence[DrillRow], *, fail_fast: bool) -> None:
    """Print a table of the faults, and how many were found."""
    from consistency.report.console import make_console, plain_cells, print_table, without_trailing_blanks

    cells = []
    for row in rows:
        nothing = "nothing" if row.planted else ""
        named = row.named or nothing
        cells.append(plain_cells(row.fault, row.case, row.worker, row.expected, named, _outcome(row), row.message))
    planted = [row for row in rows if row.planted]
    not_planted = len(rows) - len(planted)
    remark = ""
    if not_planted:
        why = "not planted" if fail_fast else "cannot be planted here"
        remark = f"; {not_planted} {why}"
    passed = sum(row.passed for row in planted)
    console = make_console()
    with without_trailing_blanks(console):
        print_table(console, ("fault", "case", "planted in", "expected", "named", "", "finding"), cells)
        console.print(f"\n{passed} of {len(planted)} planted faults found and named{remark}")


def _unwatched(_label: str, _event: Event) -> None:
    """Take no notice: nothing is run."""


def _outcome(row: DrillRow) -> str:
    """Return whether a fault was found, in words."""
    if not row.planted:
        return "not planted"
    if row.passed:
        return "found"
    return "NOT NAMED" if row.found else "NOT FOUND"


def _list(parsed: argparse.Namespace) -> int:
    """List the faults."""
    from consistency.extras.diagnosis.drill.drill import listed
    from consistency.report.console import make_console, plain_cells, print_table, without_trailing_blanks

    rows = listed(parsed.faults)
    if parsed.json:
        print_json(rows)
        return 0
    cells = [plain_cells(row.fault, row.case, ", ".join(row.stages), row.expected, row.needs) for row in rows]
    console = make_console()
    with without_trailing_blanks(console):
        print_table(console, ("fault", "case", "found by stage", "expected finding", "needs"), cells)
    return 0
