"""`consistency check-text`: whether a model could have written texts, and whether log probabilities are the model's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from consistency.case.options import OPTIONS, Edge, add_options
from consistency.cli.output import add_quiet_option, print_json, write_file
from consistency.cli.output_streams import stating_verdict
from consistency.cli.parser import BAD_USE
from consistency.errors import UsageError, did_you_mean
from consistency.extras.serving.check_text.sampling import KV_DTYPES, Sampling
from consistency.extras.serving.engines import ENGINES
from consistency.text import one_line

if TYPE_CHECKING:
    from consistency.extras.serving.check_text.report import TextReport

EXAMPLES = (
    ("what an engine wrote", "consistency check-text texts.jsonl --base ./llama --adapter ./my-lora --dtype bfloat16"),
    (
        "rollouts, and which checkpoint wrote each",
        "consistency check-text rollouts.jsonl --base ./llama --adapter step80=./step-80 --adapter step100=./step-100",
    ),
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
    text = "check whether a model with its adapter could have written texts, and whether log probabilities are its own"
    parser = command("check-text", _check_text, text, EXAMPLES, statuses=STATUSES)
    parser.add_argument(
        "texts",
        type=Path,
        metavar="TEXTS.jsonl",
        help="a text per line: prompt (text, token ids, or messages), text (or token ids), and logprobs where known; "
        "or what vLLM, SGLang, TRL, verl, prime-rl, slime or llama.cpp write",
    )
    add_options(parser.add_argument, Edge.COMMAND_LINE, only=_TAKES, one_case=True)
    parser.add_argument(
        "--sampling",
        metavar="SETTINGS",
        help="how tokens were drawn, where the file does not say it: temperature=0.7,top_k=20,top_p=0.9,min_p=0.05, "
        "repetition_penalty=1.1, presence_penalty, frequency_penalty, penalty_last_n, penalized_padding=1; 1 for draws "
        "without any of these "
        "(default: greedily, where a text has no log probabilities)",
    )
    parser.add_argument(
        "--logprobs",
        choices=("raw", "processed"),
        help="raw: the model's own; processed: taken after what --sampling or the file says (default: as the engine "
        "takes them; raw where none is stated)",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="",
        help="dtype in which the engine keeps keys and values (default: the engine's; the model's own where none is "
        "stated)",
    )
    parser.add_argument(
        "--engine",
        choices=tuple(ENGINES),
        default="",
        help="the engine that wrote the texts: they are judged by its own arithmetic (docs/engines/arithmetic.md)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page: the verdicts, the histogram of differences, each text"
    )
    add_quiet_option(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def sampling_of(settings: str) -> Sampling:
    """Return the sampler of `temperature=0.7,top_p=0.9`; `1` is one that changes nothing.

    Raises
    ------
    UsageError
        A setting is not known, or its value is none that a sampler can have.
    """
    if settings.strip() == "1":
        return Sampling()
    values: dict[str, float] = {}
    for setting in settings.split(","):
        name, _, value = (part.strip() for part in setting.partition("="))
        if name not in _SETTINGS:
            raise UsageError(
                "not a setting of a sampler",
                where="--sampling",
                got=name,
                wanted=", ".join(_SETTINGS),
                hint=did_you_mean(name, _SETTINGS),
            )
        least, most = _SETTINGS[name]
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not least <= number <= most:
            raise UsageError(
                f"{name} has no such value",
                where="--sampling",
                got=value,
                wanted=f"a number from {least:g} to {most:g}",
            )
        values[name] = number
    whole_numbers = {name: int(values.pop(name)) for name in ("top_k", "penalty_last_n") if name in values}
    penalized_padding = bool(values.pop("penalized_padding", 0.0))
    return Sampling(penalized_padding=penalized_padding, **whole_numbers, **values)  # type: ignore[arg-type]  # by name


_SETTINGS = {
    "temperature": (0.0, 100.0),
    "top_k": (0.0, 1e9),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "penalty_last_n": (0.0, 1e9),
    "penalized_padding": (0.0, 1.0),
}
"""The settings of a sampler, each with its least and its largest value."""


def _check_text(parsed: argparse.Namespace) -> int:
    from consistency.case.preflight import prepare_case
    from consistency.case.reading import gather_options

    sampling = None if parsed.sampling is None else sampling_of(parsed.sampling)
    options = {option.name: getattr(parsed, option.name, None) for option in OPTIONS}
    case = prepare_case(gather_options(None, options, Edge.COMMAND_LINE))
    # torch, which no wrong option should wait for
    from consistency.extras.serving.check_text.judge_texts import check_text
    from consistency.extras.serving.check_text.options import TextOptions
    from consistency.extras.serving.check_text.texts import read_texts

    texts = read_texts(parsed.texts)

    announced = ""

    def step(name: str) -> None:
        nonlocal announced
        what, _, _ = name.partition(":")
        # a line for each text, and not for each of its passes
        if not parsed.quiet and what != announced:
            announced = what
            print(one_line(name), file=sys.stderr)

    processed = None if parsed.logprobs is None else parsed.logprobs == "processed"
    how = TextOptions(sampling=sampling, processed=processed, kv_dtype=parsed.kv_dtype, engine=parsed.engine)
    report = check_text(case, texts, options=how, step=step)
    with ExitStack() as stack:
        if parsed.html is not None:
            # even where stdout cannot be written: the file may be on another disk
            stack.callback(_write_page, parsed, report, case.name)
        with stating_verdict(report.verdict, report.exit_status):
            if parsed.json:
                print_json(report.to_builtins())
            else:
                _print_lines(parsed, report, case.name)
    return report.exit_status


def _print_lines(parsed: argparse.Namespace, report: TextReport, name: str) -> None:
    print(f"consistency check-text · {one_line(name)} · {report.dtype} · {one_line(str(parsed.texts))}\n")
    for line in report.lines():
        indent = len(line) - len(line.lstrip(" "))
        print(f"  {' ' * indent}{one_line(line.strip())}")


def _write_page(parsed: argparse.Namespace, report: TextReport, name: str) -> None:
    from consistency.extras.serving.check_text.page import report_as_html

    page = report_as_html(report, name=name, source=str(parsed.texts))
    write_file(parsed.html, [page.encode()])
