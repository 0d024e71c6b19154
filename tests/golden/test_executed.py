"""What the tutorial and the README show is what their commands print."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.accelerator.fixtures import Warm
from tests.golden.executed import (
    EXECUTED,
    PRINTED,
    README,
    Shown,
    commands,
    printed,
    refreshed,
    runner,
    shown_in,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(warm: Warm) -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    with runner(warm().command()) as in_folder:
        yield in_folder


@pytest.fixture(scope="module")
def by_command(run: Callable[[str], subprocess.CompletedProcess[str]]) -> dict[str, str]:
    return {command: run(command).stdout for command in commands()}


@pytest.mark.parametrize("page", [*EXECUTED, README], ids=lambda page: page.stem)
def test_a_page_shows_what_its_commands_print(page: Path, by_command: dict[str, str]) -> None:
    blocks = shown_in(page.read_text(encoding="utf-8"))
    assert blocks
    for shown in blocks:
        output = by_command[shown.command]
        assert printed(shown, output) is not None, f"if that is meant: python -m tests.golden.executed\n{output}"


def test_what_they_print_to_be_typed_next_runs_as_pasted(
    run: Callable[[str], subprocess.CompletedProcess[str]], by_command: dict[str, str]
) -> None:
    printed_next = dict.fromkeys(line for output in by_command.values() for line in PRINTED.findall(output))
    assert len(printed_next) > 2
    run("rm -rf repro*")  # the pages have typed one of them
    for line in printed_next:
        done = run(line)
        is_run = line.startswith("consistency run ")  # whose fault is still there, or was in a file that is mended
        assert done.returncode in ((0, 1) if is_run else (0,)), (line, done.stdout[-2000:], done.stderr[-2000:])


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
