"""What an error from elsewhere is quoted as."""

from __future__ import annotations

import pytest

from consistency.errors import did_you_mean, first_line


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


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("adaptor", "adapter"),
        ("ADAPTER", "adapter"),
        ("load-paths", "load_paths"),
        ("allow", "allow_pickle"),
        ("architecture", "arch"),
        ("xyz", None),
        ("a", None),
        ("", None),
    ],
)
def test_what_was_meant_is_named_as_it_is_written(given: str, name: str | None) -> None:
    known = ("base", "adapter", "load_paths", "allow_pickle", "arch")
    assert did_you_mean(given, known) == (None if name is None else f"did you mean {name}?")
