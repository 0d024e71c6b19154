"""The command line that made something."""

from __future__ import annotations

import datetime
import sys

import pytest

from consistency.capture import origin


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/consistency", "run", "--out", "a b"], ("consistency", "run", "--out", "a b")),
        (["/lib/python/consistency/__main__.py", "run"], ("python", "-m", "consistency", "run")),
        (["check.py", "x"], ("python", "check.py", "x")),
        (["/venv/bin/pytest", "-n", "2"], ("pytest", "-n", "2")),
        (["-c"], ("python",)),
        ([""], ("python",)),
    ],
)
def test_the_command_of_this_process(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert origin.command() == command


def test_a_command_that_was_given_as_a_list_wins() -> None:
    with origin.running(["consistency", "compare"]):
        assert origin.command() == ("consistency", "compare")
    assert origin.command() != ("consistency", "compare")


def test_the_time_is_utc() -> None:
    assert datetime.datetime.fromisoformat(origin.now()).utcoffset() == datetime.timedelta(0)
