"""`consistency diff`: compare two weight files, without any model code."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from consistency.case.options import Edge, add_options
from consistency.cli.output import add_report_options, show_weights
from consistency.cli.parser import BAD_USE

EXAMPLES = (
    ("an adapter and its copy", "consistency diff ./my-lora /mnt/node-b/my-lora"),
    ("two merged models, with a report", "consistency diff ./merged-a ./merged-b --out diff-1"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    statuses = {0: "equal", 1: "different", **BAD_USE}
    parser = command("diff", _diff, "compare two weight files, adapters or model folders", EXAMPLES, statuses=statuses)
    parser.add_argument("reference", type=Path, metavar="A", help="safetensors file, index of shards, or folder")
    parser.add_argument("other", type=Path, metavar="B", help="what is compared with A")
    add_report_options(parser, "folder for the report (JSON, HTML, Markdown)")
    add_options(parser.add_argument, Edge.COMMAND_LINE, only=("allow_pickle",))


def _diff(parsed: argparse.Namespace) -> int:
    from consistency.extras.merging.diff.result import diff

    started = time.monotonic()
    comparison = diff(
        parsed.reference, parsed.other, out=parsed.out, allow_pickle=bool(parsed.allow_pickle), replace=parsed.force
    )
    return show_weights(parsed, comparison, time.monotonic() - started)
