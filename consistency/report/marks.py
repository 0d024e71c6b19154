"""The marks of every report: their meanings, their colours in a terminal, and the letters of classes of agreement."""

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
"""Mark and meaning of each status of a tensor, and of the other kinds of cells."""

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
    """Return the style in a terminal of a status, a verdict, or another kind of cell."""
    return _STYLES.get(kind, "dim")


def key(statuses: Iterable[str] = STATUSES) -> tuple[tuple[str, str, str], ...]:
    """Return the rows of a legend: each status with its mark and its meaning."""
    return tuple((status, *MARKS[status]) for status in statuses)


def letter(number: int) -> str:
    """Return the letter of a class of agreement, counted from 0: A, B, … Z, AA, AB and so on."""
    letters = ""
    number += 1  # digits count from 1 to 26: there is none for zero
    while number:
        number, digit = divmod(number - 1, 26)
        letters = chr(ord("A") + digit) + letters
    return letters
