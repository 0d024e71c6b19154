"""The parser of the command line: its errors look like all others, and its help ends with examples."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from consistency.cli.exit_status import EXIT_STATUS, status_line
from consistency.errors import UsageError, did_you_mean

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
