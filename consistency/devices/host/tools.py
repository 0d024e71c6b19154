"""Ask the command-line tools of AMD and Intel, which need no package of Python, what they report of a host's GPUs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Run = Callable[[Sequence[str]], str | None]

TIMEOUT_S = 10.0
"""Of one command: `amd-smi` is a Python program that asks every GPU for everything."""

NOT_AVAILABLE = frozenset({"", "N/A", "unknown", "Unknown", "not supported"})
"""What these tools write in the place of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU as a vendor's tool reports it; `unread` gives what it does not report, with the reason."""

    driver: str | None = None
    vbios: str | None = None
    board: str | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)


Cards = dict[str, Card]
"""By PCI bus id as sysfs writes it."""


def run(command: Sequence[str]) -> str | None:
    """Return what a command writes; None where it is absent, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace") if done.returncode == 0 else None


def read_json(text: str | None) -> Any:
    """Return the JSON in a tool's output, which may have warnings before it; None where there is none."""
    lines = (text or "").splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("{", "["))), None)
    if first is None:
        return None
    try:
        return json.loads("".join(lines[first:]))
    except ValueError:
        return None


def text_of(value: Any) -> str | None:
    """Return an answer as text; None where the tool has none."""
    if isinstance(value, Mapping):  # {"value": 32, "unit": "GT/s"}
        value = value.get("value")
    text = "" if value is None else str(value).strip()
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
    """Return the first of these parts that a row has, else an empty one."""
    return next((found for name in names if isinstance(found := row.get(name), Mapping)), {})


def missing(tool: str, facts: Mapping[str, object]) -> dict[str, str]:
    """Return which facts a tool did not report, with the reason."""
    return {name: f"{tool} does not report it" for name, value in facts.items() if value is None}
