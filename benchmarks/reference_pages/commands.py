"""`docs/commands.md`: every command with its help, as it prints it in 100 columns."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from benchmarks.reference_pages.markdown import code, fence, prose, table
from consistency.cli.main import build_parser
from consistency.cli.parser import OF_EVERY_COMMAND

COLUMNS = 100

_HEAD = """# Commands

Each command's help, as `--help` prints it.
"""


def page() -> str:
    """Return the page."""
    with _columns(COLUMNS):
        root = build_parser()
        found = list(_commands(root))
        lines = [_HEAD, *table(("command", "purpose"), _purposes(found)), ""]
        lines += ["Exit statuses of every command, beside its own:", ""]
        lines += [*_statuses(OF_EVERY_COMMAND), ""]
        for parser, statuses in found:
            lines += [f"## {parser.prog}", "", prose(parser.description or ""), ""]
            lines += [*fence(parser.format_help()), "", *_statuses(statuses), ""]
    return "\n".join(lines)


@contextmanager
def _columns(columns: int) -> Iterator[None]:
    """Let helps be as wide as this, whatever terminal there is."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def _commands(
    parser: argparse.ArgumentParser, command: str = ""
) -> Iterator[tuple[argparse.ArgumentParser, Mapping[int, str]]]:
    """Yield the parsers of commands and of their actions, with the exit statuses of the command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield inner, inner.get_default("statuses")
                yield from _commands(inner, command or name)


def _purposes(found: list[tuple[argparse.ArgumentParser, Mapping[int, str]]]) -> Iterator[list[str]]:
    for parser, _ in found:
        yield [f"[{code(parser.prog)}](#{parser.prog.replace(' ', '-')})", prose(parser.description or "")]


def _statuses(statuses: Mapping[int, str]) -> Iterator[str]:
    yield from table(("exit status", "meaning"), ([str(status), prose(text)] for status, text in statuses.items()))
