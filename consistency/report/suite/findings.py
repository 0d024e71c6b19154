"""The findings of a suite as every format shows them: one for each cause, its cases, and what to type next."""

from __future__ import annotations

import shlex
from pathlib import PurePath

from consistency.capture.wording import some
from consistency.comparison.findings.causes import NO_COUNTERPART
from consistency.comparison.history.drift import DRIFT
from consistency.comparison.result import Finding
from consistency.comparison.suite import SuiteFinding, SuiteResult, common_findings


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
    """Return the command that shows the finding in its first case, or else what the finding says itself.

    Without tensors there is nothing to reproduce, nor of tensors that are missing; the bits of an earlier run, from
    which a device drifted, are kept nowhere.
    """
    has_evidence = found.tensors and found.numbers[0] and found.kind not in (DRIFT, *NO_COUNTERPART)
    if folder is None or not has_evidence or found.severity == "note":
        return found.next
    home = next(case.folder for case in suite.cases if case.name == found.cases[0])
    return f"consistency reproduce {shlex.quote(str(PurePath(folder, home)))} --finding {found.numbers[0]} --out repro"
