"""The command line: options in, exit status out. Only this module prints and exits."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from consistency.capture.version import __version__
from consistency.case.options import OPTIONS, Edge, Options, add_options
from consistency.case.reading import gather_options
from consistency.cli.commands import bisect, history, reproduce
from consistency.devices.discovery import discover
from consistency.errors import ConsistencyError, InterruptedRunError, UsageError
from consistency.launch.process import Limits
from consistency.workflows import pipeline

if TYPE_CHECKING:
    from consistency.comparison.history.baseline import Baseline
    from consistency.comparison.result import Comparison

EPILOG = """\
exit status: 0 consistent, 1 inconsistent, 2 bad usage or bad input, 3 incomplete (a worker was lost)

examples:
  consistency run                                             the built-in case on every device
  consistency run --base ./llama --adapter ./my-lora --out night-1
  consistency run --devices cpu,cuda:0 --dtype bfloat16 --base ./llama --adapter ./my-lora
  consistency run --tolerance "stage=merged,layer=*.q_proj,dtype=bfloat16,atol=1e-3,rtol=1e-2"
  consistency capture --base ./llama --adapter ./my-lora --out box-a      on each machine, then
  consistency compare box-a box-b                                         anywhere
  consistency diff ./my-lora ./my-lora-copy                               two files or folders, no model code
  consistency doctor                                          this machine, without any model
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors look like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        parsed = build_parser().parse_args(arguments)
        return int(parsed.command(parsed))
    except ConsistencyError as error:
        _complain(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        stopped = InterruptedRunError("stopped: no worker is left, and no half-written capture")
        print(f"consistency: {stopped}", file=sys.stderr)
        return stopped.exit_status
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        _complain(f"{error.strerror or error}\n  where:  {error.filename or 'this machine'}")
        return 2


def _complain(text: str) -> None:
    from consistency.report.text import clean

    print(f"consistency: {clean(text)}", file=sys.stderr)  # paths and headers are quoted in it, and may be a stranger's


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = _Parser(
        prog="consistency",
        description="Tell whether the same base model and the same adapter are the same numbers on every device.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"consistency {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = _command(commands, "run", _run, "look at a case on every device and compare")
    _case_options(run)
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the reports (JSON, HTML, Markdown) and captures/"
    )
    _nightly_options(run)
    run.add_argument("--history", metavar="URL", help="nights that this run is held against and added to")
    run.add_argument("--baseline", type=Path, metavar="FILE", help="what is known (consistency baseline accept)")
    _report_options(run)

    capture = _command(commands, "capture", _capture, "write down what the devices of this machine see; do not compare")
    _case_options(capture)
    capture.add_argument("--out", metavar="DIR", required=True, help="folder, FILE.zip or URL for the capture")
    capture.add_argument("--force", action="store_true", help="replace an earlier capture in --out")
    capture.add_argument("--json", action="store_true", help="print what was captured as JSON")

    compare = _command(commands, "compare", _compare, "compare captures, also from several machines")
    compare.add_argument(
        "captures", nargs="+", metavar="DIR", help="a capture (folder, FILE.zip or URL), or the --out folder of a run"
    )
    compare.add_argument("--out", type=Path, metavar="DIR", help="folder for the report (JSON, HTML, Markdown)")
    compare.add_argument("--baseline", type=Path, metavar="FILE", help="what is known (consistency baseline accept)")
    _nightly_options(compare)
    _report_options(compare)

    diff = _command(commands, "diff", _diff, "hold two weight files, adapters or model folders against one another")
    diff.add_argument("reference", type=Path, metavar="A", help="safetensors file, index of shards, or folder")
    diff.add_argument("other", type=Path, metavar="B", help="what is held against A")
    diff.add_argument("--out", type=Path, metavar="DIR", help="folder for the report (JSON, HTML, Markdown)")
    diff.add_argument("--allow-pickle", action="store_true", help="read .bin weights, with weights_only=True")
    _report_options(diff)

    devices = _command(commands, "devices", _devices, "list the devices of this machine")
    devices.add_argument("--json", action="store_true", help="print JSON")

    doctor = _command(commands, "doctor", _doctor, "look at this machine without any model, and say what to mend first")
    add_options(doctor.add_argument, Edge.COMMAND_LINE, only=("devices", "level", "timeout", "stall"))
    doctor.add_argument("--out", type=Path, metavar="DIR", help="folder for report.json and captures/")
    doctor.add_argument("--force", action="store_true", help="replace an earlier run's results in --out")
    doctor.add_argument("--json", action="store_true", help="print JSON")

    drill = _command(commands, "drill", _drill, "plant one fault at a time, and see that each is found and named")
    drill.add_argument("--only", action="append", default=[], metavar="FAULT", help="this fault alone; may be repeated")
    drill.add_argument("--out", type=Path, metavar="DIR", help="DIR/FAULT/ gets each run's report")
    drill.add_argument("--force", action="store_true", help="replace an earlier drill's results in --out")
    drill.add_argument("--json", action="store_true", help="print the rows as JSON")

    for module in (reproduce, history, bisect):
        module.add(functools.partial(_command, commands))
    return parser


def _command(commands: Any, name: str, function: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=function)
    return parser


def _case_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is looked at").add_argument
    add("config", nargs="?", type=Path, metavar="CONFIG.toml", help="options by name; the command line wins")
    add_options(add, Edge.COMMAND_LINE)


def _nightly_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=["text", "json", "github"], default="text", help="how it is printed: for "
                        "people, as report.json, or with annotations of a GitHub Actions run")  # fmt: skip
    parser.add_argument("--junit", type=Path, metavar="FILE", help="verdict of each stage and worker as JUnit XML")


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace an earlier run's results in --out")
    parser.add_argument("--json", action="store_true", help="print report.json instead of the report for people")
    parser.add_argument("-v", "--verbose", action="store_true", help="show every layer, not only what is not equal")


def _options(parsed: argparse.Namespace) -> Options:
    given = {option.name: getattr(parsed, option.name, None) for option in OPTIONS}
    return gather_options(getattr(parsed, "config", None), given, Edge.COMMAND_LINE)


def _run(parsed: argparse.Namespace) -> int:
    from consistency.cli.progress import progress
    from consistency.comparison.history.store import History
    from consistency.report.terminal import make_console

    history = None if parsed.history is None else History(parsed.history)
    baseline = _baseline(parsed)
    plan = pipeline.prepare(_options(parsed))
    with progress(make_console(sys.stderr)) as watch:
        report = pipeline.run(plan, parsed.out, watch=watch, replace=parsed.force, history=history, baseline=baseline)
    _show(parsed, report.comparison, elapsed_s=report.elapsed_s)
    return report.exit_status


def _show(parsed: argparse.Namespace, comparison: Comparison, *, elapsed_s: float | None = None) -> None:
    """Print a comparison as was asked for, and leave it in the files that were asked for."""
    from consistency.report.terminal import make_console, print_report

    if parsed.junit is not None:
        from consistency.report.junit import write_junit

        write_junit(comparison, parsed.junit, elapsed_s=elapsed_s or 0.0)
    if parsed.json or parsed.format == "json":
        from consistency.report.json import parts

        sys.stdout.buffer.writelines(parts(comparison))
        return
    folder = None if parsed.out is None else str(parsed.out)
    print_report(comparison, make_console(), elapsed_s=elapsed_s, verbose=parsed.verbose, folder=folder)
    if parsed.format == "github":
        from consistency.report.github import annotate, write_summary

        sys.stdout.writelines(f"{line}\n" for line in annotate(comparison))
        write_summary(comparison)


def _baseline(parsed: argparse.Namespace) -> Baseline | None:
    from consistency.comparison.history.baseline import read_baseline

    return None if parsed.baseline is None else read_baseline(parsed.baseline)


def _capture(parsed: argparse.Namespace) -> int:
    from consistency.capture.json_codec import encode_json
    from consistency.cli.progress import progress
    from consistency.report.terminal import make_console

    plan = pipeline.prepare(_options(parsed))
    with progress(make_console(sys.stderr)) as watch:
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
        sys.stdout.buffer.write(encode_json({"capture": parsed.out, "workers": rows}, indent=1) + b"\n")
    else:
        for row in rows:
            note = f": {row['reason']}" if row["reason"] else ""
            print(f"{row['name']} ({row['road']}): {row['status']}, {row['tensors']} tensors{note}")
        print(f"capture: {parsed.out}")
    return 0 if all(worker.info.status == "ok" for worker in found.workers) else 3


def _compare(parsed: argparse.Namespace) -> int:
    comparison = pipeline.compare_folders(parsed.captures, parsed.out, replace=parsed.force, baseline=_baseline(parsed))
    _show(parsed, comparison)
    return comparison.exit_status


def _diff(parsed: argparse.Namespace) -> int:
    started = time.monotonic()
    comparison = pipeline.diff_weights(
        parsed.other, parsed.reference, parsed.out, allow_pickle=parsed.allow_pickle, replace=parsed.force
    )
    elapsed_s = time.monotonic() - started
    if parsed.json:
        from consistency.report.json import as_bytes

        sys.stdout.buffer.write(as_bytes(comparison))
    else:
        from consistency.report.diff import print_diff
        from consistency.report.terminal import make_console

        folder = None if parsed.out is None else str(parsed.out)
        print_diff(comparison, make_console(), elapsed_s=elapsed_s, verbose=parsed.verbose, folder=folder)
    return comparison.exit_status


def _doctor(parsed: argparse.Namespace) -> int:
    from consistency.capture.json_codec import encode_json
    from consistency.cli.progress import progress
    from consistency.comparison.findings.advice import as_table
    from consistency.report.doctor import print_doctor
    from consistency.report.terminal import make_console
    from consistency.workflows.doctor import doctor_plan

    options = _options(parsed)
    limits = Limits(timeout_s=options.timeout, stall_s=options.stall)
    plan = doctor_plan(options.devices, limits=limits, level=options.level)
    with progress(make_console(sys.stderr)) as watch:
        report = pipeline.run(plan, parsed.out, watch=watch, replace=parsed.force)
    if parsed.json:
        sys.stdout.buffer.write(encode_json(as_table(report.comparison), indent=1) + b"\n")
    else:
        folder = None if parsed.out is None else str(parsed.out)
        print_doctor(report.comparison, make_console(), elapsed_s=report.elapsed_s, folder=folder)
    return report.exit_status


def _drill(parsed: argparse.Namespace) -> int:
    from consistency.capture.json_codec import encode_json
    from consistency.cli.drill import print_drill
    from consistency.cli.progress import progress
    from consistency.report.terminal import make_console
    from consistency.workflows.drill import choose, drill

    with progress(make_console(sys.stderr)) as watch:
        rows = drill(choose(parsed.only), out=parsed.out, watch=watch, replace=parsed.force)
    if parsed.json:
        sys.stdout.buffer.write(encode_json(rows, indent=1) + b"\n")
    else:
        print_drill(rows, make_console())
    return 0 if all(row.passed for row in rows) else 1


def _devices(parsed: argparse.Namespace) -> int:
    from consistency.capture.json_codec import encode_json
    from consistency.cli.devices import print_devices
    from consistency.report.terminal import make_console

    found = list(discover())
    if parsed.json:
        fields = ("architecture", "model", "uuid", "pci_bus_id", "driver", "capability", "memory_bytes", "simulated")
        rows = [{"name": info.spec.name, **{f: getattr(info, f) for f in fields}} for info in found]
        sys.stdout.buffer.write(encode_json(rows, indent=1) + b"\n")
    else:
        print_devices(found, make_console())
    return 0
