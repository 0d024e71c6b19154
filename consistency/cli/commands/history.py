"""`consistency history` and `consistency baseline accept`: past runs, and the findings that are accepted."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

from consistency.cli.output import print_json

HISTORY_EXAMPLES = (
    ("the last thirty runs", "consistency history ./history"),
    ("one device over time", "consistency history ./history --device cuda:0"),
)
BASELINE_EXAMPLES = (
    (
        "accept the second finding of a run",
        'consistency baseline accept run-1 --baseline accepted.json --finding 2 --reason "driver bug, reported"',
    ),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands."""
    history = command("history", _history, "list the runs of a history, or one device over time", HISTORY_EXAMPLES)
    history.add_argument("history", metavar="URL", help="as given to `consistency run --history`")
    history.add_argument("--device", metavar="NAME", help="one device over time: its UUID, or its name")
    history.add_argument("--case", metavar="NAME", help="one case of suites, with --device")
    history.add_argument("--last", type=int, default=30, metavar="N", help="runs to show (default: 30; 0: all)")
    history.add_argument("--sql", metavar="QUERY", help="query by DuckDB (pip install 'peft-consistency[history]'), "
                         "of the tables runs and workers")  # fmt: skip
    history.add_argument("--json", action="store_true", help="print JSON")

    text = "accept findings of a report, so that only new ones fail a run"
    baseline = command("baseline", _baseline, text, BASELINE_EXAMPLES)
    baseline.add_argument("action", choices=["accept"])
    baseline.add_argument("report", type=Path, metavar="REPORT", help="report.json, or the --out folder of a run")
    baseline.add_argument("--baseline", type=Path, required=True, metavar="FILE", help="the file to add to")
    baseline.add_argument("--reason", required=True, metavar="TEXT", help="why it is accepted")
    baseline.add_argument("--finding", type=int, action="append", default=[], metavar="N",
                          help="number of the finding, from 1; may be repeated (default: every error)")  # fmt: skip


def _history(parsed: argparse.Namespace) -> int:
    from consistency.comparison.history.store import History
    from consistency.report.console import make_console
    from consistency.report.history import DeviceRow, RunRow, device_rows, print_device, print_runs, run_rows

    history = History(parsed.history)
    if parsed.sql:
        from consistency.comparison.history.sql import query

        print_json(query(history, parsed.sql))
        return 0
    console = make_console()
    rows: list[RunRow] | list[DeviceRow]
    if parsed.device is None:
        rows = runs = run_rows(history, parsed.last)
        show = functools.partial(print_runs, runs, console)
    else:
        rows = devices = device_rows(history, parsed.device, parsed.last, parsed.case)
        show = functools.partial(print_device, devices, parsed.device, console)
    if parsed.json:
        print_json({"rows": rows, "damaged": history.damage})
        return 0
    show()
    for text in history.damage:
        print(f"damaged, left out: {text}", file=sys.stderr)
    return 0


def _baseline(parsed: argparse.Namespace) -> int:
    from consistency.comparison.history.baseline import accept
    from consistency.report.text import clean
    from consistency.workflows.reproduce.evidence import read_report

    head, _ = read_report(parsed.report)
    added = accept(parsed.baseline, head.findings, head.workers, reason=parsed.reason, numbers=parsed.finding)
    for entry in added:
        print(clean(f"accepted: {entry.message}"))
    print(f"baseline: {parsed.baseline}")
    return 0
