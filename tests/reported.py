"""What a decoded `report.json` says of each worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from consistency.capture.json_codec import encode_json
from consistency.report.json import read
from consistency.report.ranges import unfolded


def outcomes(report: Mapping[str, Any], *stages: str) -> Iterator[dict[str, Any]]:
    """Yield the outcomes of stages, or of all, each with the `workers` of its cohort."""
    cohorts = {cohort["number"]: list(unfolded(cohort["workers"])) for cohort in report["cohorts"]}
    for outcome in report["outcomes"]:
        if not stages or outcome["stage"] in stages:
            yield {**outcome, "workers": cohorts[outcome["cohort"]]}


def rows(report: Mapping[str, Any], *stages: str) -> Iterator[dict[str, Any]]:
    """Yield the outcomes of stages, or of all, once for each `worker`."""
    for outcome in outcomes(report, *stages):
        yield from ({**outcome, "worker": worker} for worker in outcome["workers"])


def environments(report: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the whole environment of each worker, by name and load path."""
    return {(worker.name, worker.load_path): worker.environment for worker in read(encode_json(report)).workers}
