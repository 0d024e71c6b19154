"""The `consistency …` command lines of a document, and whether the command line takes them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from consistency.cli.main import build_parser
from consistency.errors import UsageError

FENCE = re.compile(r"^```([\w{}-]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_SEPARATORS = {"|", "||", "&&", ";", ">", "2>&1", "#"}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every `consistency …` command line, in code blocks and in code spans.

    A block of the language `text` is what a command printed.
    """
    for language, block in FENCE.findall(text):
        if language == "text":
            continue
        joined = re.sub(r"\\\n\s*|\n\s+(?=--)", " ", block)  # continued by a backslash, or folded in YAML
        for line in joined.splitlines():
            yield from _commands_of(line)
    for span in SPAN.findall(FENCE.sub("", text)):
        yield from _commands_of(span)


def _commands_of(line: str) -> Iterator[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # prose or output with an apostrophe
        return
    first = True
    for at, word in enumerate(words):
        if " " in word.strip() and word.startswith("consistency "):  # bash -c '…'
            yield from _commands_of(word)
        elif word.endswith("bin/consistency") or (first and word == "consistency"):
            rest = words[at + 1 :]
            stop = next((n for n, w in enumerate(rest) if w in _SEPARATORS), len(rest))
            if rest and re.fullmatch(r"[a-z]+", rest[0]) and rest[1:2] != ["·"]:  # otherwise output
                yield rest[:stop]
        first = word in ("&&", "||", ";", "$")


def refused(arguments: list[str]) -> str | None:
    """Parse a command line without running it; return why it is refused."""
    if len(arguments) == 1 or (arguments[0] == "baseline" and len(arguments) == 2):
        arguments = [*arguments, "--help"]  # a command that is only mentioned
    try:
        build_parser().parse_args(arguments)
    except SystemExit as done:
        return f"exit status {done.code}" if done.code else None
    except UsageError as error:
        return str(error)
    return None
