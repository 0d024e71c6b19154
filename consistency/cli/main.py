"""The command line: options in, exit status out. Only this package prints and exits."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from consistency.capture.version import __version__
from consistency.cli.commands import bisect, compare, completion, devices, diff, doctor, drill, history, reproduce, run
from consistency.cli.parser import Parser, adder, layout
from consistency.errors import ConsistencyError, InterruptedRunError

COMMANDS = (run, compare, diff, devices, doctor, drill, reproduce, history, bisect, completion)
"""One module per command or pair of commands; each adds its own, and imports what it needs when it is run."""

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
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        parser = build_parser()
        if not arguments:
            parser.print_help(sys.stderr)
            return 2
        parsed = parser.parse_args(arguments)
        return int(parsed.command(parsed))
    except ConsistencyError as error:
        _complain(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        stopped = InterruptedRunError("stopped: no worker is left, and no half-written capture")
        _complain(str(stopped))
        return stopped.exit_status
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        _complain(f"{error.strerror or error}\n  where:  {error.filename or 'this host'}")
        return 2


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = Parser(
        prog="consistency",
        description="Check that a base model and a LoRA adapter produce the same numbers on every device.",
        **layout(EXAMPLES),
    )
    parser.add_argument("--version", action=_Version, help="print the versions of this tool and of what it checks")
    parser.set_defaults(root=parser)
    command = adder(parser.add_subparsers(title="commands", required=True, metavar="COMMAND"))
    for module in COMMANDS:
        module.add(command)
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
