"""Parsers of the command line: errors look like all others, and a help ends with the exit statuses and examples."""

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
"""Meaning of each exit status of a command, for the commands in `cli/commands/`. A plug-in states those of its own
commands; the statuses that Nagios reads are in the help of `status --format`."""


def status_line(statuses: Mapping[int, str]) -> str:
    """Return the line of a help that lists the exit statuses."""
    return "exit status: " + "; ".join(f"{status} {meaning}" for status, meaning in statuses.items())


Example = tuple[str, str]
"""A comment that says what a command line does, and the command line."""


class Parser(argparse.ArgumentParser):
    """A parser that suggests an option for one that it does not know."""

    def error(self, message: str) -> NoReturn:
        """Raise one of argparse's errors as one of ours."""
        raise UsageError(message, hint=self._help_hint())

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a whole command line; raise `UsageError` for an argument that no command takes."""
        parsed, unparsed = self.parse_known_args(args, namespace)
        if unparsed:
            # an option is the likelier mistake than what follows it
            argument = next((argument for argument in unparsed if argument.startswith("-")), unparsed[0])
            command_parser: Parser = getattr(parsed, "parser", self)
            raise command_parser.unknown(argument.partition("=")[0])
        return parsed

    def unknown(self, name: str) -> UsageError:
        """Return the error for an argument that this command does not take."""
        if not name.startswith("-"):
            return UsageError(f"{self.prog} takes no such argument: {name}", hint=self._help_hint())
        options = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", self.format_help())))
        hint = did_you_mean(name, options)
        return UsageError(
            f"{self.prog} has no option {name}",
            wanted=None if hint else ", ".join(options),
            hint=hint or self._help_hint(),
        )

    def _help_hint(self) -> str:
        return f"`{self.prog} --help` lists what it takes"


class Once(argparse.Action):
    """Take a value once: argparse lets the last of several win, and nobody sees what became of the others.

    `instead` is the hint for a user with several values.
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
    """Return the arguments of every parser; its help ends with the meaning of its exit statuses and the examples."""
    lines = [f"  # {comment}\n  {line}" for comment, line in examples]
    return {
        "epilog": "\n".join([status_line(statuses), "", "examples:", *lines]),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def statuses_by_command(parser: argparse.ArgumentParser) -> dict[str, Mapping[int, str]]:
    """Return the exit statuses of every command of a parser, including the commands of plug-ins."""
    statuses: dict[str, Mapping[int, str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            statuses |= {name: command.get_default("statuses") for name, command in action.choices.items()}
    return statuses


def adder(commands: Any, of_all: Mapping[int, str] | None = None) -> Callable[..., argparse.ArgumentParser]:
    """Return the function by which a module adds its command: name, function, help, its examples, its exit statuses.

    `of_all` are the exit statuses that the actions of one command share; None for the commands in `EXIT_STATUS`.
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
