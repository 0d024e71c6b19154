"""The marks of every report: what each means, its colour in a terminal, and the letters of classes of agreement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MARKS: Mapping[str, tuple[str, str]] = {
    "equal": ("=", "bitwise equal"),
    "within": ("≤", "within tolerance"),
    "outside": ("✗", "mismatch"),
    "missing": ("?", "missing"),
    "unexpected": ("+", "unexpected"),
    "skipped": ("–", "skipped, with a reason"),
    "blocked": ("!", "could not be checked"),
    "flagged": ("≠", "within tolerance, but there is an error finding (drift, …)"),
    "elsewhere": ("″", "checked in another case, for the whole host"),
    "none": ("–", "not checked"),
}
"""Mark and meaning of each status, and of what else a cell may say."""

STATUSES = ("equal", "within", "outside", "missing", "unexpected", "skipped", "blocked")

VERDICT_MARKS = {"consistent": "✓", "inconsistent": "✗", "incomplete": "!", "unchecked": "!"}
"""Sign of a verdict."""

_STYLES = {
    "equal": "green", "within": "green", "consistent": "green",
    "outside": "bold red", "missing": "bold red", "unexpected": "bold red", "flagged": "bold red",
    "inconsistent": "bold red",
    "blocked": "yellow", "incomplete": "yellow", "unchecked": "yellow",
    "plain": "",
}  # fmt: skip


def style_of(kind: str) -> str:
    """Return the style in a terminal of a status, of a verdict, or of what else a cell may say."""
    return _STYLES.get(kind, "dim")


def key(statuses: Iterable[str] = STATUSES) -> tuple[tuple[str, str, str], ...]:
    """Return statuses, each with its mark and its meaning."""
    return tuple((status, *MARKS[status]) for status in statuses)


def letter(number: int) -> str:
    """Return the letter of a class of agreement, counted from 0: A, B, … Z, AA, AB and so on."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("A") + rest) + text
    return text
