"""`consistency check-adapter`: whether a saved adapter is whole and trained, and fits its config and a base."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from consistency.case.options import Edge, add_options
from consistency.cli.output import add_report_options, show_weights
from consistency.cli.parser import BAD_USE, Once

EXAMPLES = (
    ("is my adapter whole and trained?", "consistency check-adapter ./my-lora"),
    ("and is it for this base?", "consistency check-adapter ./my-lora --base ./llama"),
    ("was it reloaded when the training was resumed?", "consistency check-adapter ./step-200 --against ./step-100"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = "check that a saved adapter is whole and trained, and that its config says what its file holds"
    statuses = {0: "nothing is wrong with it", 1: "something is", **BAD_USE}
    parser = command("check-adapter", _check, text, EXAMPLES, statuses=statuses)
    parser.add_argument("adapter", type=Path, metavar="ADAPTER", help="folder, as PEFT's save_pretrained() writes it")
    parser.add_argument(
        "--base", type=Path, action=Once, metavar="DIR", help="folder of the base: its names and shapes are compared"
    )
    parser.add_argument(
        "--against",
        type=Path,
        action=Once,
        metavar="DIR",
        help="another adapter, such as the checkpoint that a training was resumed from",
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    add_report_options(parser, "folder for the report (JSON, HTML, Markdown)")
    add_options(parser.add_argument, Edge.COMMAND_LINE, only=("allow_pickle",))


def _check(parsed: argparse.Namespace) -> int:
    from consistency.extras.merging.check_adapter.result import check_adapter

    started = time.monotonic()
    comparison = check_adapter(
        parsed.adapter,
        base=parsed.base,
        against=parsed.against,
        out=parsed.out,
        allow_pickle=bool(parsed.allow_pickle),
        replace=parsed.force,
    )
    return show_weights(parsed, comparison, time.monotonic() - started)
