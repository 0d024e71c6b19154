"""The command line: errors look like all others, and a help ends with the exit statuses and examples."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from consistency.errors import UsageError, did_you_mean

BAD_USE = {2: "bad usage or bad input"}

VERDICT = {0: "consistent", 1: "inconsistent", **BAD_USE, 3: "incomplete (a worker was lost)"}

CLOSED_PIPE = 141
"""The reader of the output closed it: 128 and the number of SIGPIPE, as a shell counts; 130 is SIGINT's."""

OUR_MISTAKE = 70
"""An error that this tool should not have raised, and so no verdict: EX_SOFTWARE of sysexits(3)."""

OF_EVERY_COMMAND = {
    OUR_MISTAKE: "a mistake of this tool, and no verdict",
    130: "stopped by Ctrl-C, SIGTERM, SIGHUP or SIGQUIT",
    CLOSED_PIPE: "the reader of the output closed it",
}

EXIT_STATUS: Mapping[str, Mapping[int, str]] = {
    "run": VERDICT,
    "compare": VERDICT,
    "doctor": {**VERDICT, 0: "nothing is wrong", 1: "something is wrong"},
    "capture": {0: "captured", **BAD_USE, 3: "incomplete (a worker was lost)"},
    "show": {0: "printed, whatever the verdict is", **BAD_USE},
    "devices": {0: "listed", **BAD_USE},
    "explain": {0: "explained", **BAD_USE},
    "env": {0: "printed", **BAD_USE},
    "completion": {0: "printed", **BAD_USE},
}
"""What each exit status of a command means, for the commands in `cli/commands/`. A plug-in states those of its own
commands; those that Nagios reads are in the help of `status --format`."""


def status_line(statuses: Mapping[int, str]) -> str:
    """Return the line of a help."""
    return "exit status: " + "; ".join(f"{status} {meaning}" for status, meaning in statuses.items())


Example = tuple[str, str]
"""What a command line does, and the command line."""


class Parser(argparse.ArgumentParser):
    """A parser that says what was meant by an option that it does not know."""

    def error(self, message: str) -> NoReturn:
        """Raise one of argparse's errors as one of ours."""
        raise UsageError(message, hint=self._help_hint())

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a whole command line; raise `UsageError` for an argument that no command takes."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            name = next((one for one in rest if one.startswith("-")), rest[0]).partition("=")[0]
            of_command: Parser = getattr(parsed, "parser", self)
            raise of_command.unknown(name)
        return parsed

    def unknown(self, name: str) -> UsageError:
        """Return the error for an argument that this command does not take."""
        known = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", self.format_help())))
        if not name.startswith("-"):
            return UsageError(f"{self.prog} takes no such argument: {name}", hint=self._help_hint())
        hint = did_you_mean(name, known)
        return UsageError(
            f"{self.prog} has no option {name}",
            wanted=None if hint else ", ".join(known),
            hint=hint or self._help_hint(),
        )

    def _help_hint(self) -> str:
        return f"`{self.prog} --help` lists what it takes"


class Once(argparse.Action):
    """Take a value once: argparse lets the last of several win, and nobody sees what became of the others.

    `instead` is what to do who has several.
    """

    def __init__(self, *args: Any, instead: str | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._instead = instead

    def __call__(
        self, _: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store the value; raise `UsageError` where one was given before."""
        earlier = getattr(namespace, self.dest)
        if earlier is not None:
            raise UsageError(f"{option} was given twice", got=f"{earlier} and {values}", hint=self._instead)
        setattr(namespace, self.dest, values)


def layout(examples: Sequence[Example], statuses: Mapping[int, str]) -> dict[str, Any]:
    """Return what every parser is made with; its help ends with the meaning of its exit statuses and the examples."""
    lines = [f"  # {what}\n  {line}" for what, line in examples]
    return {
        "epilog": "\n".join([status_line(statuses), "", "examples:", *lines]),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def statuses_by_command(parser: argparse.ArgumentParser) -> dict[str, Mapping[int, str]]:
    """Return the exit statuses of every command of a parser, those of plug-ins too."""
    found: dict[str, Mapping[int, str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {name: command.get_default("statuses") for name, command in action.choices.items()}
    return found


def adder(commands: Any, of_all: Mapping[int, str] | None = None) -> Callable[..., argparse.ArgumentParser]:
    """Return the function by which a module adds its command: name, function, help, its examples, its exit statuses.

    The actions of one command have those of that in common, `of_all`.
    """

    def command(
        name: str,
        function: Callable[[argparse.Namespace], int],
        text: str,
        examples: Sequence[Example] = (),
        *,
        statuses: Mapping[int, str] | None = None,
    ) -> argparse.ArgumentParser:
        description = f"{text[0].upper()}{text[1:]}."
        if statuses is None:
            statuses = EXIT_STATUS[name] if of_all is None else of_all
        added: argparse.ArgumentParser = commands.add_parser(
            name, help=text, description=description, **layout(examples, statuses)
        )
        added.set_defaults(command=function, parser=added, statuses=statuses)
        return added

    return command
