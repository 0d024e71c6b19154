"""`consistency run` and `consistency capture`: check a case on the devices of this host."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consistency.case.options import OPTIONS, Edge, Options, add_options
from consistency.cli.output import (
    add_fail_fast_option,
    add_format_options,
    add_history_option,
    add_quiet_option,
    add_report_options,
    check_formats,
    print_json,
    read_past,
    show,
)
from consistency.errors import ConsistencyError, UsageError
from consistency.report.runs import dated, telling_refusal
from consistency.text import one_line

if TYPE_CHECKING:
    from consistency.capture.folder import WorkerCapture
    from consistency.case.requirements import Requirements
    from consistency.case.suite import SuiteOptions
    from consistency.workflows.past import Past

RUN_EXAMPLES = (
    ("the built-in case on every device", "consistency run"),
    ("a model and adapter of your own", "consistency run --base ./llama --adapter ./my-lora --out run-1"),
    (
        "two devices, in a half type",
        "consistency run --base ./llama --adapter ./my-lora --devices cpu,cuda:0 --dtype bfloat16",
    ),
    ("what it will take of memory", "consistency run --base ./llama --adapter ./my-lora --plan"),
    (
        "a tolerance of your own for some layers",
        'consistency run --tolerance "stage=merged,layer=*.q_proj,dtype=bfloat16,atol=1e-3,rtol=1e-2"',
    ),
    (
        "with an inference engine's outputs (see `consistency inputs --help`)",
        "consistency run --base ./llama --adapter ./my-lora --engine-outputs vllm=outputs.safetensors",
    ),
    ("every adapter of a folder", 'consistency run --base ./llama --adapter "adapters/*" --out suite-1'),
)
CAPTURE_EXAMPLES = (
    ("on each host", "consistency capture --base ./llama --adapter ./my-lora --out host-a"),
    ("as one file", "consistency capture --base ./llama --adapter ./my-lora --out host-a.zip"),
    ("then, anywhere", "consistency compare host-a host-b"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands."""
    run = command("run", _run, "check a case on every device and compare the results", RUN_EXAMPLES)
    _add_case(run)
    add_report_options(run, "folder for the reports (JSON, HTML, Markdown) and captures/")
    add_format_options(run)
    run.add_argument(
        "--plan",
        action="store_true",
        help="print what the run will take of memory, and stop; a "
        "suite with a case that cannot be checked is planned without it",
    )
    add_history_option(run)
    run.add_argument(
        "--dated",
        action=argparse.BooleanOptionalAction,
        help="leave each run in a folder of --out by date and time, OUT/2026-11-22T02-00-00Z (UTC), and a "
        "link to the last one, OUT/latest (default: with --history and without --force)",
    )

    _add_pace(run, "the first case of a suite that was run and is not consistent")
    text = "record the results of this host's devices, without comparing"
    capture = command("capture", _capture, text, CAPTURE_EXAMPLES)
    _add_case(capture, required="--out DIR")
    capture.add_argument("--out", metavar="DIR", required=True, help="folder, FILE.zip or URL for the capture")
    capture.add_argument("--force", action="store_true", help="replace an earlier capture in --out")
    capture.add_argument("--json", action="store_true", help="print what was captured as JSON")
    _add_pace(capture, "the first case of a suite that lost a worker, or whose input cannot be used")
    capture.add_argument("--progress", metavar="FILE", help="file or URL to write progress to, for `consistency fleet`")
    capture.add_argument(
        "--require",
        metavar="FILE",
        help="file or URL of `consistency fleet` with the files and accelerators that this host must have",
    )
    capture.add_argument(
        "--together",
        metavar="FILE",
        type=Path,
        help="file of `consistency fleet` with the nodes whose devices form one group with this host's",
    )


def read_case(parsed: argparse.Namespace) -> Options:
    """Return the options that are given on the command line and in the file that it names."""
    from consistency.case.reading import gather_options

    given = {option.name: getattr(parsed, option.name, None) for option in OPTIONS}
    return gather_options(getattr(parsed, "config", None), given, Edge.COMMAND_LINE)


def read_suite(parsed: argparse.Namespace) -> SuiteOptions | None:
    """Return the suite that command line and file describe, narrowed by `--case`; None if they describe one case."""
    from consistency.case.suite import gather_suite

    given = {option.name: getattr(parsed, option.name, None) for option in OPTIONS}
    suite = gather_suite(parsed.config, given, Edge.COMMAND_LINE)
    patterns: list[str] = []
    for text in parsed.case or ():
        patterns += [pattern.strip() for pattern in text.split(",") if pattern.strip()]
    if suite is None and patterns:
        raise UsageError("there is only one case", where="--case", wanted="a file with [[case]], or several adapters")
    return None if suite is None else suite.chosen(patterns)


def add_config(parser: argparse.ArgumentParser, text: str, required: str = "") -> None:
    """Add the file of options to a command that takes nearly all of them; its usage line leaves the options out."""
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help=text)
    parser.usage = " ".join(filter(None, ["%(prog)s", required, "[options] [CONFIG.toml]"]))


def _add_case(parser: argparse.ArgumentParser, required: str = "") -> None:
    """Add the options of a case; `required` are the options of the usage line."""
    add_config(parser, "options by name, and cases; the command line wins", required)
    add = parser.add_argument_group("what is checked, and where").add_argument
    add("--case", action="append", metavar="PATTERN", help="check only the cases of a suite with such a name")
    add_options(add, Edge.COMMAND_LINE)


def _add_pace(parser: argparse.ArgumentParser, stops_at: str) -> None:
    """Add the options of a command that runs workers; `stops_at` says what ends it with `--fail-fast`."""
    add_fail_fast_option(parser, stops_at)
    add_quiet_option(parser)


def _run(parsed: argparse.Namespace) -> int:
    """Run the command `run`."""
    check_formats(parsed)
    if parsed.plan:
        return _plan(parsed)
    # Without --force and dates --out must be empty: it has no earlier results to leave the reason of a refusal beside.
    may_hold_results = parsed.force or _by_date(parsed)
    with telling_refusal(parsed.out if may_hold_results else None):
        return _run_checked(parsed)


def _run_checked(parsed: argparse.Namespace) -> int:
    """Check a case or a suite, print the report, and return the exit status."""
    from consistency.case.preflight import case_name
    from consistency.cli.progress import progress
    from consistency.workflows import pipeline

    past = read_past(parsed)
    suite = read_suite(parsed)
    if suite is not None:
        return _run_suite(parsed, suite, past)
    options = read_case(parsed)
    with past.noted(case_name(options)):
        plan = pipeline.prepare(options)
    with _folder(parsed) as out, progress(expected=pipeline.expected(plan), quiet=parsed.quiet) as watch:
        report = pipeline.run(plan, out, watch=watch, replace=parsed.force, past=past)
    show(parsed, report.comparison, out, elapsed_s=report.elapsed_s)
    return report.exit_status


def _run_suite(parsed: argparse.Namespace, suite: SuiteOptions, past: Past) -> int:
    """Check a suite, print its report, and return the exit status."""
    from consistency.cli.progress import progress
    from consistency.workflows.suite import expected, prepare_suite, run_suite

    with past.noted(suite.name):
        cases = prepare_suite(suite)
    with _folder(parsed) as out, progress(expected=expected(cases), quiet=parsed.quiet) as watch:
        result = run_suite(cases, out, watch=watch, replace=parsed.force, past=past, fail_fast=parsed.fail_fast)
    show(parsed, result, out, elapsed_s=result.elapsed_s)
    return result.exit_status


def _folder(parsed: argparse.Namespace) -> AbstractContextManager[Path | None]:
    """Return the folder for the reports and captures of a run: `--out`, or a new one by date below it."""
    from consistency.workflows.report_folder import refuse_archive

    if parsed.out is not None:
        refuse_archive(parsed.out)
    if parsed.dated and parsed.out is None:
        raise UsageError("there is no folder for dated runs", where="--dated", hint="give --out DIR")
    if parsed.out is not None and _by_date(parsed):
        return dated(parsed.out)
    return nullcontext(parsed.out)


def _by_date(parsed: argparse.Namespace) -> bool:
    """Report whether each run is left in a folder by date; `--dated` decides, else it depends on `--history`."""
    if parsed.dated is not None:
        return bool(parsed.dated)
    return parsed.history is not None and not parsed.force


def _plan(parsed: argparse.Namespace) -> int:
    """Print what a case or a suite will take of memory, and return the exit status."""
    from consistency.case.preflight import prepare_case
    from consistency.devices.discovery import select
    from consistency.report import plan
    from consistency.workflows.planning import budget_of

    suite = read_suite(parsed)
    if suite is not None:
        return _plan_suite(parsed, suite)
    options = read_case(parsed)
    budget = budget_of(prepare_case(options), select(options.devices))
    if parsed.json:
        print_json(plan.as_table(budget))
    else:
        print(plan.render(budget), end="")
    return 0


def _plan_suite(parsed: argparse.Namespace, suite: SuiteOptions) -> int:
    """Print what the cases of a suite will take of memory; a case that cannot be checked has its error instead."""
    from consistency.devices.discovery import select
    from consistency.report import plan
    from consistency.workflows.planning import budgets_of, cases_at_once

    devices = select(suite.shared.devices)
    budgets = budgets_of(suite, devices)
    at_once = cases_at_once(suite, devices, budgets)
    if parsed.json:
        print_json(plan.suite_as_table(suite.name, budgets, at_once))
    else:
        print(plan.render_suite(suite.name, budgets, at_once), end="")
    no_case_can_run = all(isinstance(budget, ConsistencyError) for budget in budgets.values())
    return UsageError.exit_status if no_case_can_run else 0


def _capture(parsed: argparse.Namespace) -> int:
    """Run the command `capture`."""
    from consistency.capture.node_group import NodeGroup
    from consistency.cli.node_report import reporting
    from consistency.cli.progress import progress
    from consistency.workflows import pipeline

    suite = read_suite(parsed)
    if suite is not None:
        return _capture_suite(parsed, suite)
    with reporting(parsed.progress) as report:
        plan = pipeline.prepare(read_case(parsed))
        if report is not None:
            report.devices(plan.devices)
        if parsed.require is not None:
            required = read_requirements(parsed.require)
            required.check_devices(plan.devices)
            required.check_files(plan.case)
        if parsed.together is not None:
            limits = dataclasses.replace(plan.limits, together=NodeGroup.read(parsed.together))
            plan = dataclasses.replace(plan, limits=limits)
        expected = pipeline.expected(plan)
        with progress(expected=expected, quiet=parsed.quiet) as display:
            watch = display if report is None else report.beside(display, expected)
            capture = pipeline.capture_to(plan, parsed.out, watch=watch, replace=parsed.force)
    rows = _rows(capture.workers)
    if parsed.json:
        print_json({"capture": parsed.out, "workers": rows})
    else:
        _print_workers(rows)
        print(f"capture: {parsed.out}")
    return 0 if all(worker.info.status == "ok" for worker in capture.workers) else 3


def read_requirements(place: str) -> Requirements:
    """Read the file or URL in which a fleet states what a host must have; raise UsageError where it is damaged."""
    import msgspec

    from consistency.capture.json_codec import decode_json
    from consistency.capture.transport import read_bytes
    from consistency.case.requirements import Requirements

    try:
        return decode_json(read_bytes(place), Requirements)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError("not what a fleet requires of a host", where=place, got=error) from None


def _capture_suite(parsed: argparse.Namespace, suite: SuiteOptions) -> int:
    """Capture the cases of a suite, and return the exit status."""
    from consistency.capture.transport import travels
    from consistency.cli.progress import progress
    from consistency.workflows.suite import capture_suite, expected, prepare_suite

    if travels(parsed.out):
        raise UsageError("the captures of a suite need a folder", where="--out", got=parsed.out)
    if any(option is not None for option in (parsed.progress, parsed.require, parsed.together)):
        raise UsageError("a fleet checks one case", where="--progress, --require and --together", got="a suite")
    plan = prepare_suite(suite)
    with progress(expected=expected(plan), quiet=parsed.quiet) as watch:
        results = capture_suite(plan, Path(parsed.out), watch=watch, replace=parsed.force, fail_fast=parsed.fail_fast)
    if parsed.json:
        cases: dict[str, object] = {}
        for name, result in results.items():
            if isinstance(result, ConsistencyError):
                cases[name] = {"error": result.parts}
            else:
                cases[name] = {"workers": _rows(result)}
        print_json({"capture": parsed.out, "cases": cases})
    else:
        for name, result in results.items():
            if isinstance(result, ConsistencyError):
                print(f"{one_line(name)}: {result}")
            else:
                print(one_line(name))
                _print_workers(_rows(result), indent="  ")
        print(f"captures: {parsed.out}")
    return _suite_status(list(results.values()))


def _suite_status(results: Sequence[Sequence[WorkerCapture] | ConsistencyError]) -> int:
    """Return the exit status of the captures of a suite: a lost worker counts before a case that cannot be used."""
    status = 0
    for result in results:
        if isinstance(result, ConsistencyError):
            status = max(status, 2)
        elif any(worker.info.status != "ok" for worker in result):
            status = 3
    return status


def _rows(workers: Sequence[WorkerCapture]) -> list[dict[str, Any]]:
    """Return the row of each worker that is printed."""
    return [
        {
            "name": worker.info.name,
            "load_path": worker.info.load_path,
            "status": worker.info.status,
            "reason": worker.info.reason,
            "tensors": sum(map(len, worker.of_tensors)),
        }
        for worker in workers
    ]


def _print_workers(rows: Sequence[dict[str, Any]], *, indent: str = "") -> None:
    for row in rows:
        note = f": {row['reason']}" if row["reason"] else ""
        print(indent + one_line(f"{row['name']} ({row['load_path']}): {row['status']}, {row['tensors']} tensors{note}"))
