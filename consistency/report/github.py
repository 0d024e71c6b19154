"""Findings as annotations of a GitHub Actions run, and the report in its summary.

Workflow commands: https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from consistency.comparison.result import Comparison
from consistency.report import terminal
from consistency.report.formats import View
from consistency.report.markdown import as_markdown
from consistency.report.text import clean

_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
_MOST = 10  # GitHub shows ten annotations of a level per step and silently drops the others


def render(comparison: Comparison, view: View) -> Iterator[bytes]:
    """Yield the report for people and the annotations; append to the summary of the step."""
    yield from terminal.render(comparison, view)
    yield from (f"{line}\n".encode() for line in annotate(comparison))
    write_summary(comparison)


def annotate(comparison: Comparison) -> Iterator[str]:
    """Yield one line per finding; names from models and adapters can end neither the line nor the command."""
    shown = dict.fromkeys(_LEVELS, 0)
    for finding in comparison.findings:
        shown[finding.severity] += 1
        if shown[finding.severity] > _MOST:
            continue
        message = clean("\n".join([finding.message, *finding.detail[:3], *([finding.next] if finding.next else [])]))
        title = _property(f"consistency: {finding.kind}")
        yield f"::{_LEVELS[finding.severity]} title={title}::{_data(message)}"
    if not any(finding.severity == "error" for finding in comparison.findings) and comparison.exit_status:
        yield f"::error title=consistency::{_data(comparison.verdict)}"


def write_summary(comparison: Comparison) -> None:
    """Append the report to the summary of the step, where this runs in one."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(as_markdown(comparison) + "\n")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(clean(text)).replace(":", "%3A").replace(",", "%2C")
