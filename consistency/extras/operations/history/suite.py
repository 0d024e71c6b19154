"""A suite's one entry in a history: its cases are added one after the other, and committed together."""

from __future__ import annotations

import itertools
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
        self._workers: list[WorkerRecord] = []  # workers of all cases so far
        self._first: RunRecord | None = None  # record of the first case

    def add(self, name: str, captures: Sequence[Capture], comparison: Comparison) -> Comparison:
        """Add a case; return its comparison with a finding for each device that has drifted in this case."""
        record, tables = record_of(captures, comparison)
        workers = RunWorkers.of(msgspec.structs.replace(worker, case=name) for worker in record.workers)
        record = msgspec.structs.replace(record, workers=workers)
        try:
            pinned = all_pinned(captures)
            judged, record = judge_drift(self._history, record, tables, comparison, self._baseline, pinned=pinned)
            # without an entry that names them they change nothing
            self._history.put_tables(tables)
        except CaptureError as error:
            return unjudged(comparison, self._baseline, error)
        self._workers.extend(record.workers)
        self._first = self._first or record
        return judged

    def commit(self, suite: SuiteResult, *, report: str = "") -> SuiteResult:
        """Append the entry: verdict and findings are the suite's, host and versions those of its first case.

        Return the suite, which says so where the entry cannot be written.
        """
        first = self._first or RunRecord(
            schema=SCHEMA, at=suite.created, host=platform.node(), case="", verdict="", tool=__version__
        )
        errors = [finding for finding in common_findings(suite.cases) if finding.severity == "error"]
        all_findings = itertools.chain.from_iterable(case.findings for case in suite.cases)
        entry = msgspec.structs.replace(
            first,
            case=suite.name,
            verdict=suite.verdict,
            findings=tuple(finding.message for finding in errors),
            workers=RunWorkers.of(self._workers),
            cases={case.name: case.verdict for case in suite.cases},
            report=report,
            planted=any(finding.kind == kinds.PLANTED for finding in all_findings),
        )
        try:
            self._history.append(entry, {})
        except CaptureError as error:
            return msgspec.structs.replace(suite, unwritten=(*suite.unwritten, f"history: {brief(error)}"))
        return suite
