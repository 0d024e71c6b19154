"""Judge one tensor on one worker: its record, and the reference worker's record of the tensor, make a row.

In all functions here `record` is the worker's and `expected` the reference worker's; a tensor may lack either.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping
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
"""Names of references that are no other worker: the bytes of a file, an exact result, the bytes that were sent."""

_MOST_BLOCKS = 64

NOT_FINITE = "every value is NaN or infinite in float64 too"
"""The reason of a skipped tensor without any number to compare with."""

NO_RECORD = "missing on this worker"
"""The reason of a missing tensor for which the worker recorded no reason."""


def judge(worker: ComparedWorker, reference: ComparedWorker, key: Key) -> Outcome:
    """Judge a worker's record of a tensor, or its lack of one, against the reference worker's record."""
    record, expected = worker.records.get(key), reference.records.get(key)
    # first whether there is anything to judge, then the rule: a rule reads figures that a skipped record has not
    if record is None:
        return _unseen(worker, reference, key)
    if record.status in _ABSENT:
        return _absent(worker, reference, record, expected)
    # an error in units of an unknown rounding says nothing
    if record.rule == Rule.RELATIVE and record.measure is not None and record.dtype not in UNIT_ROUNDOFF:
        return _skipped(worker, record, f"the rounding of {record.dtype or 'a dtype without a name'} is not known")
    match Rule(record.rule):
        case Rule.BITWISE if record.stage == standard.TRANSFER:
            return _sent(worker, record)
        case Rule.BITWISE:
            return _moved(worker, reference, record, expected)
        case Rule.RELATIVE:
            return _relative(worker, reference, record, expected)
        case Rule.BLOCK:
            return _block(worker, reference, record, expected)
        case Rule.BOUND | Rule.USER:
            if record.measure is not None and _is_unknown(record.measure):
                return _skipped(worker, record, NOT_FINITE)
            return _measured(worker, record, record.measure, status=_status(record), reference=FLOAT64)
        case Rule.PEER:
            return _peer(worker, reference, record, expected)
        case Rule.LIMIT:
            return _as_recorded(worker, record)


def _unseen(worker: ComparedWorker, reference: ComparedWorker, key: Key) -> Outcome:
    """Judge a tensor without a record: the worker was lost, the stage failed, or nothing excuses it."""
    stage = key[0]
    # in this order: a lost worker explains every stage that it did not reach
    if worker.info.status != "ok":
        return _not_judged(worker, "blocked", f"the worker was lost before it: {worker.info.reason}")
    # the stage ended before this tensor, or could not begin: its failure is a finding of its own
    failure = worker.failures.get(stage)
    if failure is not None:
        return _not_judged(worker, "blocked", failure)
    no_group = worker.apart.get(stage)
    if no_group is not None:
        return _not_judged(worker, "skipped", no_group)
    return Outcome(
        workers=(worker.label,),
        reference=reference.label,
        status="missing",
        word=words.MISSING,
        reason=_why_not_run(worker, key) or NO_RECORD,
    )


def _not_judged(worker: ComparedWorker, status: Status, reason: str) -> Outcome:
    """Return the row of a tensor that was compared with nothing, without any field of a record."""
    return Outcome(workers=(worker.label,), reference=None, status=status, reason=reason)


def _why_not_run(worker: ComparedWorker, key: Key) -> str | None:
    """Return why a stage did not run as a whole on a worker, or the mode of the stage that a tensor's name begins with.

    `adapter_on.input.hidden_states` is of the mode `adapter_on`, which has a row of its own where it is skipped.
    """
    stage, _, tensor = key
    parts = tensor.split(".")
    modes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    names = dict.fromkeys((*modes, SPECS[Stage(stage)].whole))
    records = (worker.records.get((stage, WHOLE_MODEL, name)) for name in names)
    return next((record.reason for record in records if record is not None and record.status == "skipped"), None)


def _absent(
    worker: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord | None
) -> Outcome:
    """Judge a tensor that a worker could not make or check.

    No reason excuses it where the reference worker could, except that there is no such kernel here. Facts concern one
    worker alone; that the adapter can be loaded is expected of all.
    """
    reference_has_it = expected is not None and expected.status not in _ABSENT
    concerns_all = record.rule != Rule.LIMIT or record.layer == SETTINGS_LAYER
    is_excused = not reference_has_it or not concerns_all or record.unsupported
    if record.status != "skipped" or is_excused:
        return _as_recorded(worker, record)
    return _row(
        worker,
        record,
        reference=reference.label,
        status="missing",
        word=words.MISSING,
        reason=f"the reference worker has it, this worker could not make it: {record.reason}",
    )


def _as_recorded(worker: ComparedWorker, record: TensorRecord) -> Outcome:
    """Return a worker's own judgement, such as of a fact that has a limit: nobody else can check it."""
    is_beyond_limit = record.limit_ratio is not None and not passes(float(record.limit_ratio))
    status: Status = "outside" if is_beyond_limit else _status(record)
    return _row(
        worker,
        record,
        reference=record.reference,
        status=status,
        ratio=record.limit_ratio,
        word=record.word,
        reason=record.reason,
    )


def _moved(
    worker: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord | None
) -> Outcome:
    """Judge bytes that were only moved: the file of the reference worker's capture defines them."""
    right_digest = record.reference_digest
    # where a load path casts, each worker is compared with its own cast; `find_casts` compares the casts
    is_cast = record.cast or (expected is not None and expected.cast)
    if expected is not None and expected.reference_digest is not None and not is_cast:
        right_digest = expected.reference_digest
    has_right_bytes = record.digest == right_digest
    differs_from_own_file = record.status == "outside" and record.reference_digest not in (None, right_digest)
    if has_right_bytes and differs_from_own_file:
        # its bytes differ from its own file and equal another capture's file: bytes of an earlier run
        return _measured(
            worker,
            record,
            record.measure,
            status="outside",
            reference=FILE,
            word=words.STALE,
            evidence={"holds": f"the bytes of {reference.label}'s file, not those of its own"},
        )
    if has_right_bytes and right_digest is not None:  # a capture made elsewhere may lack both: no agreement
        return _equal(worker, record, reference=FILE)
    if record.reference_digest == right_digest:
        return _measured(worker, record, record.measure, status="outside", reference=FILE)
    assert expected is not None  # the two captures were made from files that differ
    return _moved_from_other_file(worker, reference, record, expected)


def _moved_from_other_file(
    worker: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord
) -> Outcome:
    """Judge bytes that differ from the reference worker's file, where the worker's own file differs from that, too."""
    difference = _difference(worker, record, reference, expected, expected.reference_blob)
    has_own_file = record.digest == record.reference_digest
    # each worker computed the weight from its file by its own kernels, which may round otherwise
    if has_own_file and "converted" in record.evidence:
        return _measured(
            worker,
            record,
            difference.measure,
            status="outside",
            reference=reference.label,
            word=words.RECOMPUTED,
            evidence=difference.evidence,
        )
    about_own_file = "matches its own file" if has_own_file else "does not match its own file either"
    evidence = {**difference.evidence, "own_file": about_own_file}
    # neither tensor was stored: the digests of their blocks still tell where they differ
    if difference.measure is None and difference.word is None:
        evidence["blocks"] = _differing_blocks(record.blocks, expected.blocks)
    row = _measured(
        worker,
        record,
        difference.measure,
        status="outside",
        reference=reference.label,
        word=difference.word or words.DIFFERS,
        evidence=evidence,
    )
    return msgspec.structs.replace(row, own_file=has_own_file, unread=difference.unread)


def _sent(worker: ComparedWorker, record: TensorRecord) -> Outcome:
    """Judge copies between devices: the worker made the payload itself, so no other worker is involved."""
    if record.status == "equal" and is_as_sent(record):
        return _equal(worker, record, reference=PAYLOAD)
    return _measured(worker, record, record.measure, status="outside", reference=PAYLOAD)


def is_as_sent(record: TensorRecord) -> bool:
    """Return whether copies delivered the bytes that were sent; their amount differs from level to level."""
    return record.digest is not None and record.digest == record.reference_digest


def _relative(
    worker: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord | None
) -> Outcome:
    """Judge an error against float64 by the error that rounding makes in the same tensor and dtype.

    A table of the base that is within tolerance and bitwise equal to the reference worker's is `equal`. Where the
    tolerance is as large as the values of the tensor, passing means nothing: `skipped`.
    """
    measure = record.measure
    if measure is None:
        return _equal(worker, record, reference=FLOAT64)
    rounding = _rounding_for(worker, reference, record, expected)
    if rounding is None:
        unknown = "the rounding error in this dtype is unknown without the CPU: add cpu to --devices"
        return _not_judged(worker, "skipped", record.reason or unknown)
    # of the tested dtypes float16 alone has a range that values of a model exceed
    if record.dtype == "float16" and not math.isfinite(rounding.largest):
        overflow = (
            "the CPU's own values overflow float16 (largest value 65504): there is no rounding error to compare with"
        )
        return _not_judged(worker, "skipped", overflow)
    if _is_unknown(measure):
        return _skipped(worker, record, NOT_FINITE)
    error_ratio, allowed, status = judge_relative(measure, record.dtype, rounding)
    has_reference_bits = expected is not None and record.digest == expected.digest
    if record.stage == "base" and status == "within" and has_reference_bits:
        row = _measured(worker, record, measure, status="equal", reference=reference.label)
    # zeros in place of the values would pass, unless the values are zeros
    elif status == "within" and 0 < float(measure.magnitude) <= allowed:
        row = _measured(worker, record, measure, status="skipped", reference=FLOAT64)
        reason = _why_too_wide(record.dtype, rounding, float(measure.magnitude))
        return msgspec.structs.replace(row, word=None, reason=reason)
    else:
        word = _word_of_rounding(record, measure, status)
        row = _measured(worker, record, measure, status=status, reference=FLOAT64, word=word)
    return msgspec.structs.replace(row, ratio=Real(error_ratio), allowed=Real(allowed))


def _rounding_for(
    worker: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord | None
) -> RoundingError | None:
    """Return the rounding error to judge a tensor by; None where it is not known.

    The error that a CPU measured is replaced by the reference worker's: a fault of its own must not excuse it.
    """
    # where workers multiply in several precisions, the record has the rounding error of this worker's products
    has_own_products = record.stage != standard.BASE and (worker.products or reference.products)
    # the noisy passes of a step of a training start from this worker's own parameters, which no other worker has
    has_own_noise = SPECS[Stage(record.stage)].own_noise
    if has_own_products or has_own_noise:
        return record.rounding
    needs_reference = record.rounding is None or worker.is_cpu
    if not needs_reference or not reference.is_cpu or expected is None:
        return record.rounding
    return expected.rounding if expected.dtype == record.dtype else None


def _word_of_rounding(record: TensorRecord, measure: Measure, status: Status) -> Word | None:
    """Return the kind of difference of a tensor that was judged by the error that rounding makes."""
    if status == "within":
        return record.word or words.ACCUMULATION_ORDER
    is_unnamed = record.word in (None, words.ACCUMULATION_ORDER)
    if status == "outside" and is_unnamed:
        return words.DIFFERS if math.isfinite(float(measure.max_abs)) else words.NON_FINITE
    return record.word


def _is_unknown(measure: Measure) -> bool:
    """Return whether a tensor has no exact value that is a number, and its own are the same NaN and infinities."""
    return measure.elements == measure.not_finite > 0 and float(measure.max_abs) == 0


def _block(
    worker: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord | None
) -> Outcome:
    """Judge a result by the rounding errors that the worker, or another worker of its capture, measured.

    Rounding errors that are more than twice the reference worker's are no yardstick: noisy passes on a CPU whose
    kernels are wrong would excuse these kernels. The ratio is multiplied by the excess then.
    """
    measure = record.measure
    if measure is not None and _is_unknown(measure):
        return _skipped(worker, record, NOT_FINITE)
    excess = _excess(record.rounding, _rounding_on_reference(worker, reference, record, expected))
    status, word = _status(record), None
    # a tensor that fails by its own yardstick fails anyway
    if excess > 1 and measure is not None and measure.ratio is not None and passes(float(measure.ratio)):
        error_ratio = float(measure.ratio) * excess
        allowed = None if measure.allowed is None else Real(measure.allowed / excess)
        measure = msgspec.structs.replace(measure, ratio=Real(error_ratio), allowed=allowed)
        if not passes(error_ratio):
            status, word = "outside", words.DIFFERS
    row = _measured(worker, record, measure, status=status, reference=FLOAT64, word=word)
    return row if record.reason is None else msgspec.structs.replace(row, reason=record.reason)


def _excess(rounding: RoundingError | None, reference_rounding: RoundingError | None) -> float:
    """Return a rounding error over twice the reference worker's; 0 where either is not known."""
    if rounding is None or reference_rounding is None:
        return 0.0
    return ratio(float(rounding.largest), LEAST_FACTOR * float(reference_rounding.largest))


def _rounding_on_reference(
    worker: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord | None
) -> RoundingError | None:
    """Return the rounding error that a reference CPU measured; None where another CPU's cannot be compared with it."""
    if expected is None or expected.dtype != record.dtype:
        return None
    if not (worker.is_cpu and reference.is_cpu) or worker.products or reference.products:
        return None
    # bases in two dtypes, whose rounding reaches the adapter's gradients in a third
    if worker.info.environment.get("dtype") != reference.info.environment.get("dtype"):
        return None
    return expected.rounding


def _why_too_wide(dtype: str, rounding: RoundingError, magnitude: float) -> str:
    """Return why a tolerance would let a tensor of zeros pass, without figures of one tensor: equal reasons group."""
    if LEAST_FACTOR * rounding.largest + UNIT_ROUNDOFF[dtype] * magnitude < magnitude:  # the factor makes it so wide
        return "too few values to tell rounding from a wrong result: a tolerance that wide would let zeros pass"
    return f"rounding in {dtype} makes such large errors that a tolerance of twice those would let zeros pass"


def _peer(
    worker: ComparedWorker, reference: ComparedWorker, record: TensorRecord, expected: TensorRecord | None
) -> Outcome:
    """Judge by the reference worker alone: no exact value is known."""
    # a worker may know by itself that a result is wrong, whatever the reference worker has
    if record.status == "outside":
        return _measured(worker, record, record.measure, status="outside", reference=None)
    if expected is None or expected.digest is None:
        return _measured(
            worker,
            record,
            None,
            status="outside",
            reference=reference.label,
            word=record.word or words.UNEXPECTED,
            evidence={"reference": "has no such tensor"},
        )
    if record.digest == expected.digest:
        return _equal(worker, record, reference=reference.label)
    # a tensor that is made once when weights are loaded, and no matter of rounding: both devices read the same file
    is_made_while_loading = record.stage in MOVES_WEIGHTS and not record.buffer
    is_exact = record.dtype.startswith(("uint", "int", "bool")) or is_made_while_loading
    if not is_exact:
        return _skipped(worker, record, _why_not_compared(record))
    # settings are no tensor: both are shown in words
    if record.layer == SETTINGS_LAYER:
        return _measured(
            worker,
            record,
            None,
            status="outside",
            reference=reference.label,
            word=words.SETTINGS,
            evidence={"got": record.evidence.get("values"), "wanted": expected.evidence.get("values")},
        )
    difference = _difference(worker, record, reference, expected, expected.blob)
    row = _measured(
        worker,
        record,
        difference.measure,
        status="outside",
        reference=reference.label,
        word=record.word or difference.word or words.DIFFERS,
        evidence=difference.evidence,
    )
    return msgspec.structs.replace(row, unread=difference.unread)


def _why_not_compared(record: TensorRecord) -> str:
    """Return why bits that differ from the reference worker's show nothing."""
    different = "bitwise different from the reference worker"
    if record.reason:
        return f"{different}, and not compared with float64: {record.reason}"
    return f"computed on the device and {different}, with no float64 value to compare with"


def _difference(
    worker: ComparedWorker, record: TensorRecord, reference: ComparedWorker, expected: TensorRecord, blob: str | None
) -> StoredDifference:
    """Compare a tensor with one of the reference worker's capture; where either was not stored, their structure.

    Parameters
    ----------
    blob : str or None
        Name of the stored tensor in the reference worker's capture: that of its file, or of the worker's own result.
    """
    difference = compare_stored((worker.capture, record.blob), (reference.capture, blob))
    if difference.word is not None:
        return difference
    if record.shape != expected.shape:
        word = words.SHAPE
        structure: dict[str, Any] = {"got": list(record.shape), "wanted": list(expected.shape)}
    elif record.dtype != expected.dtype:
        word, structure = words.DTYPE, {"got": record.dtype, "wanted": expected.dtype}
    else:
        return difference
    return StoredDifference(word=word, evidence={**difference.evidence, **structure}, unread=difference.unread)


def _differing_blocks(actual: str, expected: str) -> list[int]:
    """Return the numbers of the first blocks whose digests differ, or that only one of two tensors has."""
    pairs = itertools.zip_longest(unpack_blocks(actual), unpack_blocks(expected))
    differing = (number for number, (digest, expected_digest) in enumerate(pairs) if digest != expected_digest)
    return list(itertools.islice(differing, _MOST_BLOCKS))


def _row(
    worker: ComparedWorker, record: TensorRecord, *, reference: str | None, status: Status, **fields: Any
) -> Outcome:
    """Return a row with the fields of a record that every row has; `fields` may replace its evidence."""
    return Outcome(
        workers=(worker.label,),
        reference=reference,
        status=status,
        cast=record.cast,
        name_in_file=record.name_in_file,
        **{"evidence": record.evidence, **fields},
    )


def _skipped(worker: ComparedWorker, record: TensorRecord, reason: str) -> Outcome:
    return _row(worker, record, reference=None, status="skipped", reason=reason)


def _equal(worker: ComparedWorker, record: TensorRecord, *, reference: str) -> Outcome:
    return _row(
        worker,
        record,
        reference=reference,
        status="equal",
        elements=math.prod(record.shape),
        **NO_DIFFERENCE,
        repeated=_repeated(worker, record),
    )


def _measured(
    worker: ComparedWorker,
    record: TensorRecord,
    measure: Measure | None,
    *,
    status: Status,
    reference: str | None,
    word: Word | None = None,
    evidence: Mapping[str, Any] | None = None,
) -> Outcome:
    """Return a row with its measure, where there is one.

    Parameters
    ----------
    word : Word or None
        The kind of difference; None for the one that the record has.
    evidence : mapping or None
        Evidence besides that of the record. The worst element of a row that is `outside` is added.
    """
    worst_element = measure.evidence() if measure is not None and status == "outside" else {}
    row = _row(
        worker,
        record,
        reference=reference,
        status=status,
        elements=math.prod(record.shape),
        word=word or record.word,
        evidence={**record.evidence, **(evidence or {}), **worst_element},
        repeated=_repeated(worker, record),
    )
    return row if measure is None else row.with_measure(measure)


def _repeated(worker: ComparedWorker, record: TensorRecord) -> bool | None:
    """Return whether all repeats gave the same bits; None where there was no repeat."""
    # it changed in the soak, whatever the repeats of the run gave
    if record.key in worker.changes:
        return False
    return all(digest == record.digest for digest in record.repeats) if record.repeats else None


def _status(record: TensorRecord) -> Status:
    """Return the status that a worker recorded, unless its own figures contradict it."""
    # `measured`: only a comparison with other workers could decide, and no rule above made one
    if record.status == "measured":
        return "skipped"
    measure = record.measure
    if measure is not None and measure.ratio is not None and not passes(float(measure.ratio)):
        return "outside"  # even where the record of a stranger states otherwise
    return record.status


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDifference:
    """The difference of two stored tensors."""

    # None where either was not stored or could not be read, or where their structure differs
    measure: Measure | None = None
    word: Word | None = None  # None where nothing was compared
    evidence: dict[str, Any] = field(default_factory=dict)
    unread: bool = False  # one of them was stored and cannot be read


def compare_stored(actual: tuple[Capture, str | None], expected: tuple[Capture, str | None]) -> StoredDifference:
    """Measure and name the difference of two stored tensors, each given by its capture and its name there."""
    (actual_capture, actual_name), (expected_capture, expected_name) = actual, expected
    if actual_name is None or expected_name is None:
        return StoredDifference()
    from consistency.numerics.diagnosis_moved import diagnose_moved, diagnose_structure
    from consistency.numerics.distance import measure

    try:
        actual_tensor = read_stored(actual_capture, actual_name)
        expected_tensor = read_stored(expected_capture, expected_name)
    except CaptureError as error:
        return StoredDifference(evidence={"kept": error.what}, unread=True)
    structure = diagnose_structure(actual_tensor, expected_tensor)
    if structure is not None:
        return StoredDifference(word=structure.word, evidence=structure.evidence)
    difference = measure(actual_tensor, expected_tensor)
    diagnosis = diagnose_moved(actual_tensor, expected_tensor, difference)
    return StoredDifference(measure=difference, word=diagnosis.word, evidence=diagnosis.evidence)


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
    # a stored tensor is named after its bytes
    if blob_key(name_of(tensor.dtype), tensor.shape, as_bytes(tensor).numpy().data) != name:
        raise CaptureError(
            "a stored tensor was changed: its bytes do not match its name",
            where=path,
            got=hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        )
    return tensor  # type: ignore[no-any-return]  # safetensors has no types here
