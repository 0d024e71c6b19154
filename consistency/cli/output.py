"""What commands print, and the options that choose it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from consistency.comparison.history.baseline import Baseline
    from consistency.comparison.result import Comparison


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
    """Add the other formats of a report, and the baseline that it is judged by."""
    parser.add_argument("--format", choices=["text", "json", "github"], default="text", help="what is printed: a "
                        "report for people, report.json, or annotations of a GitHub Actions run")  # fmt: skip
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML: one test per stage and worker")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="accepted findings (consistency baseline accept)")


def read_baseline(parsed: argparse.Namespace) -> Baseline | None:
    """Read the file of `--baseline`, where it is given."""
    from consistency.comparison.history import baseline

    return None if parsed.baseline is None else baseline.read_baseline(parsed.baseline)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    from consistency.capture.json_codec import encode_json

    sys.stdout.buffer.write(encode_json(value, indent=1) + b"\n")


def show(parsed: argparse.Namespace, comparison: Comparison, *, elapsed_s: float | None = None) -> None:
    """Print a comparison in the format that was asked for, and write the files that were asked for."""
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
