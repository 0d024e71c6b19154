"""Ask the command-line tools of AMD and Intel, which need no package of Python, what they report of a host's GPUs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Run = Callable[[Sequence[str]], str | None]

TIMEOUT_S = 10.0
"""Seconds that one command may take: `amd-smi` is a Python program that asks every GPU for everything."""

NOT_AVAILABLE = frozenset({"", "N/A", "unknown", "Unknown", "not supported"})
"""Texts that these tools write where they have no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU as a vendor's tool reports it; `unread` gives what it does not report, with the reason."""

    driver: str | None = None
    vbios: str | None = None
    board: str | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)


Cards = dict[str, Card]
"""The GPUs that a tool lists, by PCI bus id as sysfs writes it."""


def run(command: Sequence[str]) -> str | None:
    """Return what a command writes; None where it is absent, fails or takes too long."""
    try:
        process = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.decode("utf-8", errors="replace") if process.returncode == 0 else None


def read_json(text: str | None) -> Any:
    """Return the JSON in a tool's output, which may have warnings before it; None where there is none."""
    lines = (text or "").splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.lstrip().startswith(("{", "["))]
    if not starts:
        return None
    try:
        return json.loads("".join(lines[starts[0] :]))
    except ValueError:
        return None


def text_of(value: Any) -> str | None:
    """Return an answer as text; None where the tool has none."""
    if isinstance(value, Mapping):  # {"value": 32, "unit": "GT/s"}
        value = value.get("value")
    if value is None:
        return None
    text = str(value).strip()
    return None if text in NOT_AVAILABLE else text


def number_of(value: Any) -> int | None:
    """Return an answer as a number; None where the tool has none."""
    text = text_of(value)
    return int(text) if text is not None and text.isdigit() else None


def rows_of(answer: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the rows of an answer, which newer versions of a tool have below a key."""
    rows = answer.get(key) if isinstance(answer, Mapping) else answer
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def part(row: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the first of these fields of a row that is a table itself; an empty table where there is none."""
    for name in names:
        table = row.get(name)
        if isinstance(table, Mapping):
            return table
    return {}


def missing(tool: str, facts: Mapping[str, object]) -> dict[str, str]:
    """Return the reason for each fact that a tool did not report, by the name of the fact; None is one not reported."""
    return {name: f"{tool} does not report it" for name, value in facts.items() if value is None}
