"""Marks, letters and numbers of the page."""

from __future__ import annotations

import math

KEY = (
    ("equal", "=", "bitwise equal to the reference"),
    ("within", "≤", "within tolerance"),
    ("outside", "✗", "mismatch"),
    ("missing", "?", "missing"),
    ("unexpected", "+", "unexpected"),
    ("skipped", "–", "skipped, with a reason"),
    ("blocked", "!", "could not be checked"),
)
"""Status, its mark, and what it means; a status is written as its place in here."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


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
