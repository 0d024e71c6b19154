"""`consistency check-merged`: whether a folder of merged weights holds base + adapter."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

from consistency.case.options import Edge, add_options
from consistency.cli.output import add_report_options, show_weights
from consistency.cli.parser import BAD_USE, Once

EXAMPLES = (
    ("did my merge work?", "consistency check-merged --base ./llama --adapter ./my-lora ./merged"),
    (
        "two adapters, one after the other?",
        "consistency check-merged --base ./llama --adapter ./sft --adapter ./dpo ./merged",
    ),
    ("what is in this folder?", "consistency check-merged --base ./llama ./merged"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = "check that a merged folder, by whatever writer, holds base + adapter"
    statuses = {0: "it holds base + adapter", 1: "it does not", **BAD_USE, 3: "a part of it could not be judged"}
    parser = command("check-merged", _check, text, EXAMPLES, statuses=statuses)
    parser.add_argument("merged", type=Path, metavar="MERGED", help="folder of merged weights, or a file of them")
    parser.add_argument("--base", action=Once, required=True, metavar="DIR", help="folder or cached hub id of the base")
    parser.add_argument(
        "--adapter",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder of an adapter, or several for their sum; without it, what differs from the base",
    )
    parser.add_argument(
        "--weight",
        type=float,
        action="append",
        metavar="W",
        help="factor of what an adapter adds, one for each --adapter in their order; 1 without it",
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    add_report_options(parser, "folder for the report (JSON, HTML, Markdown)")
    add_options(parser.add_argument, Edge.COMMAND_LINE, only=("allow_pickle", "trust_remote_code"))


def _check(parsed: argparse.Namespace) -> int:
    # as many tensors at a time as there are cores is faster than each one's short operations on all of them
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from consistency.extras.merging.check_merged.result import check_merged

    started = time.monotonic()
    comparison = check_merged(
        parsed.merged,
        base=parsed.base,
        adapter=parsed.adapter,
        weights=parsed.weight or (),
        out=parsed.out,
        allow_pickle=bool(parsed.allow_pickle),
        trust_remote_code=bool(parsed.trust_remote_code),
        replace=parsed.force,
    )
    return show_weights(parsed, comparison, time.monotonic() - started)
