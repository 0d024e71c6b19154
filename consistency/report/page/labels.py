"""Statuses and numbers of the page."""

from __future__ import annotations

from consistency.capture.json_codec import json_number
from consistency.report.marks import key

KEY = key()
"""Status, its mark, and what it means; a status is written as its place in here."""


def digits(value: float | None) -> float | str | None:
    """Return a number to three digits, NaN and infinities as words: JSON has none."""
    return None if value is None else json_number(float(f"{value:.3g}"))
