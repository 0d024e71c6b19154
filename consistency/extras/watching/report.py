"""What a watch leaves: a line for each check, and the folder of a report where something was found."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from consistency.capture.records import TensorRecord
from consistency.capture.whole_file import write_fully
from consistency.capture.wording import counted
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


def say(text: str) -> None:
    """Print a line on stderr; where that is a file on a full disk, the training goes on without."""
    with suppress(OSError):
        # in one piece: another thread may be printing the traceback of an error
        sys.stderr.write(f"consistency.watch: {text}\n")
        sys.stderr.flush()


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


def as_comparison(
    discoveries: Sequence[Discovery],
    *,
    title: str,
    places: Sequence[str],
    steps: str,
    stored: Mapping[tuple[int, str, str], TensorRecord],
) -> Comparison:
    """Return what was discovered as a report has it.

    Parameters
    ----------
    title : str
        The model, in words.
    places : sequence of str
        Host and device of each rank.
    steps : str
        The steps that were watched, in words.
    stored : mapping
        The records of results that are stored beside the report, by rank, layer and tensor.
    """
    names = tuple(worker_name(rank) for rank in range(len(places)))
    findings = in_order(_finding(discovery, stored) for discovery in discoveries)
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
        tensors=tuple(_rows(discoveries, names, stored)),
        findings=findings,
    )


def _finding(discovery: Discovery, stored: Mapping[tuple[int, str, str], TensorRecord]) -> Finding:
    is_stored = any((rank, *place) in stored for rank in discovery.ranks for place in discovery.tensors)
    return Finding(
        kind=discovery.kind,
        severity=discovery.severity,
        message=discovery.message,
        workers=tuple(map(worker_name, discovery.ranks)),
        tensors=tuple(f"{WATCH}::{layer}.{tensor}" for layer, tensor in discovery.tensors),
        # the next step is then to show it again, and what it said stands before it
        detail=(*discovery.detail, *([discovery.next] if is_stored else [])),
        next=discovery.next,
        load_paths=(WATCH,),
    )


def _rows(
    discoveries: Sequence[Discovery], names: Sequence[str], stored: Mapping[tuple[int, str, str], TensorRecord]
) -> list[TensorComparison]:
    """Return a row for each tensor, outside on the ranks of its discoveries; a rank has one outcome of a tensor."""
    outcomes: dict[tuple[str, str], dict[int, Outcome]] = {}
    rules: dict[tuple[str, str], str] = {}
    records: dict[tuple[str, str], TensorRecord] = {}
    # what a rule has judged says more than that bits differ
    for discovery in sorted(discoveries, key=lambda discovery: discovery.ratio is None):
        ranks = discovery.ranks or tuple(range(len(names)))
        for place in dict.fromkeys(discovery.tensors):
            by_rank = outcomes.setdefault(place, {})
            rules.setdefault(place, "bitwise" if discovery.ratio is None else "block")
            for rank in ranks:
                record = stored.get((rank, *place))
                if record is not None:
                    records.setdefault(place, record)
                by_rank.setdefault(rank, _outcome(discovery, names[rank], record))
    rows = []
    for place, by_rank in outcomes.items():
        layer, tensor = place
        record = records.get(place)
        rows.append(
            TensorComparison(
                stage=WATCH,
                load_path=WATCH,
                layer=layer,
                tensor=tensor,
                shape=() if record is None else record.shape,
                dtype="" if record is None else record.dtype,
                rule=rules[place],
                classes=(tuple(names[rank] for rank in by_rank),),
                outcomes=tuple(by_rank.values()),
            )
        )
    return rows


def _outcome(discovery: Discovery, worker: str, record: TensorRecord | None) -> Outcome:
    """Return what a discovery says of a tensor on a rank, with the worst element where the tensor is stored."""
    ratio = None if discovery.ratio is None else Real(discovery.ratio)
    outcome = Outcome(workers=(worker,), reference=None, status="outside", reason=discovery.message, ratio=ratio)
    if record is None or record.measure is None:
        return outcome
    measured = msgspec.structs.replace(
        outcome,
        reference=record.reference,
        word=record.word,
        evidence={**record.evidence, **record.measure.evidence()},
    )
    return measured.with_measure(record.measure)


def write_report(folder: Path, comparison: Comparison, began_s: float) -> list[str]:
    """Write the files of a report, in place of those of an earlier step; return a text for each that was not."""
    folder.mkdir(parents=True, exist_ok=True)
    written = write_reports(with_provenance(comparison, time.monotonic() - began_s), folder)
    return [finding.message for finding in written.findings if finding.kind == kinds.UNWRITTEN]


def statement(comparison: Comparison) -> Statement:
    """Return what a report of a watch says first."""
    wrong = [finding for finding in comparison.findings if finding.severity == "error"]
    heading = "TRAINING GOES WRONG" if wrong else "NO FAULT SEEN"
    return Statement(heading=heading, sentence=f"{counted(len(comparison.workers), 'rank')}, {comparison.level}")
