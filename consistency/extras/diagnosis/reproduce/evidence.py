"""Find the evidence of a finding: the worker, its record, and the stored tensors of its capture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from consistency.capture.archives import read_sent
from consistency.capture.folder import MANIFEST, Capture
from consistency.capture.names import CALLS, NOT_RECOMPUTED
from consistency.capture.reader import RecordPool, read_capture
from consistency.capture.records import TensorRecord
from consistency.capture.soak import ChangedTensor
from consistency.capture.transport import is_remote
from consistency.capture.wording import counted
from consistency.case import standard
from consistency.case.stages import MOVES_WEIGHTS
from consistency.comparison import kinds
from consistency.comparison.judge import judge, read_stored
from consistency.comparison.records import Key
from consistency.comparison.result import BAD, Comparison, Finding, tensor_name
from consistency.comparison.workers import ComparedWorker, choose_reference, gather
from consistency.errors import CaptureError, UsageError
from consistency.numerics.rules import Rule
from consistency.workflows.report_folder import read_comparison

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One tensor that shows a finding."""

    finding: Finding
    number: int  # of the finding in the report, from 1
    worker: ComparedWorker
    record: TensorRecord
    others: tuple[str, ...]  # names of the other tensors of the finding
    reference: ComparedWorker
    is_bad: bool  # whether it violates its rule; otherwise the finding is about its bits
    # created, host, command: of the report, as in `Comparison`
    created: str | None = None
    host: str = ""
    command: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return tensor_name(*self.record.key)

    def stored(self, name: str | None) -> torch.Tensor | None:
        """Return a stored tensor of the capture, if it exists."""
        capture = self.worker.capture
        return None if name is None or not capture.blob_path(name).exists() else read_stored(capture, name)


def find_evidence(path: Path, number: int | None, scratch: Path) -> Evidence:
    """Return the tensor that best shows a finding.

    Parameters
    ----------
    path : Path
        `report.json`, or its folder, with the captures next to it.
    number : int or None
        Number of the finding, from 1; None is the only one.
    scratch : Path
        Folder to unpack captures into; it must exist as long as the evidence is used.

    Raises
    ------
    UsageError
        The report has no such finding, or it concerns no tensor.
    CaptureError
        The captures are missing, or belong to another run.
    """
    report, folder = read_comparison(path)
    number = _finding_number(report, number, folder)
    finding = report.findings[number - 1]
    if not finding.tensors:
        raise UsageError(
            f"finding {number} concerns no tensor",
            got=f"{finding.kind}: {finding.message}",
            hint=finding.next or "run the case again with the command in the report",
        )
    workers = gather(_captures(report, path, folder, scratch))
    reference = choose_reference(workers)
    records = _records_of(finding, workers)
    if not records or reference is None:
        raise CaptureError("the captures do not contain the tensors of the finding", where=folder, got=finding.message)
    first_stage = finding.tensors[0].partition("::")[0]  # the others are of what it leads to
    worker, record = min(records, key=lambda pair: (pair[1].stage != first_stage, *_rank(pair[1])))
    name = tensor_name(*record.key)
    has_changed = _changed(finding, worker, record) is not None
    return Evidence(
        finding=finding,
        number=number,
        worker=worker,
        record=record,
        others=tuple(tensor for tensor in finding.tensors if tensor != name),
        reference=reference,
        is_bad=has_changed or judge(worker, reference, record.key).status in BAD,
        created=report.created,
        host=report.host,
        command=report.command,
    )


def _finding_number(report: Comparison, number: int | None, folder: Path) -> int:
    """Return the number of a finding, where None is the only one; raise UsageError where there is no such finding."""
    count = sum(finding.severity != "note" for finding in report.findings)  # notes come last, and have no number
    counted_findings = counted(count, "finding")
    if number is None and count == 0:
        raise UsageError("the report has no finding", where=folder, got=counted_findings)
    if number is None and count > 1:
        raise UsageError("which finding?", where=folder, got=counted_findings, wanted="--finding N")
    number = 1 if number is None else number
    if not 1 <= number <= count:
        raise UsageError(f"the report has no finding {number}", where=folder, got=counted_findings)
    return number


def find_tensor(path: Path, name: str, label: str, scratch: Path) -> tuple[ComparedWorker, ComparedWorker, Key]:
    """Return the worker of this label, the reference worker, and the key of the tensor of this name.

    Raises
    ------
    UsageError
        The report has no such worker, or the worker no such tensor.
    """
    report, folder = read_comparison(path)
    workers = gather(_captures(report, path, folder, scratch))
    reference = choose_reference(workers)
    for worker in workers:
        if worker.label != label:
            continue
        for key in worker.records:
            if tensor_name(*key) == name and reference is not None:
                return worker, reference, key
        raise UsageError("the worker has no such tensor", where="--tensor", got=name, wanted="stage::layer.tensor")
    labels = ", ".join(worker.label for worker in workers)
    raise UsageError("the report has no such worker", where="--worker", got=label, wanted=labels)


def _captures(report: Comparison, path: Path, folder: Path, scratch: Path) -> list[Capture]:
    """Return the captures of a report: the one beside it, or else those that it names, if they are on this host."""
    pool = RecordPool()
    beside = folder / "captures"
    if (beside / MANIFEST).exists():
        return [read_capture(beside, pool)]
    if not report.captures:
        raise CaptureError(
            "no capture next to the report",
            where=path,
            wanted=f"captures/{MANIFEST}",
            hint="a redacted report leaves the captures out: whoever made it has `consistency reproduce --redact`",
        )
    for place in report.captures:
        if is_remote(place):  # the report may be untrusted: it must not open a connection
            raise CaptureError(
                "a capture of this report is not on this machine", where=place, hint="copy it here and compare again"
            )
    return [read_sent(place, scratch, pool) for place in report.captures]


def _records_of(finding: Finding, workers: tuple[ComparedWorker, ...]) -> list[tuple[ComparedWorker, TensorRecord]]:
    """Return each record of the finding's tensors with its worker on the load path of the record."""
    tensors, labels = set(finding.tensors), set(finding.workers)
    records = []
    for worker in workers:
        if worker.label not in labels:
            continue
        # its default load path if the finding names none
        for load_path in finding.load_paths or (worker.load_path,):
            view = worker.on(load_path)
            if view is None:
                continue
            for key, record in view.records.items():
                if tensor_name(*key) in tensors:
                    records.append((view, _of_soak(finding, view, record)))
    return records


def _of_soak(finding: Finding, worker: ComparedWorker, record: TensorRecord) -> TensorRecord:
    """Return the record of the repeat in which a tensor changed, where the finding is about that."""
    change = _changed(finding, worker, record)
    if change is None:
        return record
    return msgspec.structs.replace(
        record,
        rule=Rule.BITWISE if record.stage in (*MOVES_WEIGHTS, standard.TRANSFER) else record.rule,
        status="outside",
        blob=change.blob,
        reference_blob=change.reference_blob,
        measure=change.measure,
        word=change.word,
        evidence={**change.evidence, "allowed": 0.0},  # the same bits are promised
        ingredients={},
        shape=change.shape,
    )


def _changed(finding: Finding, worker: ComparedWorker, record: TensorRecord) -> ChangedTensor | None:
    """Return the measured change of a tensor in a soak, where the finding is about that; None otherwise."""
    if finding.kind != kinds.NOT_REPEATABLE:
        return None
    change = worker.changes.get(record.key)
    return change if change is not None and change.measure is not None else None


def _rank(record: TensorRecord) -> tuple[bool, bool, bool, int, int]:
    """Return the order of records as evidence, the best first.

    Tensors that the worker itself found wrong come first, then those that can be computed again, stored ones, and small
    ones.
    """
    is_stored = record.blob is not None and (record.reference_blob is not None or bool(record.ingredients))
    can_be_computed = CALLS in record.ingredients or NOT_RECOMPUTED in record.evidence
    return (
        record.status != "outside",
        not can_be_computed,
        not is_stored,
        math.prod(record.shape),
        record.order,
    )
