"""One more run for a history: compared with the earlier ones, then added to them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from consistency.capture.folder import Capture
from consistency.comparison.history.baseline import Baseline, apply
from consistency.comparison.history.drift import find_drift
from consistency.comparison.history.store import History, record_of
from consistency.comparison.result import Comparison, Finding, with_findings


def add_run(
    history: History, captures: Sequence[Capture], comparison: Comparison, baseline: Baseline | None
) -> Comparison:
    """Add a run to a history; return its comparison with a finding for each device that has drifted.

    An accepted drift is not recorded as one: the device is compared with this run from now on.
    """
    record, tables = record_of(captures, comparison)
    drift = find_drift(history, record, tables)
    damage = [
        Finding(kind="damaged-night", severity="warning", message=f"history: {text}: left out")
        for text in history.damage
    ]
    comparison = with_findings(comparison, [*drift.findings, *comparison.findings, *damage])
    if baseline is not None:
        comparison = apply(baseline, comparison)
    errors = [f for f in comparison.findings if f.severity == "error"]
    drifted = {label for f in errors if f.kind == "drift" for label in f.workers}
    workers = tuple(
        msgspec.structs.replace(
            worker, drift=drift.stages.get((worker.device, worker.load_path), ()) if worker.name in drifted else ()
        )
        for worker in record.workers
    )
    messages = tuple(f.message for f in errors)
    history.append(
        msgspec.structs.replace(record, workers=workers, verdict=comparison.verdict, findings=messages), tables
    )
    return comparison
