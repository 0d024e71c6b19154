"""`consistency compare`: compare captures that were made apart."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from consistency.cli.output import add_format_options, add_report_options, read_baseline, show


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command("compare", _compare, "compare captures, also those of several hosts")
    parser.add_argument(
        "captures", nargs="+", metavar="DIR", help="a capture (folder, FILE.zip or URL), or the --out folder of a run"
    )
    add_report_options(parser, "folder for the report (JSON, HTML, Markdown)")
    add_format_options(parser)


def _compare(parsed: argparse.Namespace) -> int:
    from consistency.workflows.pipeline import compare_folders

    comparison = compare_folders(parsed.captures, parsed.out, replace=parsed.force, baseline=read_baseline(parsed))
    show(parsed, comparison)
    return comparison.exit_status
