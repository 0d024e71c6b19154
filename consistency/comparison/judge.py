"""One tensor on one worker: from what it saw, and what the reference worker saw, to a row."""

from __future__ import annotations

import math
from typing import Any

from consistency.capture.folder import unpack_blocks
from consistency.capture.names import CAST_ON_THE_WAY, SETTINGS_LAYER, UNSUPPORTED
from consistency.capture.records import TensorMeasure, TensorRecord
from consistency.case.stages import Stage
from consistency.comparison.kept_tensors import measure_kept
from consistency.comparison.result import Row, Status
from consistency.comparison.workers import Key, Participant
from consistency.errors import CaptureError
from consistency.numerics.real import Real
from consistency.numerics.rules import UNIT_ROUNDOFF, Rule, passes, ratio, relative_allowance
from consistency.numerics.words import Word

_ABSENT = frozenset({"missing", "unexpected", "skipped", "blocked"})
FILE, FLOAT64, PAYLOAD = "file", "float64", "payload"

KEPT = "kept"
"""Evidence: why a kept tensor could not be read."""

OWN_FILE = "holds its own file's bytes"


def judge(subject: Participant, reference: Participant, key: Key) -> Row:
    """Judge what a worker saw of a tensor, or why it saw nothing."""
    record, expected = subject.records.get(key), reference.records.get(key)
    if record is None:
        return _unseen(subject, reference)
    made_there = expected is not None and expected.status not in _ABSENT
    # a fact is nobody else's to make, but that the adapter can be loaded; what has no kernel here is no failure of it
    owed = (record.rule != Rule.LIMIT or record.layer == SETTINGS_LAYER) and UNSUPPORTED not in record.evidence
    if record.status == "skipped" and made_there and owed:
        # what the reference worker could make, this device failed to make: no reason of its own excuses it
        return Row(
            worker=subject.label,
            reference=reference.label,
            status="missing",
            diagnosis=Word.MISSING,
            evidence=record.evidence,
            reason=f"the reference worker has it, this worker could not make it: {record.reason}",
        )
    if record.status in _ABSENT:
        return Row(
            worker=subject.label,
            reference=record.reference,
            status=_status(record),
            diagnosis=record.diagnosis,
            evidence=record.evidence,
            reason=record.reason,
        )
    if record.rule == Rule.RELATIVE and record.measure is not None and record.dtype not in UNIT_ROUNDOFF:
        return Row(
            worker=subject.label,
            reference=None,
            status="skipped",
            reason=f"nothing is known of how {record.dtype or 'a dtype without a name'} rounds",
        )
    match Rule(record.rule):
        case Rule.BITWISE if record.stage == Stage.TRANSFER:
            return _sent(subject, record)
        case Rule.BITWISE:
            return _moved(subject, reference, record, expected)
        case Rule.RELATIVE:
            return _relative(subject, reference, record, expected)
        case Rule.BOUND | Rule.USER:
            return _measured(subject, record, record.measure, status=_status(record), reference=FLOAT64)
        case Rule.PEER:
            return _peer(subject, reference, record, expected)
        case Rule.LIMIT:
            return _limit(subject, record)


def _unseen(subject: Participant, reference: Participant) -> Row:
    if subject.info.status != "ok":
        reason = f"the worker was lost before it: {subject.info.reason}"
        return Row(worker=subject.label, reference=None, status="blocked", reason=reason)
    return Row(
        worker=subject.label,
        reference=reference.label,
        status="missing",
        diagnosis=Word.MISSING,
        reason="other workers have this tensor, this one has not",
    )


def _moved(subject: Participant, reference: Participant, record: TensorRecord, expected: TensorRecord | None) -> Row:
    """Judge bytes that were only moved: the file of the reference worker's capture says what is right."""
    right = (
        record.reference_digest
        if expected is None or expected.reference_digest is None
        else (expected.reference_digest)
    )
    if CAST_ON_THE_WAY in {*record.evidence, *(() if expected is None else expected.evidence)}:
        # each is right or wrong about the casts of its own road; whether all make the same is the verdict over roads
        right = record.reference_digest
    if record.digest == right and record.status == "outside" and record.reference_digest not in (None, right):
        # not what its own file holds, and what another capture's file did: bytes of an earlier run
        return _measured(
            subject, record, record.measure, status="outside", reference=FILE, diagnosis=Word.STALE,
            more={"holds": f"what the file of {reference.label} holds, not what its own does"},
        )  # fmt: skip
    if record.digest == right and right is not None:  # a capture from elsewhere may lack both: that is no agreement
        return _equal(subject, record, reference=FILE)
    if record.reference_digest == right:
        return _measured(subject, record, record.measure, status="outside", reference=FILE)
    # the two captures were made from files that differ
    assert expected is not None
    found, word, evidence = _kept(subject, record.blob, reference, expected.reference_blob)
    if found is None and word is None:
        word, structure = _structure(record, expected)
        evidence.update(structure)
        evidence["blocks"] = _differing_blocks(record.blocks, expected.blocks)
    evidence["own_file"] = (
        OWN_FILE if record.digest == record.reference_digest else ("does not hold its own file's bytes either")
    )
    return _measured(
        subject, record, found, status="outside", reference=reference.label,
        diagnosis=word or Word.UNKNOWN, more=evidence,
    )  # fmt: skip


def _sent(subject: Participant, record: TensorRecord) -> Row:
    """Judge copies between devices: what they had to deliver was made by the worker, and is no other one's business."""
    if record.status == "equal" and is_as_sent(record):
        return _equal(subject, record, reference=PAYLOAD)
    return _measured(subject, record, record.measure, status="outside", reference=PAYLOAD)


def is_as_sent(record: TensorRecord) -> bool:
    """Tell whether copies delivered what was sent; how much that is differs from level to level."""
    return record.digest is not None and record.digest == record.reference_digest


def _relative(subject: Participant, reference: Participant, record: TensorRecord, expected: TensorRecord | None) -> Row:
    """Judge an error against float64 by the reference worker's own in the same tensor and dtype.

    A table of the base that has the reference worker's very bits, and is right, is `equal`. Where the allowance is as
    wide as the tensor is large, being inside it says nothing: `skipped`.
    """
    found = record.measure
    if found is None:
        return _equal(subject, record, reference=FLOAT64)
    own = record.reference_error
    if (own is None or subject.is_cpu) and reference.is_cpu and expected is not None and expected.measure is not None:
        # a CPU's own error must not be what excuses it
        own = expected.measure.max_abs if expected.dtype == record.dtype else None
    if own is None:
        return Row(
            worker=subject.label,
            reference=None,
            status="skipped",
            reason="the error of a CPU in this dtype is not known: no CPU took part",
        )
    if record.dtype == "float16" and not math.isfinite(own):  # the other dtypes hold whatever a model makes
        return Row(
            worker=subject.label,
            reference=None,
            status="skipped",
            reason="the CPU's own numbers overflow float16, which ends at 65504: there is no error to compare with",
        )
    samples = record.reference_samples or math.prod(record.shape)
    allowed = relative_allowance(float(own), float(found.magnitude), record.dtype, samples=samples)
    share = ratio(float(found.max_abs), allowed)
    status: Status = "within" if passes(share) else "outside"
    if share == 0 and found.mismatched == 0:
        status = "equal"
    diagnosis = record.diagnosis or (Word.ACCUMULATION_ORDER if status == "within" else None)
    if status == "outside" and diagnosis in (None, Word.ACCUMULATION_ORDER):
        diagnosis = Word.UNKNOWN if math.isfinite(float(found.max_abs)) else Word.NON_FINITE
    truth = FLOAT64
    if record.stage == "base" and status == "within" and expected is not None and record.digest == expected.digest:
        status, truth, diagnosis = "equal", reference.label, None
    if status == "within" and 0 < float(found.magnitude) <= allowed:  # where all is zero, zeros are right
        row = _measured(subject, record, found, status="skipped", reference=truth)
        return _replace(row, diagnosis=None, reason=_idle(record.dtype, samples, float(own), float(found.magnitude)))
    row = _measured(subject, record, found, status=status, reference=truth, diagnosis=diagnosis)
    return _replace(row, bound_ratio=Real(share))


def _idle(dtype: str, samples: int, own: float, magnitude: float) -> str:
    """Say why an allowance is so wide that a tensor of zeros would pass; no figure of one tensor, so that it groups."""
    if relative_allowance(own, magnitude, dtype) < magnitude:  # it is luck that makes it so wide
        numbers = "one independent number" if samples == 1 else "few independent numbers"
        return (
            f"the CPU's error is the largest of {numbers}: what luck allows beside it would let a tensor of zeros pass"
        )
    return f"the CPU's own error in {dtype} is so large that twice that would let a tensor of zeros pass"


def _peer(subject: Participant, reference: Participant, record: TensorRecord, expected: TensorRecord | None) -> Row:
    """Judge by the reference worker alone: there is no truth outside the devices."""
    if record.status == "outside":  # the worker itself knows better
        return _measured(subject, record, record.measure, status="outside", reference=None)
    if expected is None or expected.digest is None:
        return _measured(
            subject, record, None, status="outside", reference=reference.label,
            diagnosis=record.diagnosis or Word.UNEXPECTED, more={"reference": "has no such tensor"},
        )  # fmt: skip
    if record.digest == expected.digest:
        return _equal(subject, record, reference=reference.label)
    exact = (
        record.dtype.startswith(("uint", "int", "bool"))
        or record.diagnosis == Word.RECOMPUTED
        or (record.stage == "base" and "buffer" not in record.evidence)
    )
    if not exact:
        return Row(
            worker=subject.label,
            reference=None,
            status="skipped",
            reason=(
                "computed on the device, its bits differ from the reference worker's, and no float64 value is known"
                + (f": {record.reason}" if record.reason else "")
            ),
            evidence=record.evidence,
        )
    if record.layer == SETTINGS_LAYER:
        settings = {"got": record.evidence.get("values"), "wanted": expected.evidence.get("values")}
        return _measured(
            subject, record, None, status="outside", reference=reference.label, diagnosis=Word.SETTINGS, more=settings
        )
    found, word, evidence = _kept(subject, record.blob, reference, expected.blob)
    if found is None and word is None:
        word, structure = _structure(record, expected)
        evidence.update(structure)
    return _measured(
        subject, record, found, status="outside", reference=reference.label,
        diagnosis=record.diagnosis or word or Word.UNKNOWN, more=evidence,
    )  # fmt: skip


def _limit(subject: Participant, record: TensorRecord) -> Row:
    """Judge a fact that has a limit: the worker saw it, and nobody else can."""
    beyond = record.limit_ratio is not None and not passes(float(record.limit_ratio))
    return Row(
        worker=subject.label,
        reference=record.reference,
        status="outside" if beyond else _status(record),
        bound_ratio=record.limit_ratio,
        diagnosis=record.diagnosis,
        evidence=record.evidence,
        reason=record.reason,
    )


def _kept(
    subject: Participant, actual: str | None, reference: Participant, expected: str | None
) -> tuple[TensorMeasure | None, Word | None, dict[str, Any]]:
    try:
        return measure_kept((subject.capture, actual), (reference.capture, expected))
    except CaptureError as error:
        return None, None, {KEPT: error.what}


def _structure(record: TensorRecord, expected: TensorRecord) -> tuple[Word | None, dict[str, Any]]:
    if record.shape != expected.shape:
        return Word.SHAPE, {"got": list(record.shape), "wanted": list(expected.shape)}
    if record.dtype != expected.dtype:
        return Word.DTYPE, {"got": record.dtype, "wanted": expected.dtype}
    return None, {}


def _differing_blocks(actual: str, expected: str) -> list[int]:
    a, e = unpack_blocks(actual), unpack_blocks(expected)
    longer = max(len(a), len(e))
    return [i for i in range(longer) if i >= len(a) or i >= len(e) or a[i] != e[i]][:64]


def _equal(subject: Participant, record: TensorRecord, *, reference: str) -> Row:
    zero = Real(0.0)
    return Row(
        worker=subject.label,
        reference=reference,
        status="equal",
        elements=math.prod(record.shape),
        mismatched=0,
        max_abs=zero,
        mean_abs=zero,
        max_rel=zero,
        rms=zero,
        max_ulp=0,
        repeated=_repeated(record),
        evidence=record.evidence,
    )


def _measured(
    subject: Participant,
    record: TensorRecord,
    found: TensorMeasure | None,
    *,
    status: Status,
    reference: str | None,
    diagnosis: Word | None = None,
    more: dict[str, Any] | None = None,
) -> Row:
    row = Row(
        worker=subject.label,
        reference=reference,
        status=status,
        elements=math.prod(record.shape),
        diagnosis=diagnosis or record.diagnosis,
        evidence={**record.evidence, **(more or {})},
        repeated=_repeated(record),
    )
    if found is None:
        return row
    evidence = dict(row.evidence)
    if status == "outside":
        evidence.update(found.evidence())
    return _replace(
        row,
        elements=found.elements,
        mismatched=found.mismatched,
        max_abs=found.max_abs,
        mean_abs=found.mean_abs,
        max_rel=found.max_rel,
        rms=found.rms,
        max_ulp=found.max_ulp,
        bound_ratio=found.bound_ratio,
        worst_index=found.worst_index,
        evidence=evidence,
    )


def _repeated(record: TensorRecord) -> bool | None:
    return all(digest == record.digest for digest in record.repeats) if record.repeats else None


def _status(record: TensorRecord) -> Status:
    # a worker's own `measured` means that only others could tell, and none of the rules above found a way
    if record.status == "measured":
        return "skipped"
    measure = record.measure
    if measure is not None and measure.bound_ratio is not None and not passes(float(measure.bound_ratio)):
        return "outside"  # whatever the word beside it says
    return record.status


def _replace(row: Row, **values: Any) -> Row:
    import msgspec

    return msgspec.structs.replace(row, **values)
