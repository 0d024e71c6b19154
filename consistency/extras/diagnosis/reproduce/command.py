"""`consistency reproduce`: write scripts that show a finding without this tool."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from consistency.cli.output import add_output_options, print_json
from consistency.cli.parser import BAD_USE

EXAMPLES = (
    ("a folder that shows the first finding", "consistency reproduce run-1 --finding 1 --out repro"),
    ("one file for a public issue", "consistency reproduce run-1 --finding 1 --redact --out repro.zip"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    statuses = {0: "written, whether it happens on this machine or not", **BAD_USE}
    parser = command(
        "reproduce", _reproduce, "write scripts that show a finding without this tool", EXAMPLES, statuses=statuses
    )
    parser.add_argument("report", type=Path, metavar="REPORT", help="report.json, or the --out folder of a run")
    parser.add_argument(
        "--finding", type=int, metavar="N", help="number of the finding, from 1; not needed where there is one"
    )
    parser.add_argument(
        "--redact",
        action="store_true",
        help="without paths, names of hosts and users, and ids of devices: to be attached to a public issue",
    )
    add_output_options(
        parser, "folder to write, or a file that ends in .zip", json="print the outcome as JSON", required=True
    )


def _reproduce(parsed: argparse.Namespace) -> int:
    from consistency.extras.diagnosis.reproduce.folder import reproduce
    from consistency.text import clean

    result = reproduce(parsed.report, parsed.finding, parsed.out, replace=parsed.force, redact=parsed.redact)
    if parsed.json:
        print_json(
            {
                "folder": str(result.folder),
                "reproduced": result.happens_here,
                "shows": result.shows,
                "needs_model": result.needs_model,
                "output": result.output,
            }
        )
    else:
        print(clean(result.output))
        size = " (with the weights of a block: more than 10 MB)" if result.is_large else ""
        print(f"{result.sentence}\nreproducer: {result.folder}{size}")
    return 0
