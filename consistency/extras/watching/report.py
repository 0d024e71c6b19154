"""What a watch leaves: a line for each check, and the folder of a report where something was found."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from consistency.capture.whole_file import write_fully
from consistency.comparison import kinds
from consistency.comparison.result import (
    ArchitectureGroup,
    Comparison,
    Finding,
    Outcome,
    TensorComparison,
    WorkerSummary,
    in_order,
    verdict_of,
    with_provenance,
)
from consistency.extras.watching.outcome import CheckOutcome, Discovery
from consistency.numerics.real import Real
from consistency.plugins import Statement
from consistency.workflows.report_folder import write_reports

WATCH = "watch"
"""Stage and load path of the rows of a report."""

LINES = "watch.jsonl"


def worker_name(rank: int) -> str:
    """Return the name of a rank in a report."""
    return f"rank {rank}"


def write_line(folder: Path, step: int, outcome: CheckOutcome, elapsed_s: float) -> None:
    """Add a line for one check."""
    line: dict[str, Any] = {
        "step": step,
        "check": outcome.check,
        "status": outcome.status,
        "seconds": round(elapsed_s, 4),
    }
    if outcome.not_checked:
        line["not checked"] = outcome.not_checked
    if outcome.discoveries:
        line["findings"] = [discovery.message for discovery in outcome.discoveries]
    line |= outcome.figures
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LINES).open("ab", buffering=0) as file:
        size = file.tell()
        try:
            write_fully(file.fileno(), f"{json.dumps(line)}\n".encode())
        except OSError:
            with suppress(OSError):
                file.truncate(size)  # half a line would spoil the next one
            raise


def as_comparison(discoveries: Sequence[Discovery], *, title: str, places: Sequence[str], steps: str) -> Comparison:
    """Return what was discovered as a report has it.

    Parameters
    ----------
    title : str
        The model, in words.
    places : sequence of str
        Host and device of each rank.
    steps : str
        The steps that were watched, in words.
    """
    names = tuple(worker_name(rank) for rank in range(len(places)))
    findings = in_order(_finding(discovery) for discovery in discoveries)
    workers = tuple(
        WorkerSummary(name=name, load_path=WATCH, architecture=place, model="", status="ok", host=place.split(",")[0])
        for name, place in zip(names, places, strict=True)
    )
    groups = tuple(
        ArchitectureGroup(name=place, workers=tuple(worker.name for worker in workers if worker.architecture == place))
        for place in dict.fromkeys(places)
    )
    return Comparison(
        case=title,
        dtype="",
        level=steps,
        load_paths=(WATCH,),
        verdict=verdict_of(findings),
        reference=None,
        workers=workers,
        architectures=groups,
        tensors=tuple(_rows(discoveries, names)),
        findings=findings,
    )


def _finding(discovery: Discovery) -> Finding:
    return Finding(
        kind=discovery.kind,
        severity=discovery.severity,
        message=discovery.message,
        workers=tuple(map(worker_name, discovery.ranks)),
        tensors=tuple(f"{WATCH}::{layer}.{tensor}" for layer, tensor in discovery.tensors),
        detail=discovery.detail,
        next=discovery.next,
        load_paths=(WATCH,),
    )


def _rows(discoveries: Sequence[Discovery], names: Sequence[str]) -> list[TensorComparison]:
    """Return a row for each tensor, outside on the ranks of its discoveries; a rank has one outcome of a tensor."""
    outcomes: dict[tuple[str, str], dict[str, Outcome]] = {}
    rules: dict[tuple[str, str], str] = {}
    # what a rule has judged says more than that bits differ
    for discovery in sorted(discoveries, key=lambda discovery: discovery.ratio is None):
        workers = tuple(names[rank] for rank in discovery.ranks) or tuple(names)
        ratio = None if discovery.ratio is None else Real(discovery.ratio)
        for place in dict.fromkeys(discovery.tensors):
            by_worker = outcomes.setdefault(place, {})
            rules.setdefault(place, "bitwise" if ratio is None else "block")
            for worker in workers:
                outcome = Outcome(
                    workers=(worker,), reference=None, status="outside", reason=discovery.message, ratio=ratio
                )
                by_worker.setdefault(worker, outcome)
    return [
        TensorComparison(
            stage=WATCH,
            load_path=WATCH,
            layer=layer,
            tensor=tensor,
            shape=(),
            dtype="",
            rule=rules[layer, tensor],
            classes=(tuple(by_worker),),
            outcomes=tuple(by_worker.values()),
        )
        for (layer, tensor), by_worker in outcomes.items()
    ]


def write_report(folder: Path, comparison: Comparison, began_s: float) -> list[str]:
    """Write the files of a report, in place of those of an earlier step; return a text for each that was not."""
    folder.mkdir(parents=True, exist_ok=True)
    written = write_reports(with_provenance(comparison, time.monotonic() - began_s), folder)
    return [finding.message for finding in written.findings if finding.kind == kinds.UNWRITTEN]


def statement(comparison: Comparison) -> Statement:
    """Return what a report of a watch says first."""
    wrong = [finding for finding in comparison.findings if finding.severity == "error"]
    heading = "TRAINING GOES WRONG" if wrong else "NO FAULT SEEN"
    return Statement(heading=heading, sentence=f"{len(comparison.workers)} ranks, {comparison.level}")
