"""Judge one tensor on one worker: what it recorded, and what the reference worker recorded, make a row."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from consistency.capture.folder import Capture, blob_key, unpack_blocks
from consistency.capture.names import SETTINGS_LAYER, WHOLE_MODEL
from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.case.stage import Stage
from consistency.case.stages import MOVES_WEIGHTS, SPECS
from consistency.comparison.records import Key
from consistency.comparison.result import NO_DIFFERENCE, Outcome, Status
from consistency.comparison.workers import ComparedWorker
from consistency.errors import CaptureError
from consistency.numerics import words
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from consistency.numerics.rules import LEAST_FACTOR, UNIT_ROUNDOFF, RoundingError, Rule, judge_relative, passes, ratio
from consistency.numerics.words import Word

if TYPE_CHECKING:
    import torch


_ABSENT = frozenset({"missing", "unexpected", "skipped", "blocked"})
FILE, FLOAT64, PAYLOAD = "file", "float64", "payload"

NOT_FINITE = "every value is NaN or infinite in float64 too"
"""The reason to skip a tensor that has no value to compare with."""

NO_RECORD = "missing on this worker"
"""The reason of a tensor that a worker left out without one."""


def judge(subject: ComparedWorker, reference: ComparedWorker, key: Key) -> Outcome:
    """Judge what a worker recorded of a tensor, or why it recorded nothing."""
    record, expected = subject.records.get(key), reference.records.get(key)
    if record is None:
        return _unseen(subject, reference, key)
    if record.status in _ABSENT:
        return _absent(subject, reference, record, expected)
    if record.rule == Rule.RELATIVE and record.measure is not None and record.dtype not in UNIT_ROUNDOFF:
        return _skipped(subject, record, f"the rounding of {record.dtype or 'a dtype without a name'} is not known")
    match Rule(record.rule):
        case Rule.BITWISE if record.stage == standard.TRANSFER:
            return _sent(subject, record)
        case Rule.BITWISE:
            return _moved(subject, reference, record, expected)
        case Rule.RELATIVE:
            return _relative(subject, reference, record, expected)
        case Rule.BLOCK:
            return _block(subject, reference, record, expected)
        case Rule.BOUND | Rule.USER:
            if record.measure is not None and _is_unknown(record.measure):
                return _skipped(subject, record, NOT_FINITE)
            return _measured(subject, record, record.measure, status=_status(record), reference=FLOAT64)
        case Rule.PEER:
            return _peer(subject, reference, record, expected)
        case Rule.LIMIT:
            return _as_recorded(subject, record)


def _unseen(subject: ComparedWorker, reference: ComparedWorker, key: Key) -> Outcome:
    if subject.info.status != "ok":
        reason = f"the worker was lost before it: {subject.info.reason}"
        return Outcome(workers=(subject.label,), reference=None, status="blocked", reason=reason)
    failed = subject.failures.get(key[0])
    if failed is not None:
        return Outcome(workers=(subject.label,), reference=None, status="blocked", reason=failed)
    apart = subject.apart.get(key[0])
    if apart is not None:
        return Outcome(workers=(subject.label,), reference=None, status="skipped", reason=apart)
    return Outcome(
        workers=(subject.label,),
        reference=reference.label,
        status="missing",
        word=words.MISSING,
        reason=_why_not_run(subject, key) or NO_RECORD,
    )


def _why_not_run(subject: ComparedWorker, key: Key) -> str | None:
    """Return why a stage, or the mode of it that a tensor is named after, did not run as a whole on a worker."""
    stage, _, mode = key
    names = dict.fromkeys((mode, SPECS[Stage(stage)].whole))
    rows = (subject.records.get((stage, WHOLE_MODEL, name)) for name in names)
    return next((row.reason for row in rows if row is not None and row.status == "skipped"), None)


def _absent(
    subject: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord | None
) -> Outcome:
    """Judge a tensor that a worker could not make or check.

    No reason excuses it where the reference worker could, except that there is no such kernel here. Facts concern one
    worker alone; that the adapter can be loaded is expected of all.
    """
    made_there = expected is not None and expected.status not in _ABSENT
    expected_here = (record.rule != Rule.LIMIT or record.layer == SETTINGS_LAYER) and not record.unsupported
    if not (record.status == "skipped" and made_there and expected_here):
        return _as_recorded(subject, record)
    return _row(
        subject,
        record,
        reference=reference.label,
        status="missing",
        word=words.MISSING,
        reason=f"the reference worker has it, this worker could not make it: {record.reason}",
    )


def _as_recorded(subject: ComparedWorker, record: TensorRecord) -> Outcome:
    """Return a worker's own judgement, such as of a fact that has a limit: nobody else can check it."""
    beyond = record.limit_ratio is not None and not passes(float(record.limit_ratio))
    return _row(
        subject,
        record,
        reference=record.reference,
        status="outside" if beyond else _status(record),
        ratio=record.limit_ratio,
        word=record.word,
        reason=record.reason,
    )


def _moved(
    subject: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord | None
) -> Outcome:
    """Judge bytes that were only moved: the file of the reference worker's capture defines them."""
    right = record.reference_digest
    # where a load path casts, each worker is compared with its own cast; `find_casts` compares the casts
    casts = record.cast or (expected is not None and expected.cast)
    if expected is not None and expected.reference_digest is not None and not casts:
        right = expected.reference_digest
    if record.digest == right and record.status == "outside" and record.reference_digest not in (None, right):
        # its bytes differ from its own file and equal another capture's file: bytes of an earlier run
        return _measured(
            subject,
            record,
            record.measure,
            status="outside",
            reference=FILE,
            word=words.STALE,
            more={"holds": f"the bytes of {reference.label}'s file, not those of its own"},
        )
    if record.digest == right and right is not None:  # a capture made elsewhere may lack both: no agreement
        return _equal(subject, record, reference=FILE)
    if record.reference_digest == right:
        return _measured(subject, record, record.measure, status="outside", reference=FILE)
    assert expected is not None  # the two captures were made from files that differ
    found = _difference(subject, record, reference, expected, expected.reference_blob)
    own_file = record.digest == record.reference_digest
    if own_file and "converted" in record.evidence:  # each worker computed it from its file by its own kernels
        return _measured(
            subject,
            record,
            found.measure,
            status="outside",
            reference=reference.label,
            word=words.RECOMPUTED,
            more=found.evidence,
        )
    more: dict[str, Any] = {"own_file": "matches its own file" if own_file else "does not match its own file either"}
    if found.measure is None and found.word is None:
        more["blocks"] = _differing_blocks(record.blocks, expected.blocks)
    row = _measured(
        subject,
        record,
        found.measure,
        status="outside",
        reference=reference.label,
        word=found.word or words.DIFFERS,
        more={**found.evidence, **more},
    )
    return msgspec.structs.replace(row, own_file=own_file, unread=found.unread)


def _sent(subject: ComparedWorker, record: TensorRecord) -> Outcome:
    """Judge copies between devices: the worker made the payload itself, so no other worker is involved."""
    if record.status == "equal" and is_as_sent(record):
        return _equal(subject, record, reference=PAYLOAD)
    return _measured(subject, record, record.measure, status="outside", reference=PAYLOAD)


def is_as_sent(record: TensorRecord) -> bool:
    """Return whether copies delivered what was sent; the amount differs from level to level."""
    return record.digest is not None and record.digest == record.reference_digest


def _relative(
    subject: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord | None
) -> Outcome:
    """Judge an error against float64 by what rounding makes in the same tensor and dtype.

    What a CPU has measured of that is replaced by what the reference worker has: a fault of its own must not excuse it.
    A table of the base that is within tolerance and bitwise equal to the reference worker's is `equal`. Where the
    tolerance is as large as the values of the tensor, passing means nothing: `skipped`.
    """
    found = record.measure
    if found is None:
        return _equal(subject, record, reference=FLOAT64)
    rounding, reason = record.rounding, None
    own_products = record.stage != standard.BASE and (subject.products or reference.products)
    own_step = SPECS[
        Stage(record.stage)
    ].own_noise  # at a step of a training, at this worker's own parameters before it
    # where workers multiply in several precisions, the record has what rounding makes in this worker's
    if (
        not own_products
        and not own_step
        and (rounding is None or subject.is_cpu)
        and reference.is_cpu
        and expected is not None
    ):
        rounding = expected.rounding if expected.dtype == record.dtype else None
    if rounding is None:
        reason = record.reason or "the error that rounding makes in this dtype is unknown: no CPU took part"
    elif record.dtype == "float16" and not math.isfinite(rounding.largest):  # the range of the others suffices
        reason = "the CPU's own values overflow float16 (largest value 65504): there is no error to compare with"
    if rounding is None or reason is not None:
        return Outcome(workers=(subject.label,), reference=None, status="skipped", reason=reason)
    if _is_unknown(found):
        return _skipped(subject, record, NOT_FINITE)
    share, allowed, judged = judge_relative(found, record.dtype, rounding)
    status: Status = judged
    diagnosis = record.word or (words.ACCUMULATION_ORDER if status == "within" else None)
    if status == "outside" and diagnosis in (None, words.ACCUMULATION_ORDER):
        diagnosis = words.DIFFERS if math.isfinite(float(found.max_abs)) else words.NON_FINITE
    truth = FLOAT64
    if record.stage == "base" and status == "within" and expected is not None and record.digest == expected.digest:
        status, truth, diagnosis = "equal", reference.label, None
    if status == "within" and 0 < float(found.magnitude) <= allowed:  # where all is zero, zeros are right
        row = _measured(subject, record, found, status="skipped", reference=truth)
        reason = _idle(record.dtype, rounding, float(found.magnitude))
        return msgspec.structs.replace(row, word=None, reason=reason)
    row = _measured(subject, record, found, status=status, reference=truth, word=diagnosis)
    return msgspec.structs.replace(row, ratio=Real(share), allowed=Real(allowed))


def _is_unknown(found: Measure) -> bool:
    """Return whether a tensor has no exact value that is a number, and its own are the same NaN and infinities."""
    return found.elements == found.not_finite > 0 and float(found.max_abs) == 0


def _block(
    subject: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord | None
) -> Outcome:
    """Return what a worker judged by rounding errors, as it or another worker of its capture measured them.

    Where they are more than twice those that the reference worker measured, they are no yardstick: passes with noise on
    a CPU whose kernels are wrong would excuse these. The ratio is as much larger then.
    """
    found, own = record.measure, record.rounding
    if found is not None and _is_unknown(found):
        return _skipped(subject, record, NOT_FINITE)
    known = None if expected is None or expected.dtype != record.dtype else expected.rounding
    if not (subject.is_cpu and reference.is_cpu) or subject.products or reference.products:
        known = None
    if subject.info.environment.get("dtype") != reference.info.environment.get("dtype"):
        known = None  # bases in two dtypes, whose rounding reaches the adapter's gradients in a third
    status, word = _status(record), None
    if found is not None and found.ratio is not None and own is not None and known is not None:
        excess = ratio(float(own.largest), LEAST_FACTOR * float(known.largest))
        if excess > 1 and passes(float(found.ratio)):
            share = float(found.ratio) * excess
            allowed = None if found.allowed is None else Real(found.allowed / excess)
            found = msgspec.structs.replace(found, ratio=Real(share), allowed=allowed)
            if not passes(share):
                status, word = "outside", words.DIFFERS
    row = _measured(subject, record, found, status=status, reference=FLOAT64, word=word)
    return row if record.reason is None else msgspec.structs.replace(row, reason=record.reason)


def _idle(dtype: str, rounding: RoundingError, magnitude: float) -> str:
    """Return why a tolerance would let a tensor of zeros pass, without figures of one tensor: equal reasons group."""
    if LEAST_FACTOR * rounding.largest + UNIT_ROUNDOFF[dtype] * magnitude < magnitude:  # the factor makes it so wide
        return "too few values to measure the rounding error: so wide a tolerance would let a tensor of zeros pass"
    return f"rounding in {dtype} makes errors so large that twice those would let a tensor of zeros pass"


def _peer(
    subject: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord | None
) -> Outcome:
    """Judge by the reference worker alone: no exact value is known."""
    if record.status == "outside":  # the worker itself found it wrong
        return _measured(subject, record, record.measure, status="outside", reference=None)
    if expected is None or expected.digest is None:
        return _measured(
            subject,
            record,
            None,
            status="outside",
            reference=reference.label,
            word=record.word or words.UNEXPECTED,
            more={"reference": "has no such tensor"},
        )
    if record.digest == expected.digest:
        return _equal(subject, record, reference=reference.label)
    # what is made once when weights are loaded, and no matter of rounding: both devices read the same file
    exact = record.dtype.startswith(("uint", "int", "bool")) or (record.stage in MOVES_WEIGHTS and not record.buffer)
    if not exact:
        different = "bitwise different from the reference worker"
        return _skipped(
            subject,
            record,
            f"{different}, and not compared with float64: {record.reason}"
            if record.reason
            else f"computed on the device and {different}, with no float64 value to compare with",
        )
    if record.layer == SETTINGS_LAYER:
        settings = {"got": record.evidence.get("values"), "wanted": expected.evidence.get("values")}
        return _measured(
            subject, record, None, status="outside", reference=reference.label, word=words.SETTINGS, more=settings
        )
    found = _difference(subject, record, reference, expected, expected.blob)
    row = _measured(
        subject,
        record,
        found.measure,
        status="outside",
        reference=reference.label,
        word=record.word or found.word or words.DIFFERS,
        more=found.evidence,
    )
    return msgspec.structs.replace(row, unread=found.unread)


def _difference(
    subject: ComparedWorker, record: TensorRecord, reference: ComparedWorker, expected: TensorRecord, blob: str | None
) -> StoredDifference:
    """Compare a tensor with one of the reference worker's capture; where either was not stored, their structure."""
    found = compare_stored((subject.capture, record.blob), (reference.capture, blob))
    if found.word is not None:
        return found
    got: object = list(record.shape)
    wanted: object = list(expected.shape)
    word = words.SHAPE
    if got == wanted:
        word, got, wanted = words.DTYPE, record.dtype, expected.dtype
    if got == wanted:
        return found
    evidence = {**found.evidence, "got": got, "wanted": wanted}
    return StoredDifference(word=word, evidence=evidence, unread=found.unread)


def _differing_blocks(actual: str, expected: str) -> list[int]:
    a, e = unpack_blocks(actual), unpack_blocks(expected)
    longer = max(len(a), len(e))
    return [i for i in range(longer) if i >= len(a) or i >= len(e) or a[i] != e[i]][:64]


def _row(
    subject: ComparedWorker, record: TensorRecord, *, reference: str | None, status: Status, **fields: Any
) -> Outcome:
    return Outcome(
        workers=(subject.label,),
        reference=reference,
        status=status,
        cast=record.cast,
        name_in_file=record.name_in_file,
        **{"evidence": record.evidence, **fields},
    )


def _skipped(subject: ComparedWorker, record: TensorRecord, reason: str) -> Outcome:
    return _row(subject, record, reference=None, status="skipped", reason=reason)


def _equal(subject: ComparedWorker, record: TensorRecord, *, reference: str) -> Outcome:
    return _row(
        subject,
        record,
        reference=reference,
        status="equal",
        elements=math.prod(record.shape),
        **NO_DIFFERENCE,
        repeated=_repeated(subject, record),
    )


def _measured(
    subject: ComparedWorker,
    record: TensorRecord,
    found: Measure | None,
    *,
    status: Status,
    reference: str | None,
    word: Word | None = None,
    more: dict[str, Any] | None = None,
) -> Outcome:
    worst = found.evidence() if found is not None and status == "outside" else {}
    row = _row(
        subject,
        record,
        reference=reference,
        status=status,
        elements=math.prod(record.shape),
        word=word or record.word,
        evidence={**record.evidence, **(more or {}), **worst},
        repeated=_repeated(subject, record),
    )
    return row if found is None else row.with_measure(found)


def _repeated(subject: ComparedWorker, record: TensorRecord) -> bool | None:
    if record.key in subject.changes:
        return False
    return all(digest == record.digest for digest in record.repeats) if record.repeats else None


def _status(record: TensorRecord) -> Status:
    # `measured`: only a comparison with other workers could decide, and no rule above made one
    if record.status == "measured":
        return "skipped"
    measure = record.measure
    if measure is not None and measure.ratio is not None and not passes(float(measure.ratio)):
        return "outside"  # even where the record of a stranger states otherwise
    return record.status


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDifference:
    """How two stored tensors differ."""

    # none where either was not stored or could not be read, or where their structure differs
    measure: Measure | None = None
    word: Word | None = None  # none where nothing was compared
    evidence: dict[str, Any] = field(default_factory=dict)
    unread: bool = False  # one of them was stored and cannot be read


def compare_stored(actual: tuple[Capture, str | None], expected: tuple[Capture, str | None]) -> StoredDifference:
    """Measure and name the difference of two stored tensors, each given by its capture and its name there."""
    if actual[1] is None or expected[1] is None:
        return StoredDifference()
    from consistency.numerics.diagnosis_moved import diagnose_moved, diagnose_structure
    from consistency.numerics.distance import measure

    try:
        a, e = read_stored(actual[0], actual[1]), read_stored(expected[0], expected[1])
    except CaptureError as error:
        return StoredDifference(evidence={"kept": error.what}, unread=True)
    structure = diagnose_structure(a, e)
    if structure is not None:
        return StoredDifference(word=structure.word, evidence=structure.evidence)
    found = measure(a, e)
    diagnosis = diagnose_moved(a, e, found)
    return StoredDifference(measure=found, word=diagnosis.word, evidence=diagnosis.evidence)


def read_stored(capture: Capture, name: str) -> torch.Tensor:
    """Read a tensor that a capture stored; raise `CaptureError` if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from consistency.numerics.digest import as_bytes
    from consistency.numerics.dtype import name_of

    path = capture.blob_path(name)
    try:
        tensor = load_file(path, device="cpu")["tensor"]
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CaptureError("a stored tensor cannot be read", where=path, got=error) from None
    if blob_key(name_of(tensor.dtype), tensor.shape, as_bytes(tensor).numpy().data) != name:
        raise CaptureError(
            "a stored tensor was changed: its bytes do not match its name",
            where=path,
            got=hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        )
    return tensor  # type: ignore[no-any-return]  # safetensors has no types here
