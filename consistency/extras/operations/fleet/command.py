"""`consistency fleet`: a capture of every node of a cluster, made by its scheduler, in one verdict."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING

from consistency.case.options import OPTIONS, Edge, add_options, words_of
from consistency.cli.commands.run import add_config, read_case, read_suite
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
from consistency.cli.parser import VERDICT
from consistency.errors import UsageError
from consistency.extras.operations.fleet.schedulers.options import FLEET_OPTIONS

if TYPE_CHECKING:
    from consistency.extras.operations.fleet.schedulers.options import FleetOptions

EXAMPLES = (
    (
        "every node of a Slurm partition",
        "consistency fleet --engine slurm --partition gpu --nodes all --exclusive --gpus 8 --base /shared/llama "
        "--adapter /shared/my-lora --out fleet-1",
    ),
    ("the nodes of the allocation that this runs in", "consistency fleet night.toml --engine slurm --out fleet-1"),
    (
        "what an earlier run did not get",
        "consistency fleet night.toml --engine slurm --nodes gpu[001-128] --out fleet-1 --resume",
    ),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        "fleet", _fleet, "check a case on every node of a cluster, and compare the nodes", EXAMPLES, statuses=VERDICT
    )
    fleet = parser.add_argument_group("the fleet").add_argument
    add_options(fleet, Edge.COMMAND_LINE, prefix="fleet_", options=FLEET_OPTIONS)
    add_groups_option(fleet)
    group = parser.add_argument_group("what is checked on each node").add_argument
    add_config(parser, "options of the case by name", "--engine ENGINE --out DIR")
    parser.set_defaults(case=None)
    add_options(group, Edge.COMMAND_LINE, one_case=True)
    add_report_options(parser, "folder for the reports (JSON, HTML, Markdown), captures/ and the output of the nodes")
    add_format_options(parser)
    add_history_option(parser)


def _fleet(parsed: argparse.Namespace) -> int:
    from consistency.extras.operations.fleet.progress import fleet_progress
    from consistency.extras.operations.fleet.run import prepare_fleet, run_fleet

    check_formats(parsed)
    options = read_fleet_options(parsed)
    if parsed.out is None:
        raise UsageError("--out is required", wanted="--out DIR, a folder on a file system that all nodes share")
    if read_suite(parsed) is not None:
        raise UsageError("a fleet checks one case", got="a suite", hint="start a fleet for each case")
    # a node reads the same file, and gets the same options in words
    words = [] if parsed.config is None else [str(parsed.config.resolve())]
    words += words_of({option.name: getattr(parsed, option.name) for option in OPTIONS if hasattr(parsed, option.name)})
    command = [] if options.command is None else shlex.split(options.command)
    # read before any node starts, so that a mistake costs nothing
    past, groups = read_past(parsed), read_groups(parsed)
    plan = prepare_fleet(read_case(parsed), words, options, command=command)
    with fleet_progress(len(plan.nodes)) as watch:
        comparison = run_fleet(plan, parsed.out, watch=watch, replace=parsed.force, groups=groups, past=past)
    show(parsed, comparison, parsed.out)
    return comparison.exit_status


def read_fleet_options(parsed: argparse.Namespace) -> FleetOptions:
    """Return the options of the fleet that are given on the command line."""
    from consistency.case.duration import parse_duration
    from consistency.extras.operations.fleet.schedulers.options import SCHEDULERS, FleetOptions

    values = {option.attribute: getattr(parsed, f"fleet_{option.name}") for option in FLEET_OPTIONS}
    values = {name: value for name, value in values.items() if value is not None}
    if "engine" not in values:
        raise UsageError("--engine is required", wanted=" or ".join(SCHEDULERS))
    if "node_timeout" in values:
        values["node_timeout"] = parse_duration(values["node_timeout"], where="--node-timeout")
    if "engine_args" in values:
        values["engine_args"] = tuple(values["engine_args"])
    return FleetOptions(**values)
