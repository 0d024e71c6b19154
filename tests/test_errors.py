"""What an error from elsewhere is quoted as."""

from __future__ import annotations

import pytest

from consistency.errors import first_line


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such key\nmore"), "ValueError: no such key"),
        (KeyError(), "KeyError: no message"),
        (RuntimeError("  \n padded"), "RuntimeError: padded"),
    ],
)
def test_first_line(error: Exception, text: str) -> None:
    assert first_line(error) == text


def test_a_long_line_is_cut() -> None:
    assert len(first_line(RuntimeError("x" * 1000))) == 300
