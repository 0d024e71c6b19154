"""`consistency history`: past runs."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from consistency.cli.output import print_json

if TYPE_CHECKING:
    from consistency.comparison.history.store import History

EXAMPLES = (
    ("the last thirty runs", "consistency history ./history"),
    ("a page of the last thirty runs", "consistency history ./history --html history.html"),
    ("one device over time", "consistency history ./history --device cuda:0"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    history = command("history", _history, "list the runs of a history, or one device over time", EXAMPLES)
    history.add_argument("history", metavar="URL", help="as given to `consistency run --history`")
    history.add_argument("--device", metavar="NAME", help="one device over time: its UUID, or its name")
    history.add_argument("--case", metavar="NAME", help="one case of suites, with --device or --html")
    history.add_argument("--last", type=int, default=30, metavar="N", help="runs to show (default: 30; 0: all)")
    history.add_argument("--sql", metavar="QUERY", help="query by DuckDB (pip install 'peft-consistency[history]'), "
                         "of the tables nights and workers")  # fmt: skip
    history.add_argument("--html", type=Path, metavar="FILE",
                         help="write a page: one row per device, one column per run")  # fmt: skip
    history.add_argument("--json", action="store_true", help="print JSON")


def _history(parsed: argparse.Namespace) -> int:
    from consistency.comparison.history.store import History
    from consistency.report.console import make_console
    from consistency.report.history import DeviceRow, RunRow, device_rows, print_device, print_runs, run_rows

    history = History(parsed.history)
    history.require()
    if parsed.html is not None:
        return _page(parsed, history)
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


def _page(parsed: argparse.Namespace, history: History) -> int:
    from consistency.capture.whole_file import write_whole
    from consistency.report.history_page import history_as_html

    page = history_as_html(history, parsed.last, place=parsed.html.parent, device=parsed.device, case=parsed.case)
    write_whole(parsed.html, [page.encode()])
    for text in history.damage:
        print(f"damaged, left out: {text}", file=sys.stderr)
    print(f"page: {parsed.html}")
    return 0
