"""What the tutorial and the README show is what their commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator.fixtures import Warm
from tests.golden.executed import EXECUTED, README, Shown, commands, outputs, printed, refreshed, shown_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def by_command(warm: Warm) -> dict[str, str]:
    return outputs(commands(), warm().command())


@pytest.mark.parametrize("page", [*EXECUTED, README], ids=lambda page: page.stem)
def test_a_page_shows_what_its_commands_print(page: Path, by_command: dict[str, str]) -> None:
    blocks = shown_in(page.read_text(encoding="utf-8"))
    assert blocks
    for shown in blocks:
        output = by_command[shown.command]
        assert printed(shown, output) is not None, f"if that is meant: python -m tests.golden.executed\n{output}"


def test_figures_may_differ_and_words_may_not() -> None:
    output = "worst 0.74 of 3 tensors\n  detail\nlast line\n"
    assert printed(Shown(command="", lines=("worst 0.5 of", "12 tensors", "…", "last line")), output) == [
        "worst 0.74 of 3 tensors", "…", "last line",
    ]  # fmt: skip
    assert printed(Shown(command="", lines=("…", "detail", "…")), output) == ["…", "  detail", "…"]
    for lines in ((), ("worst 0.5 of 12 layers", "…"), ("worst 0.5 of 12 tensors",), ("detail", "…"), ("…", "detail")):
        assert printed(Shown(command="", lines=lines), output) is None


def test_a_refreshed_page_has_the_new_figures() -> None:
    page = "text\n```console\n$ a\nis 1\n…\n$ b\nold\n```\nmore\n"
    assert refreshed(page, {"a": "is 2\nand more\n", "b": "new\nwords\n"}) == (
        "text\n```console\n$ a\nis 2\n…\n$ b\nnew\nwords\n```\nmore\n"
    )
