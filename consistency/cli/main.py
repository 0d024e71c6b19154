"""The command line: options in, exit status out. Only this package prints and exits."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

from consistency.capture.origin import running
from consistency.capture.version import __version__
from consistency.cli.output_streams import LossyStream, discard
from consistency.cli.parser import CLOSED_PIPE, OF_EVERY_COMMAND, OUR_MISTAKE, VERDICT, Parser, adder, layout
from consistency.errors import ConsistencyError, InterruptedRunError, UsageError, first_line
from consistency.optional import is_there

COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "capture"),
    "compare": ("compare",),
    "show": ("show",),
    "devices": ("devices",),
    "doctor": ("doctor",),
    "explain": ("explain",),
    "env": ("env",),
    "completion": ("completion",),
}
"""Modules of `commands/`, and the commands that each adds; plug-ins have others.

A module imports the libraries of a command only when that command is run.
"""

EXAMPLES = (
    ("the built-in case on every device", "consistency run"),
    ("a model and an adapter of your own", "consistency run --base ./llama --adapter ./my-lora --out run-1"),
    ("this host, without any model", "consistency doctor"),
    ("two weight files or folders, without model code", "consistency diff ./my-lora ./my-lora-copy"),
    ("one command's options and examples", "consistency run --help"),
)

TRACEBACK = "CONSISTENCY_TRACEBACK"
"""Environment variable: where it is not empty, the stack of an error that this tool should not have raised is shown."""

_MOST_TEXT = 500  # characters of such an error
_NO_THREAD = "can't start new thread"  # of a RuntimeError, as CPython says it
_STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LIBRARIES = ("torch", "transformers", "peft")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    _open_closed_streams()
    _keep_on_a_full_disk()
    for number in _STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, _terminate)
    try:
        try:
            return _answer(sys.argv[1:] if arguments is None else arguments)
        finally:
            # here, and not when Python ends: an error of the output has to decide the exit status
            sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout, sys.stderr)  # the reader has seen enough
        return CLOSED_PIPE
    except OSError as error:
        discard(sys.stdout)
        _complain(str(ConsistencyError("cannot write the output", got=error)))
        return 2


def _open_closed_streams() -> None:
    """Open each standard stream that is closed (`>&-`), so that it leads nowhere.

    They are opened in the order of their numbers: the system gives a new file the lowest number that is free.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _keep_on_a_full_disk() -> None:
    """Let messages that cannot be written be lost: where stderr is a file on a full disk, the verdict is not."""
    if sys.stderr is not None and sys.stderr is sys.__stderr__:
        sys.stderr = cast("TextIO", LossyStream(cast("TextIO", sys.stderr)))


def _answer(arguments: Sequence[str]) -> int:
    """Run the command line; name the plug-ins that failed after it, and return the exit status."""
    try:
        return _status_of(arguments)
    finally:
        plugins = sys.modules.get("consistency.plugins")
        if plugins is not None:  # else nobody asked for any
            for failure in plugins.failures():
                _complain(failure.sentence)


def _status_of(arguments: Sequence[str]) -> int:
    """Run the command line, and return the exit status; errors are printed."""
    try:
        return _run_command(arguments)
    except ConsistencyError as error:
        _complain(str(error))
        return error.exit_status
    except MemoryError as error:
        _complain(f"this host has no memory left: {first_line(error)}")
        return 2
    except KeyboardInterrupt:
        stopped = InterruptedRunError("stopped: no worker is left, and no half-written capture")
        _complain(str(stopped))
        return stopped.exit_status
    except BrokenPipeError:
        raise
    except OSError as error:
        _complain(str(ConsistencyError(error.strerror or str(error), where=error.filename or "this host")))
        return 2
    except Exception as error:
        if _NO_THREAD in str(error):
            what = "this host has no room for another thread"
            _complain(str(ConsistencyError(what, got=first_line(error), hint="ulimit -u")))
            return 2
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        _complain(str(_mistake(error)))
        return OUR_MISTAKE


def _run_command(arguments: Sequence[str]) -> int:
    """Parse the command line and run its command; without any arguments, print the help."""
    parser = build_parser(arguments[0] if arguments else None)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    parsed = parser.parse_args(arguments)
    with running(["consistency", *arguments]):
        status = int(parsed.command(parsed))
    assert status in parsed.statuses, f"{parsed.parser.prog} has no exit status {status}"
    return status


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
    modules: dict[str, Sequence[str]] = {
        f"consistency.cli.commands.{name}": commands for name, commands in COMMANDS.items()
    }
    if not _has_command(modules, named):
        modules |= _plugin_modules(named)
        if named is not None and not named.startswith("-") and not _has_command(modules, named):
            _refuse_absent(named)
    installed = [module for module in modules if is_there(module)]
    wanted = [module for module in installed if named in modules[module]]
    # an option, or an unknown command: the parser of all commands has the help and the error
    for module in wanted or installed:
        _add(module, modules[module], command)
    return parser


def _has_command(modules: Mapping[str, Sequence[str]], name: str | None) -> bool:
    """Report whether any of these modules adds a command."""
    return any(name in commands for commands in modules.values())


def _refuse_absent(command: str) -> None:
    """Raise UsageError for a command of an extra that is not installed."""
    from consistency import plugins

    extra = plugins.absent("commands").get(command)
    if extra is not None:
        raise UsageError(plugins.not_installed(f"consistency {command}", extra), hint=plugins.INSTALL)


def _plugin_modules(named: str | None) -> dict[str, list[str]]:
    """Return the modules of plug-ins with the commands of each; looking for them takes as long as a short command."""
    from consistency import plugins

    return plugins.commands(named)


def _add(module: str, commands: Sequence[str], command: Callable[..., argparse.ArgumentParser]) -> None:
    """Let a module add its commands; a module of another distribution that fails is left out and noted."""
    try:
        importlib.import_module(module).add(command)
    except (Exception, SystemExit) as error:  # another distribution's code may raise anything
        from consistency import plugins

        if plugins.is_own(module):
            raise
        plugins.note_failure(f"the command {', '.join(commands)} of {module}", error)


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


def _mistake(error: Exception) -> ConsistencyError:
    """Return the error that a user sees for an error which this tool should not have raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{'/'.join(Path(frames[-1].filename).parts[-3:])}:{frames[-1].lineno}" if frames else None
    return ConsistencyError(
        "a mistake of this tool, and no verdict",
        where=place,
        got=traceback.format_exception_only(error)[-1].strip()[:_MOST_TEXT],
        hint=f"please report it to the project, with what {TRACEBACK}=1 in the environment prints",
    )


def _complain(text: str) -> None:
    """Print an error."""
    from consistency.text import clean

    print(f"consistency: {clean(text)}", file=sys.stderr)  # quotes paths and headers, which may be a stranger's


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    """End the run as Ctrl-C does, so that workers are stopped and half-written files removed."""
    raise KeyboardInterrupt
