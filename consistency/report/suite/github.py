"""The findings of a suite as annotations of a GitHub Actions run, and the suite in its summary."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.comparison.suite import SuiteResult
from consistency.report.formats import View
from consistency.report.github import annotate, not_obeyed, write_summary
from consistency.report.suite import terminal
from consistency.report.suite.findings import findings_of
from consistency.report.suite.markdown import suite_as_markdown


def render(suite: SuiteResult, view: View) -> Iterator[bytes]:
    """Yield the report for people and the annotations; append to the summary of the step."""
    yield from not_obeyed(terminal.render(suite, view))
    failed = suite.verdict if suite.exit_status else None
    yield from (f"{line}\n".encode() for line in annotate(findings_of(suite, view.folder), failed))
    write_summary(suite_as_markdown(suite, view.folder))
