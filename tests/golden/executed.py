"""The commands of a document, run in their order in one folder, and what they print.

python -m tests.golden.executed    # write what they print anew; a reviewer reads the difference

A block of the language `console` has a command after `$ `, and below it what the command prints. A line `…` stands for
lines that the document leaves out. Figures, addresses and line breaks may differ from machine to machine.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
EXECUTED = (TUTORIAL, ROOT / "docs" / "across-machines.md")
"""Pages whose commands are run, one after the other in one folder."""

README = ROOT / "README.md"
"""Shows a part of what the tutorial does."""

OMISSION = "…"

PRINTED = re.compile(r"^ *(?:next|again|which setting): (consistency .+)$", re.MULTILINE)
"""A command that a report prints to be typed next."""

_BLOCK = re.compile(r"^```console\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_NODE = re.escape(platform.node())
_FIGURES = (
    (re.compile(r"0x[0-9a-f]+"), "#"),
    (re.compile(r"x86-64 \S+ .*"), "architecture"),
    (re.compile(rf"\b{_NODE}\b"), "HOST"),
    (re.compile(r"\d+(?:[.:]\d+)*(?:e[-+]?\d+)?"), "#"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A command as a document shows it, and the lines below it."""

    command: str
    lines: tuple[str, ...]


def shown_in(page: str) -> list[Shown]:
    """Return the commands of a page, in their order."""
    return [shown for block in _BLOCK.finditer(page) for shown in _commands_of(block["text"])]


def _commands_of(block: str) -> Iterator[Shown]:
    command = ""
    lines: list[str] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            if command:
                yield Shown(command=command, lines=tuple(lines))
            command, lines = line.removeprefix("$ "), []
        else:
            lines.append(line)
    yield Shown(command=command, lines=tuple(lines))


def commands() -> list[str]:
    """Return the commands of the pages that are executed."""
    return [shown.command for page in EXECUTED for shown in shown_in(page.read_text(encoding="utf-8"))]


@contextmanager
def runner(program: Sequence[str] = ()) -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    """Yield what runs a command in a copy of the tutorial's folder; `program` takes the place of `consistency`."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "COLUMNS": "100",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tutorial"
        shutil.copytree(ROOT / "docs" / "tutorial", folder, ignore=shutil.ignore_patterns("__pycache__"))
        yield lambda command: subprocess.run(
            re.sub("^consistency(?= )", shlex.join(program) or r"\g<0>", command),
            shell=True, cwd=folder, env=environment, check=False, timeout=600, capture_output=True, text=True,
        )  # fmt: skip


def outputs(wanted: list[str], program: Sequence[str] = ()) -> dict[str, str]:
    """Run commands in a copy of the tutorial's folder; return what each prints, without progress on standard error."""
    with runner(program) as run:
        return {command: run(command).stdout for command in wanted}


def without_figures(line: str) -> str:
    """Return the words of a line, without what differs from machine to machine."""
    for pattern, stands_for in _FIGURES:
        line = pattern.sub(stands_for, line)
    return " ".join(line.split())


def _segments(lines: tuple[str, ...]) -> list[list[str]]:
    """Return the runs of lines between omissions."""
    segments: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == OMISSION:
            segments.append([])
        else:
            segments[-1].append(line)
    return segments


def shows(page: Path, text: str) -> bool:
    """Return whether a page has a text, with other figures and line breaks."""
    return without_figures(text) in without_figures(page.read_text(encoding="utf-8"))


def printed(shown: Shown, output: str) -> list[str] | None:
    """Return the lines of an output that a document shows, with omissions; None where it prints something else."""
    raw = output.splitlines()
    words = [(word, number) for number, line in enumerate(raw) for word in without_figures(line).split()]
    lines: list[str] = []
    at = 0
    segments = _segments(shown.lines)
    for place, segment in enumerate(segments):
        wanted = [word for line in segment for word in without_figures(line).split()]
        start = _find(wanted, words, at, anywhere=place > 0)
        if start is None:
            return None
        at = start + len(wanted)
        if place:
            lines.append(OMISSION)
        if wanted:
            lines += raw[words[start][1] : words[at - 1][1] + 1]
    ends = bool(segments[-1]) or len(segments) == 1  # otherwise the last line is an omission
    if ends and at != len(words):
        return None
    return lines


def _find(wanted: list[str], words: list[tuple[str, int]], at: int, *, anywhere: bool) -> int | None:
    """Return where words stand in an output from a place on, or exactly there."""
    last = len(words) - len(wanted) if anywhere else at
    for start in range(at, last + 1):
        if [word for word, _ in words[start : start + len(wanted)]] == wanted:
            return start
    return None


def refreshed(page: str, by_command: dict[str, str]) -> str:
    """Return a page with what its commands print now; whole where that has other words than before."""

    def of_block(block: re.Match[str]) -> str:
        lines = []
        for shown in _commands_of(block["text"]):
            output = by_command[shown.command]
            now = printed(shown, output)
            lines += [f"$ {shown.command}", *(output.splitlines() if now is None else now)]
        return "```console\n" + "".join(f"{line}\n" for line in lines) + "```"

    return _BLOCK.sub(of_block, page)


if __name__ == "__main__":
    found = outputs(commands())
    for path in (*EXECUTED, README):
        path.write_text(refreshed(path.read_text(encoding="utf-8"), found), encoding="utf-8")
