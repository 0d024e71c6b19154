"""`consistency compare`: compare captures that were made apart."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext

from consistency.case.options import Edge, add_options
from consistency.cli.output import (
    add_format_options,
    add_groups_option,
    add_history_option,
    add_report_options,
    check_formats,
    read_groups,
    read_past,
    show,
)

EXAMPLES = (
    ("captures of two hosts, on either or on a third", "consistency compare host-a host-b --out both"),
    ("captures that were sent as files", "consistency compare host-a.zip host-b.zip"),
    ("with an inference engine's outputs", "consistency compare run-1 --engine-outputs vllm=outputs.safetensors"),
    ("all cases of a suite on two hosts", "consistency compare host-a/night host-b/night --out both"),
    ("the table of an earlier run again, with every layer", "consistency compare run-1 --verbose"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command("compare", _compare, "compare captures, also those of several hosts", EXAMPLES)
    parser.add_argument(
        "captures",
        nargs="+",
        metavar="DIR",
        help="a capture (folder, FILE.zip or URL), or the --out folder of a "
        "run; or folders of suites only, whose cases are compared by name",
    )
    add_report_options(parser, "folder for the report (JSON, HTML, Markdown)")
    add_format_options(parser)
    add_groups_option(parser.add_argument)
    add_history_option(parser)
    add_options(parser.add_argument, Edge.COMMAND_LINE, only=("engine_outputs",))


def _compare(parsed: argparse.Namespace) -> int:
    """Run the command."""
    from consistency.case.engine_file import as_engine_files
    from consistency.cli.progress import progress
    from consistency.errors import UsageError
    from consistency.workflows.comparing import are_suites, compare_folders, compare_suites

    check_formats(parsed)
    past, groups = read_past(parsed), read_groups(parsed)
    engines = as_engine_files(parsed.engine_outputs or (), where="--engine-outputs")
    if are_suites(parsed.captures):
        if engines:
            raise UsageError("an engine's outputs are of one case", where="--engine-outputs", got="folders of suites")
        suite = compare_suites(parsed.captures, parsed.out, replace=parsed.force, groups=groups, past=past)
        show(parsed, suite, parsed.out, elapsed_s=suite.elapsed_s)
        return suite.exit_status
    with progress() if engines else nullcontext(lambda *_: None) as watch:
        comparison = compare_folders(
            parsed.captures, parsed.out, replace=parsed.force, groups=groups, past=past, engines=engines, watch=watch
        )
    show(parsed, comparison, parsed.out)
    return comparison.exit_status
