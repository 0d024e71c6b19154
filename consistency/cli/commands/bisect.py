"""`consistency bisect`: which setting explains a difference."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command; `command(name, function, text)` makes its parser."""
    parser = command("bisect", _bisect, "switch one setting at a time, and name what explains a difference")
    parser.add_argument("report", type=Path, metavar="REPORT", help="report.json, or the --out folder of a run")
    parser.add_argument("--finding", type=int, metavar="N", help="its number in the report, from 1")
    parser.add_argument("--tensor", metavar="NAME", help="instead: a tensor, stage::layer.tensor, whose bits differ on")
    parser.add_argument("--worker", metavar="NAME", help="this worker")
    parser.add_argument("--json", action="store_true", help="print what came of each trial as JSON")


def _bisect(parsed: argparse.Namespace) -> int:
    from consistency.capture.json_codec import encode_json
    from consistency.report.text import clean
    from consistency.workflows.bisect import Trial, bisect

    def tell(trial: Trial) -> None:
        print(clean(f"{' + '.join(trial.changes) or 'as it was'}: {trial.detail}"), file=sys.stderr)

    found = bisect(parsed.report, number=parsed.finding, tensor=parsed.tensor, worker=parsed.worker, watch=tell)
    if parsed.json:
        sys.stdout.buffer.write(encode_json({"sentence": found.sentence, "answer": found}, indent=1) + b"\n")
    else:
        print(clean(found.sentence))
    return 0 if found.explained_by or not found.repeats else 1
