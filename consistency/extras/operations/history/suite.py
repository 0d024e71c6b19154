"""A suite's one entry in a history: its cases are added one after the other, and committed together."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import msgspec

from consistency.capture.folder import Capture
from consistency.capture.reader import brief
from consistency.capture.version import __version__
from consistency.comparison import kinds
from consistency.comparison.result import Comparison
from consistency.comparison.suite import SuiteResult, common_findings
from consistency.errors import CaptureError
from consistency.extras.operations.history.baseline import Baseline
from consistency.extras.operations.history.drift import all_pinned, judge_drift, unjudged
from consistency.extras.operations.history.recording import record_of
from consistency.extras.operations.history.records import SCHEMA, RunRecord, RunWorkers, WorkerRecord
from consistency.extras.operations.history.store import History


class SuiteEntry:
    """The entry in the making; nobody sees it before `commit`, so a suite that is stopped leaves none."""

    def __init__(self, history: History, baseline: Baseline | None = None) -> None:
        self._history = history
        self._baseline = baseline
        self._workers: list[WorkerRecord] = []
        self._first: RunRecord | None = None

    def add(self, name: str, captures: Sequence[Capture], comparison: Comparison) -> Comparison:
        """Add a case; return its comparison with a finding for each device that has drifted in this case."""
        record, tables = record_of(captures, comparison)
        workers = RunWorkers.of(msgspec.structs.replace(worker, case=name) for worker in record.workers)
        record = msgspec.structs.replace(record, workers=workers)
        try:
            pinned = all_pinned(captures)
            judged, record = judge_drift(self._history, record, tables, comparison, self._baseline, pinned=pinned)
            self._history.put_tables(tables)
        except CaptureError as error:
            return unjudged(comparison, self._baseline, error)
        comparison = judged
        self._workers.extend(record.workers)
        self._first = self._first or record
        return comparison

    def commit(self, suite: SuiteResult, *, report: str = "") -> SuiteResult:
        """Append the entry: verdict and findings are the suite's, host and versions those of its first case.

        Return the suite, which says so where the entry cannot be written.
        """
        first = self._first or RunRecord(
            schema=SCHEMA, at=suite.created, host=platform.node(), case="", verdict="", tool=__version__
        )
        findings = [f.message for f in common_findings(suite.cases) if f.severity == "error"]
        entry = msgspec.structs.replace(
            first,
            case=suite.name,
            verdict=suite.verdict,
            findings=tuple(findings),
            workers=RunWorkers.of(self._workers),
            cases={case.name: case.verdict for case in suite.cases},
            report=report,
            planted=any(finding.kind == kinds.PLANTED for case in suite.cases for finding in case.findings),
        )
        try:
            self._history.append(entry, {})
        except CaptureError as error:
            return msgspec.structs.replace(suite, unwritten=(*suite.unwritten, f"history: {brief(error)}"))
        return suite
