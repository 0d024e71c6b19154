"""`consistency doctor`: check this host without any model."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from consistency.case.options import Edge, add_options
from consistency.cli.commands.run import read_case
from consistency.cli.output import add_output_options, add_quiet_option, print_json

EXAMPLES = (
    ("copies, operators and memory of every device", "consistency doctor"),
    ("the same, quickly, on two devices", "consistency doctor --devices cuda:0,cuda:1 --level quick"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command("doctor", _doctor, "check this host without any model, and report what to fix first", EXAMPLES)
    add_options(parser.add_argument, Edge.COMMAND_LINE, only=("devices", "level", "timeout", "stall"))
    add_output_options(parser, "folder for the reports and captures/", json="print JSON")
    add_quiet_option(parser)


def _doctor(parsed: argparse.Namespace) -> int:
    """Run the command."""
    from consistency.cli.output_streams import stating_verdict
    from consistency.cli.progress import progress
    from consistency.comparison.findings.host import as_table
    from consistency.report.console import make_console
    from consistency.report.terminal import print_doctor
    from consistency.workflows import pipeline
    from consistency.workflows.pipeline import doctor_plan

    plan = doctor_plan(read_case(parsed))
    with progress(expected=pipeline.expected(plan), quiet=parsed.quiet) as watch:
        report = pipeline.run(plan, parsed.out, watch=watch, replace=parsed.force)
    with stating_verdict(report.verdict, report.exit_status):
        if parsed.json:
            print_json(as_table(report.comparison))
        else:
            folder = None if parsed.out is None else str(parsed.out)
            print_doctor(report.comparison, make_console(), elapsed_s=report.elapsed_s, folder=folder)
    return report.exit_status
