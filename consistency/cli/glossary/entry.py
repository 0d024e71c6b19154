"""What an entry of the glossary says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Words of one kind: `title` is the heading of their list, `name` says what one of them is."""

    name: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a table of the glossary says of a word.

    Attributes
    ----------
    meaning : str
        What is so, exactly: what the tool saw when it chose the word.
    cause : str
        What brings it about: of a choice, who or what chooses it.
    action : str
        What to do.
    example : str
        A line as the tool prints it, or a short situation.
    summary : str
        The meaning in a few words; empty where another table of the package has them.
    """

    meaning: str
    cause: str
    action: str
    example: str
    summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlossaryEntry:
    """A word with its explanation, as it is shown: the fields of `Explanation`, and `headline` for a list of words."""

    word: str
    family: Family
    headline: str
    summary: str
    meaning: str
    cause: str
    action: str
    example: str


def entry(
    family: Family, word: str, explanation: Explanation, *, summary: str = "", headline: str = ""
) -> GlossaryEntry:
    """Return the entry of a word.

    Parameters
    ----------
    summary : str, optional
        What another table of the package says of it.
    headline : str, optional
        The part of that which a list has room for.
    """
    return GlossaryEntry(
        word=word,
        family=family,
        headline=headline or summary or explanation.summary,
        summary=summary or explanation.summary,
        meaning=explanation.meaning,
        cause=explanation.cause,
        action=explanation.action,
        example=explanation.example,
    )


def entries(family: Family, rows: Iterable[tuple[str, Explanation]]) -> tuple[GlossaryEntry, ...]:
    """Return the entries of a table's rows, whose explanations have their own summaries."""
    return tuple(entry(family, str(word), explanation) for word, explanation in rows)
