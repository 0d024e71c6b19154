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
    from consistency.extras.operations.history.store import History


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
    from consistency.extras.operations.history.table import (
        ChangeRow,
        DeviceRow,
        RunRow,
        change_rows,
        device_rows,
        print_changes,
        print_device,
        print_runs,
        run_rows,
    )
    from consistency.report.console import make_console

    history = History(parsed.history)
    history.require()
    if parsed.keep_runs is not None or parsed.keep_days is not None:
        return _remove(parsed, history)
    if parsed.dry_run:
        raise UsageError("nothing is removed", where="--dry-run", wanted="--keep-runs or --keep-days")
    if parsed.html is not None:
        return _page(parsed, history)
    console = make_console()
    last = _LAST if parsed.last is None else parsed.last
    rows: list[RunRow] | list[DeviceRow] | list[ChangeRow]
    if parsed.changes:
        if parsed.device is not None:
            raise UsageError("--changes is of all devices", where="--device", got=parsed.device)
        rows = found = change_rows(history, parsed.last or 0)
        show = functools.partial(print_changes, found, console)
    elif parsed.device is None:
        rows = runs = run_rows(history, last)
        show = functools.partial(print_runs, runs, console)
    else:
        rows = devices = device_rows(history, parsed.device, last, parsed.case)
        show = functools.partial(print_device, devices, parsed.device, console)
    if parsed.json:
        print_json({"changes" if parsed.changes else "rows": rows, "damaged": history.damage})
        return 0
    show()
    _name_damage(history)
    return 0


def _remove(parsed: argparse.Namespace, history: History) -> int:
    from consistency.extras.operations.history.retention import remove_old

    found = remove_old(history, keep_runs=parsed.keep_runs, keep_days=parsed.keep_days, dry_run=parsed.dry_run)
    if parsed.json:
        names = [run.at for run in found.runs], [run.at for run in found.kept_for_drift]
        print_json({"removed": names[0], "kept_for_drift": names[1], "kept": found.kept, "files": found.files})
        return 0
    word = "would remove" if parsed.dry_run else "removed"
    span = f", {found.runs[0].at[:10]} to {found.runs[-1].at[:10]}" if found.runs else ""
    print(f"{word} {counted(len(found.runs), 'run')}{span}, and {counted(found.files, 'file')} that no run names")
    for run in found.kept_for_drift:
        print(f"kept: the run of {when(run.at)}, with which a device that drifts is compared")
    print(f"{counted(found.kept, 'run')} left")
    return 0


def _page(parsed: argparse.Namespace, history: History) -> int:
    from consistency.capture.whole_file import write_whole
    from consistency.extras.operations.history.page import history_as_html

    last = _LAST if parsed.last is None else parsed.last
    page = history_as_html(history, last, place=parsed.html.parent, device=parsed.device, case=parsed.case)
    write_whole(parsed.html, [page.encode()])
    _name_damage(history)
    print(f"page: {parsed.html}")
    return 0


def _name_damage(history: History) -> None:
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
    text = "accept findings of a report, so that only new ones fail a run"
    examples = (*INIT_EXAMPLES, *ACCEPT_EXAMPLES)
    statuses = {0: "written", **BAD_USE}
    baseline = command("baseline", _accept, text, examples, statuses=statuses)
    action = adder(baseline.add_subparsers(title="actions", required=True, metavar="ACTION"), of_all=statuses)

    init = action("init", _init, "write an empty baseline", INIT_EXAMPLES)
    init.add_argument("baseline", type=Path, metavar="FILE", help="the file to write; it must not exist")

    text = "add findings of a report to a baseline, which is created if it does not exist"
    accept = action("accept", _accept, text, ACCEPT_EXAMPLES)
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
