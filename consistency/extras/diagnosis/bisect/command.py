"""`consistency bisect`: find the setting that explains a difference."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

from consistency.case.options import Edge, add_options
from consistency.cli.commands.run import read_case
from consistency.cli.output import add_quiet_option, print_json
from consistency.cli.parser import BAD_USE

_OPTIONS = ("base", "adapter", "inputs", "wrapper", "allow_pickle", "trust_remote_code")
"""Options for files that a report names elsewhere, and for code that it may not run unasked."""

EXAMPLES = (
    ("the setting that explains the first finding", "consistency bisect run-1 --finding 1"),
    ("the same for a case of your own", "consistency bisect run-1 --finding 1 --base ./llama --adapter ./my-lora"),
    (
        "one tensor of one worker",
        "consistency bisect run-1 --tensor merged::model.layers.0.self_attn.q_proj.weight --worker cuda:0",
    ),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    about = "change one setting at a time to find the one that explains a difference"
    statuses = {0: "a setting explains it, or it does not occur again", 1: "no setting explains it", **BAD_USE}
    parser = command("bisect", _bisect, about, EXAMPLES, statuses=statuses)
    parser.add_argument("report", type=Path, metavar="REPORT", help="report.json, or the --out folder of a run")
    parser.add_argument(
        "--finding", type=int, metavar="N", help="number of the finding, from 1; not needed where there is one"
    )
    parser.add_argument("--tensor", metavar="NAME", help="instead of a finding: a tensor (stage::layer.tensor)")
    parser.add_argument("--worker", metavar="NAME", help="the worker on which that tensor differs")
    add_options(parser.add_argument, Edge.COMMAND_LINE, only=_OPTIONS, one_case=True)
    parser.add_argument("--json", action="store_true", help="print every trial as JSON")
    add_quiet_option(parser)


def _bisect(parsed: argparse.Namespace) -> int:
    from consistency.cli.progress import progress
    from consistency.extras.diagnosis.bisect.bisect import Trial, bisect
    from consistency.text import one_line

    numbers = itertools.count(1)
    with progress(stages=False, quiet=parsed.quiet) as display:

        def watch(trial: Trial, most: int) -> None:
            name = " + ".join(trial.changes) or "unchanged"
            display.line(f"trial {next(numbers)} of at most {most}: {name}: {trial.detail}")

        answer = bisect(
            parsed.report,
            number=parsed.finding,
            tensor=parsed.tensor,
            worker=parsed.worker,
            watch=watch,
            progress=display,
            given=read_case(parsed),
        )
    if parsed.json:
        print_json({"sentence": answer.sentence, "answer": answer})
    else:
        print(one_line(answer.sentence))
    return 0 if answer.explained_by or not answer.repeats else 1
