"""The command line: options in, exit status out. Only this package prints and exits."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from consistency.capture.version import __version__
from consistency.cli.commands import bisect, compare, devices, diff, doctor, drill, history, reproduce, run
from consistency.errors import ConsistencyError, InterruptedRunError, UsageError

COMMANDS = (run, compare, diff, devices, doctor, drill, reproduce, history, bisect)
"""One module per command or pair of commands; each adds its own, and imports what it needs when it is run."""

EPILOG = """\
exit status: 0 consistent, 1 inconsistent, 2 bad usage or bad input, 3 incomplete (a worker was lost)

examples:
  consistency run                                             the built-in case on every device
  consistency run --base ./llama --adapter ./my-lora --out run-1
  consistency run --devices cpu,cuda:0 --dtype bfloat16 --base ./llama --adapter ./my-lora
  consistency run --tolerance "stage=merged,layer=*.q_proj,dtype=bfloat16,atol=1e-3,rtol=1e-2"
  consistency capture --base ./llama --adapter ./my-lora --out host-a     on each host, then
  consistency compare host-a host-b                                       anywhere
  consistency diff ./my-lora ./my-lora-copy                               two files or folders, no model code
  consistency doctor                                          this host, without any model
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors look like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        parsed = build_parser().parse_args(arguments)
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
    layout: dict[str, Any] = {
        "epilog": EPILOG, "formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False,
    }  # fmt: skip
    parser = _Parser(
        prog="consistency",
        description="Check that a base model and a LoRA adapter produce the same numbers on every device.",
        **layout,
    )
    parser.add_argument("--version", action="version", version=f"consistency {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", **layout)
        added.set_defaults(command=function)
        return added

    for module in COMMANDS:
        module.add(command)
    return parser


def _complain(text: str) -> None:
    from consistency.report.text import clean

    print(f"consistency: {clean(text)}", file=sys.stderr)  # quotes paths and headers, which may be a stranger's


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
