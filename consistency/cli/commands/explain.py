"""`consistency explain`: print what a word of a report means, what causes it, and what to do."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from consistency.cli.output import print_json

if TYPE_CHECKING:
    from consistency.cli.glossary import GlossaryEntry

EXAMPLES = (
    ("a word of a finding", "consistency explain wrong-scale"),
    ("several at once", "consistency explain zeros shared incomplete"),
    ("an exit status", "consistency explain 3"),
    ("every word, a line each", "consistency explain"),
)

# fields of an entry, and their labels
_LABELS = (("meaning", "meaning"), ("cause", "cause"), ("action", "what to do"), ("example", "example"))
_INDENT = 13


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        "explain",
        _explain,
        "explain words of a report, such as kinds of findings, stages and exit statuses",
        EXAMPLES,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="words of a report, or an exit status; without one, all words are listed",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _explain(parsed: argparse.Namespace) -> int:
    """Run the command."""
    from consistency.cli.glossary import explained, glossary

    entries: list[GlossaryEntry] = []
    for word in dict.fromkeys(parsed.words):
        entries += explained(word)
    if not parsed.words:
        entries = list(glossary())
    if parsed.json:
        print_json([_as_table(entry) for entry in entries])
    elif parsed.words:
        print("\n\n".join("\n".join(_lines(entry, _width())) for entry in entries))
    else:
        print("\n".join(_list_lines(entries)))
    return 0


def _as_table(entry: GlossaryEntry) -> dict[str, Any]:
    """Return an entry for JSON."""
    from consistency.comparison.findings.remark import remarks_on_word

    fields = ("summary", *(name for name, _ in _LABELS))
    texts = {name: getattr(entry, name) for name in fields}
    known_faults = list(remarks_on_word(entry.word))
    return {"word": entry.word, "family": entry.family.name, **texts, "known": known_faults}


def _lines(entry: GlossaryEntry, width: int) -> Iterator[str]:
    """Yield the lines of an entry: its word and family, its summary, its other fields, and the remarks on it."""
    from consistency.comparison.findings.remark import remarks_on_word

    yield f"{entry.word} · {entry.family.name}"
    yield from textwrap.wrap(entry.summary, width, initial_indent="  ", subsequent_indent="  ")
    yield ""
    for name, label in _LABELS:
        first = f"  {label}".ljust(_INDENT)
        yield from _wrapped(getattr(entry, name), width, first)
    for line in remarks_on_word(entry.word):
        yield from _wrapped(line, width, "  known".ljust(_INDENT))


def _wrapped(text: str, width: int, first: str) -> list[str]:
    """Return the lines of a text below each other, the first one behind its label."""
    # a hyphen is a part of words and options: only blanks break a line
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _list_lines(entries: list[GlossaryEntry]) -> Iterator[str]:
    """Yield a line per word, below the title of its family."""
    width = max(len(entry.word) for entry in entries) + 2
    family = None
    for entry in entries:
        if entry.family != family:
            if family is not None:
                yield ""
            yield entry.family.title
            family = entry.family
        yield f"  {entry.word.ljust(width)}{entry.headline}"


def _width() -> int:
    """Return the columns of the terminal, but no more than are read with ease."""
    import shutil

    return min(100, max(40, shutil.get_terminal_size().columns))
