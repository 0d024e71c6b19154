"""`consistency reproduce`: write a folder that shows a finding without this tool."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command; `command(name, function, text)` makes its parser."""
    parser = command("reproduce", _reproduce, "write a folder that shows a finding without this tool")
    parser.add_argument("report", type=Path, metavar="REPORT", help="report.json, or the --out folder of a run")
    parser.add_argument("--finding", type=int, required=True, metavar="N", help="its number in the report, from 1")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--force", action="store_true", help="replace what is in --out")
    parser.add_argument("--json", action="store_true", help="print what came of it as JSON")


def _reproduce(parsed: argparse.Namespace) -> int:
    from consistency.capture.json_codec import encode_json
    from consistency.report.text import clean
    from consistency.workflows.reproduce.folder import reproduce

    found = reproduce(parsed.report, parsed.finding, parsed.out, replace=parsed.force)
    if parsed.json:
        table = {
            "folder": str(found.folder),
            "reproduced": found.happens_here,
            "shows": found.shows,
            "needs_model": found.needs_model,
            "output": found.output,
        }
        sys.stdout.buffer.write(encode_json(table, indent=1) + b"\n")
        return 0
    print(clean(found.output))
    print(f"{found.sentence}\nreproducer: {found.folder}")
    return 0
