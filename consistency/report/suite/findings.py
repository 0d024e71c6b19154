"""The findings of a suite as every format shows them: one for each cause, its cases, and what to type next."""

from __future__ import annotations

from pathlib import PurePath

from consistency.capture.wording import some
from consistency.comparison.result import Finding
from consistency.comparison.suite import SuiteFinding, SuiteResult, common_findings
from consistency.report.findings import reproduce_command


def findings_of(suite: SuiteResult, folder: str | None) -> list[Finding]:
    """Return the findings of all cases, the most severe first; `folder` holds the reports that commands name."""
    return [shown_finding(found, suite, folder) for found in common_findings(suite.cases)]


def shown_finding(found: SuiteFinding, suite: SuiteResult, folder: str | None) -> Finding:
    """Return a finding with its cases and the first one's evidence in its details, and the next command."""
    detail = found.detail
    if len(found.cases) > 1:
        first = [f"{found.cases[0]}: {detail[0].strip()}"] if detail else []
        detail = (f"cases: {some(found.cases)}", *first)
    return Finding(
        kind=found.kind,
        severity=found.severity,
        message=found.message,
        workers=found.workers,
        detail=detail,
        next=_next(found, suite, folder),
    )


def _next(found: SuiteFinding, suite: SuiteResult, folder: str | None) -> str | None:
    """Return the command that shows the finding in its first case, or else what the finding says itself."""
    if folder is None or not found.is_reproducible:
        return found.next
    home = next(case.folder for case in suite.cases if case.name == found.cases[0])
    return reproduce_command(str(PurePath(folder, home)), found.numbers[0])
