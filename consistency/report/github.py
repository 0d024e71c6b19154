"""Findings as annotations of a GitHub Actions run, and the report in its summary.

Workflow commands: https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from consistency.comparison.result import Comparison, Finding
from consistency.comparison.suite import SuiteResult
from consistency.report import terminal
from consistency.report.documents import document_of
from consistency.report.formats import View
from consistency.report.markdown import as_markdown
from consistency.text import one_line

_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
_MOST = 10  # GitHub shows ten annotations of a level per step and silently drops the others


def render(result: Comparison | SuiteResult, view: View) -> Iterator[bytes]:
    """Yield the report for people and the annotations; append to the summary of the step."""
    yield from not_obeyed(terminal.render(result, view))
    failed = result.verdict if result.exit_status else None
    findings = (entry.finding for entry in document_of(result, view).entries)
    yield from (f"{line}\n".encode() for line in annotate(findings, failed))
    write_summary(as_markdown(result, view))


def not_obeyed(text: Iterable[bytes]) -> Iterator[bytes]:
    """Yield text in which the runner obeys no command: a stranger's name may hold one, at the start of a line."""
    token = secrets.token_hex(16)
    yield f"::stop-commands::{token}\n".encode()
    yield from text
    yield f"::{token}::\n".encode()


def annotate(findings: Iterable[Finding], failed: str | None) -> Iterator[str]:
    """Yield one line per finding; names from models and adapters can end neither the line nor the command.

    A run that `failed`, with this verdict, has an error even where no finding is one.
    """
    counts = dict.fromkeys(_LEVELS, 0)
    for finding in findings:
        counts[finding.severity] += 1
        if counts[finding.severity] > _MOST:
            continue
        texts = [finding.message, *finding.detail[:3]]
        if finding.next:
            texts.append(finding.next)
        message = "\n".join(map(one_line, texts))
        title = _property(f"consistency: {finding.kind}")
        yield f"::{_LEVELS[finding.severity]} title={title}::{_data(message)}"
    if failed is not None and not counts["error"]:
        yield f"::error title=consistency::{_data(failed)}"


def write_summary(text: str) -> None:
    """Append a report in Markdown to the summary of the step, where this runs in one."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def _data(text: str) -> str:
    """Return text as the data of a workflow command, in which a line feed would end the command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(one_line(text)).replace(":", "%3A").replace(",", "%2C")
