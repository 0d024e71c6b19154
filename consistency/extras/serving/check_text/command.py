"""`consistency check-text`: whether a model could have written a text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from consistency.case.options import OPTIONS, Edge, add_options
from consistency.cli.output import add_quiet_option, print_json
from consistency.cli.parser import BAD_USE
from consistency.text import one_line

EXAMPLES = (
    ("what an engine wrote", "consistency check-text texts.jsonl --base ./llama --adapter ./my-lora --dtype bfloat16"),
)

_TAKES = ("base", "adapter", "name", "dtype", "allow_pickle", "trust_remote_code")

STATUSES = {
    0: "the model could have written all of it",
    1: "it could not, or log probabilities are not the model's",
    **BAD_USE,
    3: "incomplete (a text was not judged)",
}


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = "check whether a model with its adapter could have written a text, by any engine, greedily"
    parser = command("check-text", _check_text, text, EXAMPLES, statuses=STATUSES)
    parser.add_argument(
        "texts",
        type=Path,
        metavar="TEXTS.jsonl",
        help="a text per line: prompt (text, token ids, or messages), text (or token ids), and logprobs where known",
    )
    add_options(parser.add_argument, Edge.COMMAND_LINE, only=_TAKES, one_case=True)
    add_quiet_option(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _check_text(parsed: argparse.Namespace) -> int:
    from consistency.case.preflight import prepare_case
    from consistency.case.reading import gather_options

    options = {option.name: getattr(parsed, option.name, None) for option in OPTIONS}
    case = prepare_case(gather_options(None, options, Edge.COMMAND_LINE))
    # torch, which no wrong option should wait for
    from consistency.extras.serving.check_text.check import check_text
    from consistency.extras.serving.check_text.texts import read_texts

    texts = read_texts(parsed.texts)

    def step(name: str) -> None:
        if not parsed.quiet:
            print(one_line(name), file=sys.stderr)

    report = check_text(case, texts, step=step)
    if parsed.json:
        print_json(report.to_builtins())
    else:
        print(f"consistency check-text · {one_line(case.name)} · {report.dtype} · {one_line(str(parsed.texts))}\n")
        for line in report.lines():
            print(f"  {one_line(line)}")
    return report.exit_status
