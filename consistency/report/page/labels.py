"""Marks, letters and numbers of the page."""

from __future__ import annotations

from consistency.capture.json_codec import json_number

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
    return None if value is None else json_number(float(f"{value:.3g}"))
