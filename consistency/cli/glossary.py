"""The words of this tool: what each means, what causes it, what to do, and an example. No torch here.

They are entries of `docs/glossary.md`, which a wheel has beside this module. It stands beside the commands because
exit statuses are words too.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from consistency import plugins
from consistency.capture.wording import some
from consistency.errors import InputError, UsageError, did_you_mean

FAMILIES = (
    "word of a diagnosis", "kind of finding", "mistake of an inference engine", "mistake of a merge",
    "flaw of an adapter",
    "verdict",
    "severity of a finding", "status of a row", "outcome of a worker", "stage", "rule", "level", "load path",
    "change in a history", "exit status",
)  # fmt: skip
"""The name of a word of each part of the page, in the order of its parts."""

_ENTRY = re.compile(
    r"### `(?P<word>.+)`\n\n\*(?P<summary>.+)\*\n\n(?P<meaning>.+)\n\n\* \*\*Cause\.\*\* (?P<cause>.+)\n"
    r"\* \*\*What to do\.\*\* (?P<action>.+)\n\* \*\*Example\.\*\* `(?P<example>.+)`\n"
)
_ESCAPED = re.compile(r"\\([\\*<>$\[\]])")
_SEVERAL = ("word of a diagnosis", "exit status")
"""Families whose summaries have several clauses, separated by semicolons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Words of one kind: `title` is the heading of their list, `name` the noun for one of them."""

    name: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GlossaryEntry:
    """A word of the glossary."""

    word: str
    family: Family
    headline: str  # the part of the summary that a list has room for
    summary: str  # the meaning in a few words, as reports put it
    meaning: str  # the exact meaning: what the tool saw when it chose the word
    cause: str  # what brings it about; for a choice, who or what chooses it
    action: str  # what to do
    example: str  # a line as the tool prints it, or a short situation


@functools.cache
def glossary() -> tuple[GlossaryEntry, ...]:
    """Return every entry, by family."""
    main_page = _split_page(_page())
    families = {
        heading: Family(name=name, title=heading[0].lower() + heading[1:])
        for name, heading in zip(FAMILIES, main_page, strict=True)
    }
    pages = [main_page, *_further_pages(families.keys())]
    entries: list[GlossaryEntry] = []
    for heading, family in families.items():
        for page in pages:
            entries += _entries(page.get(heading, ""), family)
    return tuple(entries)


def _split_page(page: str) -> dict[str, str]:
    """Return the parts of a page by their headings."""
    parts = page.split("\n## ")[1:]
    return {part.partition("\n")[0]: part for part in parts}


def _entries(part: str, family: Family) -> Iterator[GlossaryEntry]:
    """Yield the entries of a part."""
    for match in _ENTRY.finditer(part):
        texts = {field: _ESCAPED.sub(r"\1", text) for field, text in match.groupdict().items()}
        headline = texts["summary"]
        if family.name in _SEVERAL:
            headline = headline.partition("; ")[0]
        yield GlossaryEntry(family=family, headline=headline, **texts)


def _further_pages(headings: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield the parts of each page beside a stage, and of a plug-in.

    A page of another distribution that cannot be read is left out and noted.
    """
    for page in sorted((Path(__file__).parents[1] / "stages").glob("*/glossary.md")):
        yield _split_page(page.read_text(encoding="utf-8"))
    for plugin in plugins.plugins():
        for reference in plugin.glossary:
            package, _, file = reference.partition(":")
            try:
                parts = _split_page((importlib.resources.files(package) / file).read_text(encoding="utf-8"))
                unknown = parts.keys() - set(headings)
                if unknown:
                    raise ValueError(f"no part of the glossary: {min(unknown)}")
            except (Exception, SystemExit) as error:
                if plugins.is_own(package):
                    raise
                plugins.note_failure(f"the glossary {reference} of the plug-in {plugin.name}", error)
            else:
                yield parts


def _page() -> str:
    """Return the text of the page: the installed one, or the one in the repository."""
    module = Path(__file__).resolve()
    for page in (module.with_name("glossary.md"), module.parents[2] / "docs" / "glossary.md"):
        if page.exists():
            return page.read_text(encoding="utf-8")
    raise InputError("the glossary is not installed", where=module.parent, wanted="glossary.md")


def known_words() -> list[str]:
    """Return every word, each once: one may be in several families."""
    return list(dict.fromkeys(entry.word for entry in glossary()))


def explained(word: str) -> Sequence[GlossaryEntry]:
    """Return the entries of a word, one per family that has it.

    Raises
    ------
    UsageError
        No family has it.
    """
    form = word.strip().lower().replace("_", "-")
    entries = [entry for entry in glossary() if entry.word == form]
    if not entries:
        hint = _related_hint(word) or did_you_mean(word, known_words()) or "`consistency explain` lists all words"
        raise UsageError("no such word", where="WORD", got=word, wanted="a word of a report", hint=hint)
    return entries


def _related_hint(word: str) -> str:
    """Return a hint at the words whose entries mention an unknown word; empty where none does."""
    text = word.strip().lower()
    if not text:
        return ""
    related = []
    for entry in glossary():
        if text in f"{entry.summary}\n{entry.meaning}\n{entry.cause}".lower():
            related.append(entry.word)
    return f"these have to do with it: {some(list(dict.fromkeys(related)))}" if related else ""
