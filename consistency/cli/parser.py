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
    "fleet": VERDICT,
    "doctor": {**VERDICT, 0: "nothing is wrong", 1: "something is wrong"},
    "capture": {0: "captured", **BAD_USE, 3: "incomplete (a worker was lost)"},
    "diff": {0: "equal", 1: "different", **BAD_USE},
    "check-merged": {0: "it holds base + adapter", 1: "it does not", **BAD_USE, 3: "a part of it could not be judged"},
    "drill": {0: "every planted fault was found and named", 1: "one was not", **BAD_USE},
    "bisect": {0: "a setting explains it, or it does not occur again", 1: "no setting explains it", **BAD_USE},
    "reproduce": {0: "written, whether it happens on this machine or not", **BAD_USE},
    "status": {
        0: "consistent",
        1: "inconsistent",
        2: "nothing was checked, no result, or bad usage",
        3: "incomplete, or stale",
    },
    "show": {0: "printed, whatever the verdict is", **BAD_USE},
    "devices": {0: "listed", **BAD_USE},
    "check-text": {
        0: "the model could have written all of it",
        1: "it could not, or log probabilities are not the model's",
        **BAD_USE,
        3: "incomplete (a text was not judged)",
    },
    "inputs": {0: "written", **BAD_USE},
    "engine": {0: "written", **BAD_USE},
    "history": {0: "printed, written or removed, whatever the verdicts are", **BAD_USE},
    "baseline": {0: "written", **BAD_USE},
    "explain": {0: "explained", **BAD_USE},
    "env": {0: "printed", **BAD_USE},
    "completion": {0: "printed", **BAD_USE},
}
"""By command. Those of Nagios are in the help of `status --format`."""


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


def adder(commands: Any, of: str | None = None) -> Callable[..., argparse.ArgumentParser]:
    """Return the function by which a module adds its command: name, function, help, and its own examples.

    An action of a command has the exit statuses of that, which `of` names.
    """

    def command(
        name: str,
        function: Callable[[argparse.Namespace], int],
        text: str,
        examples: Sequence[Example] = (),
    ) -> argparse.ArgumentParser:
        description = f"{text[0].upper()}{text[1:]}."
        statuses = EXIT_STATUS[of or name]
        added: argparse.ArgumentParser = commands.add_parser(
            name, help=text, description=description, **layout(examples, statuses)
        )
        added.set_defaults(command=function, parser=added, statuses=statuses)
        return added

    return command
