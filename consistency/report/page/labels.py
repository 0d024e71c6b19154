"""Words for numbers, and names from strangers made fit to be shown."""

from __future__ import annotations

import math

from consistency.report.terminal import clean

KEY = (
    ("equal", "=", "same bits as the reference"),
    ("within", "≤", "within what is allowed"),
    ("outside", "✗", "outside of what is allowed"),
    ("missing", "?", "missing"),
    ("unexpected", "+", "not expected to be there"),
    ("skipped", "–", "skipped, with a reason"),
    ("blocked", "!", "could not be looked at"),
)
"""Status, its mark, and what it means; a status is written as its place in here."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def shown(text: object) -> str:
    """Return a name on one line, its control characters and line feeds shown instead of obeyed."""
    return clean(str(text)).replace("\n", "\\x0a")


def letter(number: int) -> str:
    """Return the letter of a class of agreement: A, B, … Z, AA, AB and so on."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, len(LETTERS))
        text = LETTERS[rest] + text
    return text


def digits(value: float | None) -> float | str | None:
    """Return a number to three digits, NaN and infinities as words: JSON has none."""
    if value is None:
        return None
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return float(f"{value:.3g}")


def size(count: int | None) -> str:
    """Write bytes as a person reads them."""
    if count is None:
        return ""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def counted(number: int, what: str) -> str:
    """Write a number with its noun."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
