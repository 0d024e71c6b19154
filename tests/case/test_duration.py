"""The times that a user gives, and how they are written."""

from __future__ import annotations

import pytest

from consistency.case.duration import duration_text, parse_duration
from consistency.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("1h30m", 5400), ("90", 90), (45, 45), ("0.5h", 1800), ("1m30", 90)],
)
def test_a_time_is_read(text: object, seconds: float) -> None:
    assert parse_duration(text, where="--for") == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-5m", "10 minutes", "m", "30m1h", "nan", "inf", True])
def test_anything_else_is_refused_with_what_is_allowed(text: object) -> None:
    with pytest.raises(UsageError) as raised:
        parse_duration(text, where="--for")
    assert "90s, 10m, 2h, 1h30m" in str(raised.value)
    assert "--for" in str(raised.value)


@pytest.mark.parametrize(("seconds", "text"), [(0.25, "0.25s"), (90, "1m30s"), (600, "10m"), (5400, "1h30m")])
def test_a_time_is_written_as_it_is_read(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
    assert parse_duration(text, where="") == seconds
