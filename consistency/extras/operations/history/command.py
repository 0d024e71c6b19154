"""`consistency history` and `consistency baseline`: past runs, and the findings that are accepted."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from consistency.capture.wording import counted, when
from consistency.cli.output import print_json
from consistency.cli.parser import BAD_USE, adder
from consistency.errors import UsageError
from consistency.text import one_line

if TYPE_CHECKING:
    from rich.console import Console

    from consistency.extras.operations.history.store import History
    from consistency.extras.operations.history.table import ChangeRow, DeviceRow, RunRow


_LAST = 30

EXAMPLES = (
    ("the last thirty runs", "consistency history ./history"),
    ("a page of the last thirty runs", "consistency history ./history --html history.html"),
    ("one device over time", "consistency history ./history --device cuda:0"),
    ("what changed, and since when", "consistency history ./history --changes"),
    ("remove what is older than a year", "consistency history ./history --keep-days 365"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands."""
    statuses = {0: "printed, written or removed, whatever the verdicts are", **BAD_USE}
    about = "list the runs of a history, or one device over time"
    history = command("history", _history, about, EXAMPLES, statuses=statuses)
    history.add_argument("history", metavar="URL", help="as given to `consistency run --history`")
    history.add_argument("--device", metavar="NAME", help="one device over time: its UUID, or its name")
    history.add_argument("--case", metavar="NAME", help="one case of suites, with --device or --html")
    history.add_argument(
        "--changes",
        action="store_true",
        help="what changed, and since when: drift, software, inputs, lost workers, missing devices",
    )
    history.add_argument("--last", type=int, metavar="N", help="runs to show (default: 30, all with --changes; 0: all)")
    history.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page: one row per device, one column per run"
    )
    keep = history.add_argument_group("remove old runs (nothing is removed without these)").add_argument
    keep("--keep-runs", type=int, metavar="N", help="remove all but the last N runs of each host and case")
    keep(
        "--keep-days",
        type=float,
        metavar="N",
        help="remove runs older than N days; with --keep-runs, only runs that both options would remove",
    )
    keep("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    history.add_argument("--json", action="store_true", help="print JSON")
    _add_baseline(command)


def _history(parsed: argparse.Namespace) -> int:
    from consistency.extras.operations.history.store import History
    from consistency.report.console import make_console

    history = History(parsed.history)
    history.require()
    if parsed.keep_runs is not None or parsed.keep_days is not None:
        return _remove(parsed, history)
    if parsed.dry_run:
        raise UsageError("nothing is removed", where="--dry-run", wanted="--keep-runs or --keep-days")
    if parsed.html is not None:
        return _write_page(parsed, history)
    rows, print_table = _read_rows(parsed, history)
    if parsed.json:
        heading = "changes" if parsed.changes else "rows"
        print_json({heading: rows, "damaged": history.damage})
        return 0
    print_table(make_console())
    _print_damage(history)
    return 0


def _read_rows(
    parsed: argparse.Namespace, history: History
) -> tuple[list[RunRow] | list[DeviceRow] | list[ChangeRow], Callable[[Console], None]]:
    """Return the changes, the runs or the one device that is asked for, and what prints them as a table."""
    from consistency.extras.operations.history import table

    last = _LAST if parsed.last is None else parsed.last
    if parsed.changes:
        if parsed.device is not None:
            raise UsageError("--changes is of all devices", where="--device", got=parsed.device)
        changes = table.change_rows(history, parsed.last or 0)
        return changes, functools.partial(table.print_changes, changes)
    if parsed.device is None:
        runs = table.run_rows(history, last)
        return runs, functools.partial(table.print_runs, runs)
    rows = table.device_rows(history, parsed.device, last, parsed.case)
    return rows, functools.partial(table.print_device, rows, parsed.device)


def _remove(parsed: argparse.Namespace, history: History) -> int:
    from consistency.extras.operations.history.retention import remove_old

    removal = remove_old(history, keep_runs=parsed.keep_runs, keep_days=parsed.keep_days, dry_run=parsed.dry_run)
    if parsed.json:
        print_json(
            {
                "removed": [run.at for run in removal.runs],
                "kept_for_drift": [run.at for run in removal.kept_for_drift],
                "kept": removal.kept,
                "files": removal.files,
            }
        )
        return 0
    verb = "would remove" if parsed.dry_run else "removed"
    span = ""
    if removal.runs:
        span = f", {removal.runs[0].at[:10]} to {removal.runs[-1].at[:10]}"
    print(f"{verb} {counted(len(removal.runs), 'run')}{span}, and {counted(removal.files, 'file')} that no run names")
    for run in removal.kept_for_drift:
        print(f"kept: the run of {when(run.at)}, with which a device that drifts is compared")
    print(f"{counted(removal.kept, 'run')} left")
    return 0


def _write_page(parsed: argparse.Namespace, history: History) -> int:
    from consistency.capture.whole_file import write_whole
    from consistency.extras.operations.history.page import history_as_html

    last = _LAST if parsed.last is None else parsed.last
    page = history_as_html(history, last, place=parsed.html.parent, device=parsed.device, case=parsed.case)
    write_whole(parsed.html, [page.encode()])
    _print_damage(history)
    print(f"page: {parsed.html}")
    return 0


def _print_damage(history: History) -> None:
    """Name damaged runs where a table or a page was printed without them."""
    for text in history.damage:
        print(one_line(f"damaged, left out: {text}"), file=sys.stderr)


ACCEPT_EXAMPLES = (
    (
        "accept the second finding of a run",
        'consistency baseline accept run-1 --baseline accepted.json --finding 2 --reason "driver bug, reported"',
    ),
)
INIT_EXAMPLES = (("a baseline that accepts nothing yet", "consistency baseline init accepted.json"),)


def _add_baseline(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `baseline` with its two actions."""
    about = "accept findings of a report, so that only new ones fail a run"
    examples = (*INIT_EXAMPLES, *ACCEPT_EXAMPLES)
    statuses = {0: "written", **BAD_USE}
    baseline = command("baseline", _accept, about, examples, statuses=statuses)
    action = adder(baseline.add_subparsers(title="actions", required=True, metavar="ACTION"), of_all=statuses)

    init = action("init", _init, "write an empty baseline", INIT_EXAMPLES)
    init.add_argument("baseline", type=Path, metavar="FILE", help="the file to write; it must not exist")

    about = "add findings of a report to a baseline, which is created if it does not exist"
    accept = action("accept", _accept, about, ACCEPT_EXAMPLES)
    accept.add_argument(
        "report",
        type=Path,
        metavar="REPORT",
        help="report.json, or the --out folder of a run; of dated runs, the latest",
    )
    accept.add_argument("--baseline", type=Path, required=True, metavar="FILE", help="the file to add to")
    accept.add_argument("--reason", required=True, metavar="TEXT", help="why it is accepted")
    accept.add_argument(
        "--finding",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="number of the finding, from 1; may be repeated (default: every error)",
    )


def _init(parsed: argparse.Namespace) -> int:
    from consistency.extras.operations.history.baseline import init_baseline

    init_baseline(parsed.baseline)
    print(f"baseline: {parsed.baseline}, which accepts nothing yet")
    return 0


def _accept(parsed: argparse.Namespace) -> int:
    from consistency.extras.operations.history.baseline import accept
    from consistency.text import one_line
    from consistency.workflows.report_folder import read_comparison

    report, _ = read_comparison(parsed.report)
    added = accept(parsed.baseline, report.findings, report.workers, reason=parsed.reason, numbers=parsed.finding)
    for entry in added:
        print(one_line(f"accepted: {entry.message}"))
    print(f"baseline: {parsed.baseline}")
    return 0
