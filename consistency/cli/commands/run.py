"""`consistency run` and `consistency capture`: check a case on the devices of this host."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from consistency.case.options import OPTIONS, Edge, Options, add_options
from consistency.cli.output import add_format_options, add_report_options, print_json, read_baseline, show


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands."""
    run = command("run", _run, "check a case on every device and compare the results")
    _add_case(run)
    add_report_options(run, "folder for the reports (JSON, HTML, Markdown) and captures/")
    add_format_options(run)
    run.add_argument("--plan", action="store_true", help="print what the run will take of memory and time, and stop")
    run.add_argument("--history", metavar="URL", help="history of runs to compare with and append to")

    capture = command("capture", _capture, "record the results of this host's devices, without comparing")
    _add_case(capture)
    capture.add_argument("--out", metavar="DIR", required=True, help="folder, FILE.zip or URL for the capture")
    capture.add_argument("--force", action="store_true", help="replace an earlier capture in --out")
    capture.add_argument("--json", action="store_true", help="print what was captured as JSON")


def read_case(parsed: argparse.Namespace) -> Options:
    """Return the options that are given on the command line and in the file that it names."""
    from consistency.case.reading import gather_options

    given = {option.name: getattr(parsed, option.name, None) for option in OPTIONS}
    return gather_options(getattr(parsed, "config", None), given, Edge.COMMAND_LINE)


def _add_case(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is checked, and where").add_argument
    add("config", nargs="?", type=Path, metavar="CONFIG.toml", help="options by name; the command line wins")
    add_options(add, Edge.COMMAND_LINE)


def _run(parsed: argparse.Namespace) -> int:
    from consistency.cli.progress import progress
    from consistency.comparison.history.store import History
    from consistency.workflows import pipeline

    if parsed.plan:
        return _plan(parsed)
    history = None if parsed.history is None else History(parsed.history)
    baseline = read_baseline(parsed)
    plan = pipeline.prepare(read_case(parsed))
    with progress() as watch:
        report = pipeline.run(plan, parsed.out, watch=watch, replace=parsed.force, history=history, baseline=baseline)
    show(parsed, report.comparison, elapsed_s=report.elapsed_s)
    return report.exit_status


def _plan(parsed: argparse.Namespace) -> int:
    from consistency.case.preflight import prepare_case
    from consistency.devices.discovery import select
    from consistency.report import plan
    from consistency.workflows.planning import budget_of

    options = read_case(parsed)
    budget = budget_of(prepare_case(options), select(options.devices), threads=options.threads, timed=True)
    if parsed.json:
        print_json(plan.as_table(budget))
    else:
        print(plan.render(budget), end="")
    return 0


def _capture(parsed: argparse.Namespace) -> int:
    from consistency.cli.progress import progress
    from consistency.workflows import pipeline

    plan = pipeline.prepare(read_case(parsed))
    with progress() as watch:
        found = pipeline.capture_to(plan, parsed.out, watch=watch, replace=parsed.force)
    rows = [
        {
            "name": worker.info.name,
            "road": worker.info.load_path,
            "status": worker.info.status,
            "reason": worker.info.reason,
            "tensors": len(worker.records),
        }
        for worker in found.workers
    ]
    if parsed.json:
        print_json({"capture": parsed.out, "workers": rows})
    else:
        for row in rows:
            note = f": {row['reason']}" if row["reason"] else ""
            print(f"{row['name']} ({row['road']}): {row['status']}, {row['tensors']} tensors{note}")
        print(f"capture: {parsed.out}")
    return 0 if all(worker.info.status == "ok" for worker in found.workers) else 3
