"""Print the results of commands, and declare the options that choose what is printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from consistency.cli.output_streams import stating_verdict
from consistency.errors import CaptureError, UsageError
from consistency.report.formats import Chosen, View, formats

if TYPE_CHECKING:
    from consistency.comparison.result import Comparison
    from consistency.comparison.site_groups import SiteGroups
    from consistency.comparison.suite import SuiteResult
    from consistency.workflows.past import Past


def add_output_options(parser: argparse.ArgumentParser, out: str, *, json: str, required: bool = False) -> None:
    """Add `--out` for a folder, `--force` and `--json`."""
    parser.add_argument("--out", type=Path, required=required, metavar="DIR", help=out)
    parser.add_argument("--force", action="store_true", help="replace what an earlier run left in --out")
    parser.add_argument("--json", action="store_true", help=json)


def add_report_options(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the options of a command that prints a comparison."""
    add_output_options(parser, out, json="print report.json")
    parser.add_argument("-v", "--verbose", action="store_true", help="show every layer, not only those that differ")


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """Add `--format`, the options that write a report to a file, and `--baseline`."""
    rows = list(formats(Chosen.FORMAT))
    parser.add_argument(
        "--format",
        choices=[row.name for row in rows],
        help="what is printed (default: text): " + "; ".join(f"{row.name}: {row.help}" for row in rows),
    )
    for row in formats(Chosen.OPTION):
        parser.add_argument(f"--{row.name}", type=Path, metavar="FILE", help=f"write {row.help}")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="accepted findings (consistency baseline accept)")


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
    """Add `--quiet` to a command that shows its progress."""
    parser.add_argument("--quiet", action="store_true", help="show no progress on stderr")


def add_fail_fast_option(parser: argparse.ArgumentParser, text: str) -> None:
    """Add `--fail-fast`; `text` says what ends the command."""
    parser.add_argument("--fail-fast", action="store_true", help=f"stop at {text}; its report says what was left out")


def add_history_option(parser: argparse.ArgumentParser) -> None:
    """Add `--history`."""
    parser.add_argument("--history", metavar="URL", help="history of runs to compare with and append to")


def add_groups_option(add: Callable[..., object]) -> None:
    """Add `--groups`, the file that maps hosts to the groups of a site."""
    add(
        "--groups",
        type=Path,
        metavar="FILE",
        help="CSV or TOML file that maps hosts to what the site groups them by, "
        "such as racks: findings say what odd devices have in common",
    )


def read_groups(parsed: argparse.Namespace) -> SiteGroups:
    """Read the file of `--groups`, where it is given."""
    from consistency.comparison.site_groups import NO_GROUPS, read_site_groups

    return NO_GROUPS if parsed.groups is None else read_site_groups(parsed.groups)


def check_formats(parsed: argparse.Namespace) -> None:
    """Raise UsageError for two formats of what is printed."""
    if parsed.json and parsed.format not in (None, "json"):
        raise UsageError("give one format", where=f"--json and --format {parsed.format}")


def read_past(parsed: argparse.Namespace) -> Past:
    """Read `--history` and `--baseline`, where they are given; warn where there is no such baseline yet."""
    from consistency.workflows.past import opened_past

    if parsed.baseline is not None and not parsed.baseline.exists():
        print(f"baseline {parsed.baseline} does not exist: no finding is accepted", file=sys.stderr)
    return opened_past(parsed.history, parsed.baseline)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    from consistency.capture.json_codec import encode_json

    sys.stdout.buffer.write(encode_json(value, indent=1) + b"\n")


def show(
    parsed: argparse.Namespace,
    found: Comparison | SuiteResult,
    out: Path | None,
    *,
    elapsed_s: float | None = None,
) -> None:
    """Print a comparison, or a suite, in the format that was asked for, and write the files that were asked for.

    `out` is the folder that holds its report.
    """
    from consistency.comparison.suite import SuiteResult

    of_suite = isinstance(found, SuiteResult)
    view = View(elapsed_s=elapsed_s, verbose=parsed.verbose, folder=None if out is None else str(out))
    name = "json" if parsed.json else parsed.format or "text"
    row = next(row for row in formats(Chosen.FORMAT, of_suite=of_suite) if row.name == name)
    with ExitStack() as stack:
        # even where stdout cannot be written: the files may be on another disk
        stack.callback(_write_files, parsed, found, view, of_suite=of_suite)
        with stating_verdict(found.verdict, found.exit_status):
            sys.stdout.buffer.writelines(row.render(found, view))


def show_weights(parsed: argparse.Namespace, found: Comparison, elapsed_s: float) -> int:
    """Print a comparison of weight files as text or as JSON, write the files that were asked for; return the status."""
    from consistency.report.console import make_console
    from consistency.report.json import as_bytes
    from consistency.report.terminal import print_weights

    folder = None if parsed.out is None else str(parsed.out)
    with ExitStack() as stack:
        # even where stdout cannot be written: the files may be on another disk
        stack.callback(_write_files, parsed, found, View(elapsed_s=elapsed_s, folder=folder), of_suite=False)
        with stating_verdict(found.verdict, found.exit_status):
            if parsed.json:
                sys.stdout.buffer.write(as_bytes(found))
            else:
                title, verbose = parsed.parser.prog, parsed.verbose
                print_weights(found, make_console(), title=title, elapsed_s=elapsed_s, verbose=verbose, folder=folder)
    return found.exit_status


def _write_files(parsed: argparse.Namespace, found: Comparison | SuiteResult, view: View, *, of_suite: bool) -> None:
    """Write the files that options ask for."""
    for row in formats(Chosen.OPTION, of_suite=of_suite):
        path = getattr(parsed, row.name, None)
        if path is not None:
            write_file(path, row.render(found, view))


def write_file(path: Path, content: Iterable[bytes]) -> None:
    """Write a file that an option asks for; where that fails, say so: the verdict is more than a file of it."""
    from consistency.capture.whole_file import write_whole
    from consistency.text import clean

    try:
        write_whole(path, content)
    except CaptureError as error:
        print(f"consistency: {clean(str(error))}", file=sys.stderr)
