"""`consistency baseline init` and `consistency baseline accept`: the findings that are accepted."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from consistency.cli.parser import adder

ACCEPT_EXAMPLES = (
    (
        "accept the second finding of a run",
        'consistency baseline accept run-1 --baseline accepted.json --finding 2 --reason "driver bug, reported"',
    ),
)
INIT_EXAMPLES = (("a baseline that accepts nothing yet", "consistency baseline init accepted.json"),)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command, with its two actions."""
    text = "accept findings of a report, so that only new ones fail a run"
    baseline = command("baseline", _accept, text, (*INIT_EXAMPLES, *ACCEPT_EXAMPLES))
    action = adder(baseline.add_subparsers(title="actions", required=True, metavar="ACTION"), of="baseline")

    init = action("init", _init, "write an empty baseline", INIT_EXAMPLES)
    init.add_argument("baseline", type=Path, metavar="FILE", help="the file to write; it must not exist")

    text = "add findings of a report to a baseline, which is created if it does not exist"
    accept = action("accept", _accept, text, ACCEPT_EXAMPLES)
    accept.add_argument("report", type=Path, metavar="REPORT",
                        help="report.json, or the --out folder of a run; of dated runs, the latest")  # fmt: skip
    accept.add_argument("--baseline", type=Path, required=True, metavar="FILE", help="the file to add to")
    accept.add_argument("--reason", required=True, metavar="TEXT", help="why it is accepted")
    accept.add_argument("--finding", type=int, action="append", default=[], metavar="N",
                        help="number of the finding, from 1; may be repeated (default: every error)")  # fmt: skip


def _init(parsed: argparse.Namespace) -> int:
    from consistency.comparison.history.baseline import init_baseline

    init_baseline(parsed.baseline)
    print(f"baseline: {parsed.baseline}, which accepts nothing yet")
    return 0


def _accept(parsed: argparse.Namespace) -> int:
    from consistency.comparison.history.baseline import accept
    from consistency.text import one_line
    from consistency.workflows.report_folder import read_comparison

    report, _ = read_comparison(parsed.report)
    added = accept(parsed.baseline, report.findings, report.workers, reason=parsed.reason, numbers=parsed.finding)
    for entry in added:
        print(one_line(f"accepted: {entry.message}"))
    print(f"baseline: {parsed.baseline}")
    return 0
