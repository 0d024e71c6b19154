"""The command line: options in, exit status out. Only this package prints and exits."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from consistency.capture.origin import running
from consistency.capture.version import __version__
from consistency.cli.exit_status import CLOSED_PIPE, OF_EVERY_COMMAND, VERDICT
from consistency.cli.parser import Parser, adder, layout
from consistency.errors import ConsistencyError, InterruptedRunError

COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "capture"),
    "inputs": ("inputs",),
    "engine": ("engine",),
    "compare": ("compare",),
    "fleet": ("fleet",),
    "show": ("show",),
    "diff": ("diff",),
    "devices": ("devices",),
    "doctor": ("doctor",),
    "drill": ("drill",),
    "reproduce": ("reproduce",),
    "history": ("history",),
    "baseline": ("baseline",),
    "status": ("status",),
    "bisect": ("bisect",),
    "completion": ("completion",),
}
"""Modules of `commands/`, and the commands that each adds. A module imports what it needs when its command is run."""

EXAMPLES = (
    ("the built-in case on every device", "consistency run"),
    ("a model and an adapter of your own", "consistency run --base ./llama --adapter ./my-lora --out run-1"),
    ("this host, without any model", "consistency doctor"),
    ("two weight files or folders, without model code", "consistency diff ./my-lora ./my-lora-copy"),
    ("one command's options and examples", "consistency run --help"),
)

_LIBRARIES = ("torch", "transformers", "peft")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        try:
            return _answer(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # the reader has seen enough; what is left in the buffers must not fail once more when Python flushes them
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        return CLOSED_PIPE


def _answer(arguments: Sequence[str]) -> int:
    try:
        parser = build_parser(arguments[0] if arguments else None)
        if not arguments:
            parser.print_help(sys.stderr)
            return 2
        parsed = parser.parse_args(arguments)
        with running(["consistency", *arguments]):
            status = int(parsed.command(parsed))
        assert status in parsed.statuses, f"{parsed.parser.prog} has no exit status {status}"
        return status
    except ConsistencyError as error:
        _complain(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        stopped = InterruptedRunError("stopped: no worker is left, and no half-written capture")
        _complain(str(stopped))
        return stopped.exit_status
    except BrokenPipeError:
        raise
    except OSError as error:
        _complain(f"{error.strerror or error}\n  where:  {error.filename or 'this host'}")
        return 2


def build_parser(named: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of every command, or of one alone, where it is named.

    Monitoring calls `status` every few seconds: it should not pay for the options of the others.
    """
    parser = Parser(
        prog="consistency",
        description="Check that a base model and a LoRA adapter produce the same numbers on every device.",
        **layout(EXAMPLES, {**VERDICT, **OF_EVERY_COMMAND}),
    )
    parser.add_argument("--version", action=_Version, help="print the versions of this tool and of what it checks")
    command = adder(parser.add_subparsers(title="commands", required=True, metavar="COMMAND"))
    for module in [name for name, commands in COMMANDS.items() if named in commands] or COMMANDS:
        importlib.import_module(f"consistency.cli.commands.{module}").add(command)
    return parser


class _Version(argparse.Action):
    """Print the versions of this tool and of the libraries that it checks, without importing any."""

    def __init__(self, **given: Any) -> None:
        super().__init__(nargs=0, **{**given, "default": argparse.SUPPRESS, "dest": argparse.SUPPRESS})

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib import metadata

        print(f"consistency {__version__}")
        for name in _LIBRARIES:
            try:
                print(f"{name} {metadata.version(name)}")
            except metadata.PackageNotFoundError:
                print(f"{name} is not installed")
        print(f"Python {sys.version.split()[0]}")
        parser.exit()


def _complain(text: str) -> None:
    from consistency.report.text import clean

    print(f"consistency: {clean(text)}", file=sys.stderr)  # quotes paths and headers, which may be a stranger's


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
