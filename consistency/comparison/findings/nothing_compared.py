"""Tensors over which no agreement can be claimed: nothing compared, no numbers, skipped checks, no known cause."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from consistency.capture.names import END_TO_END, NO_OUTPUT, OVERFLOWS, WHOLE_MODEL
from consistency.capture.records import TensorRecord
from consistency.capture.wording import counted, listed, some
from consistency.case import standard
from consistency.case.load_path import is_alternative
from consistency.case.stages import SPECS
from consistency.comparison import kinds
from consistency.comparison.by_worker import coverage
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.judge import NOT_FINITE
from consistency.comparison.outcomes import Workers, group_by_key, union_of_workers
from consistency.comparison.records import Key, tables_of
from consistency.comparison.result import BAD, Finding, Severity, TensorComparison, rows_of, tensor_name
from consistency.comparison.workers import ComparedWorker, in_order_of, labels_of
from consistency.numerics.rules import Rule

_MOST_REASONS = 3
_MOST_CAPTURES = 4
_ABSENT = frozenset({"skipped", "blocked"})
_LOST = dict.fromkeys(("missing", "unexpected"), "an alternative load path has other tensors than the files")
"""Why a tensor was not compared, by status, where its row has no reason."""
_ALONE = "there is one worker, and neither a file nor an exact value to compare it with"


def find_nothing_compared(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report a comparison without a compared tensor, and captures that have none in common with any other.

    Lost workers are a finding already.
    """
    whole_workers = [worker for worker in evidence.workers if worker.info.status == "ok"]
    if evidence.workers and not whole_workers:
        return
    if evidence.tensors and not coverage(tensor for tensor in evidence.tensors if not _is_lost(tensor)):
        yield _report_no_comparison(evidence)
        return
    captures = list(group_by_key((id(worker.capture), worker) for worker in whole_workers).values())
    if len(captures) > 1:
        yield from _captures_without_common_tensors(captures)


def _report_no_comparison(evidence: ComparisonEvidence) -> Finding:
    """Report that no tensor was compared at all, with the first reasons."""
    reasons = dict.fromkeys(row.reason or _LOST.get(row.status, _ALONE) for _, row in rows_of(evidence.tensors))
    return Finding(
        kind=kinds.NOTHING_COMPARED,
        severity="error",
        message=f"nothing was compared: {'; '.join(list(reasons)[:_MOST_REASONS])}",
        workers=labels_of(evidence.workers),
        next="choose other --stages, or give another device to compare with",
    )


def _captures_without_common_tensors(captures: Sequence[Sequence[ComparedWorker]]) -> Iterator[Finding]:
    """Report captures that share no tensor with another capture.

    Parameters
    ----------
    captures : sequence of sequence of ComparedWorker
        The workers of each capture that ended well; two captures or more.
    """
    keys = _comparable_keys(captures)
    captures_per_key: Counter[Key] = Counter()
    for capture_keys, captures_with_these in Counter(keys).items():  # most captures of a fleet have the same keys
        for key in capture_keys:
            captures_per_key[key] += captures_with_these
    apart = [
        (workers, capture_keys)
        for workers, capture_keys in zip(captures, keys, strict=True)
        if all(captures_per_key[key] == 1 for key in capture_keys)
    ]
    if len(apart) == len(captures):
        descriptions = [f"{_names(workers)} {_stages(capture_keys)}" for workers, capture_keys in apart]
        yield _report_apart(
            f"the {len(captures)} captures have no tensor in common: {some(descriptions, _MOST_CAPTURES)}",
            itertools.chain.from_iterable(captures),
        )
        return
    for workers, capture_keys in apart:
        verb = "has" if len(workers) == 1 else "have"
        message = f"{_names(workers)} {verb} no tensor in common with the other captures: {_stages(capture_keys)}"
        yield _report_apart(message, workers)


def _comparable_keys(captures: Sequence[Sequence[ComparedWorker]]) -> list[frozenset[Key]]:
    """Return, for each capture, the keys of its tensors that could be compared with another capture."""
    # the captures of a fleet share most tables: each table, and each set of tables, is gone through once
    keys_of_table = functools.cache(lambda table: frozenset(_keys(table)))
    join = functools.cache(lambda key_sets: frozenset[Key]().union(*key_sets))
    tables = (tables_of(worker.records for worker in workers) for workers in captures)
    return [join(frozenset(map(keys_of_table, capture_tables))) for capture_tables in tables]


def _is_lost(tensor: TensorComparison) -> bool:
    """Return whether a tensor was compared on no worker, on an alternative load path, where that may be no error."""
    return is_alternative(tensor.load_path) and all(row.status in _ABSENT | _LOST.keys() for row in tensor.outcomes)


def _report_apart(message: str, workers: Iterable[ComparedWorker]) -> Finding:
    return Finding(
        kind=kinds.NOTHING_COMPARED,
        severity="error",
        message=message,
        workers=labels_of(workers),
        next="capture again with the base, the adapter and the --stages of the others",
    )


def _names(workers: Iterable[ComparedWorker]) -> str:
    return some([worker.label for worker in workers])


def _stages(keys: Iterable[Key]) -> str:
    """Return the stages of some keys, in parentheses."""
    stages = some(sorted({stage for stage, _, _ in keys}))
    return f"({stages or 'no stage'})"


def _keys(table: Mapping[Key, TensorRecord]) -> Iterator[Key]:
    """Yield the keys of tensors that could be compared with another capture.

    Facts and copies between devices have other names on every host: their stage alone stands for them.
    """
    for key, record in table.items():
        stage, layer, _ = key
        if record.status in _ABSENT or layer == WHOLE_MODEL:
            continue
        is_named_by_host = record.rule == Rule.LIMIT or stage == standard.TRANSFER
        if is_named_by_host:
            yield stage, "", ""
        else:
            yield key


_MOST_DETAILS = 5


def find_unexplained(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report tensors that are outside, missing or unexpected on workers for which no finding names them.

    An error names them, or on an alternative load path a warning: what all devices alike make of a file is software.
    Of a copy over several hops it names the devices of the hop that is to blame.
    """
    for stage, workers_by_tensor in _unexplained_by_stage(evidence).items():
        names = [name for name, workers in workers_by_tensor.items() if workers]
        affected = tuple(dict.fromkeys(itertools.chain.from_iterable(workers_by_tensor.values())))
        if not names:
            continue
        yield Finding(
            kind=kinds.UNEXPLAINED,
            severity="error",
            message=f"{stage} · {some(list(affected))} · {counted(len(names), 'tensor')} with a mismatch of no "
            "known cause",
            workers=affected,
            tensors=tuple(names),
            detail=tuple(name.partition("::")[2] for name in names[:_MOST_DETAILS]),
        )


def _unexplained_by_stage(evidence: ComparisonEvidence) -> dict[str, dict[str, dict[str, None]]]:
    """Return the workers that no finding names for a wrong tensor, by stage and by name of the tensor."""
    named_by_errors = _workers_named(finding for finding in evidence.findings if finding.severity == "error")
    named_by_all = _workers_named(finding for finding in evidence.findings if finding.severity in ("error", "warning"))
    by_stage: dict[str, dict[str, dict[str, None]]] = {}
    for tensor in evidence.tensors:
        if not tensor.is_wrong:
            continue
        # a warning on an alternative path blames software for what all devices make of a file
        named_by = named_by_all if is_alternative(tensor.load_path) else named_by_errors
        named_workers = named_by.get(tensor.name, frozenset())
        names_another_hop = bool(named_workers) and tensor.stage == standard.TRANSFER
        if "" in named_workers or names_another_hop:
            continue
        for row in tensor.outcomes:
            if row.status in BAD:
                unnamed = [worker for worker in row.workers if worker not in named_workers]
                by_stage.setdefault(tensor.stage, {}).setdefault(tensor.name, {}).update(dict.fromkeys(unnamed))
    return by_stage


def _workers_named(findings: Iterable[Finding]) -> dict[str, frozenset[str]]:
    """Return the workers that findings name, by tensor; an empty name stands for all workers."""
    by_tensor: dict[str, frozenset[str]] = {}
    for finding in findings:
        workers = frozenset(finding.workers) or frozenset({""})
        for tensor in finding.tensors:
            by_tensor[tensor] = by_tensor.get(tensor, frozenset()) | workers
        # a wrong copy shows on other workers too, on all that send over the same two devices
        is_of_copies = any(tensor.startswith(f"{standard.TRANSFER}::") for tensor in finding.tensors)
        for consequence in finding.consequences if is_of_copies else ():
            for tensor in consequence.tensors:
                by_tensor[tensor] = by_tensor.get(tensor, frozenset()) | frozenset(consequence.workers)
    return by_tensor


_MOST = 3
_NEXT = "save it again from a training run whose loss is finite: PEFT merges no such layer with safe_merge=True"


def find_not_finite(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report tensors without a number to compare with, and files that hold such values.

    Where the file has none and the others of a tensor were compared, it is a note: an output may rule words out by −∞.
    """
    yield from _overflow(evidence.workers)
    in_files = _values_in_files(evidence.workers)
    detail = _values_beside_others(evidence.workers)
    files_text = "; ".join(f"in the {file}: {some(values, _MOST)}" for file, values in in_files.items())
    without_number = [(tensor, row.workers) for tensor, row in rows_of(evidence.tensors) if row.reason == NOT_FINITE]
    if without_number:
        yield _report_without_number(evidence.workers, without_number, files_text, detail)
    elif files_text or detail:
        severity: Severity = "warning"
        message, advice = f"values are NaN or infinite {files_text}", _NEXT
        if not files_text:
            severity = "note"
            message, advice = f"NaN or infinite in float64 too: {detail[0]}", ""
        yield Finding(
            kind=kinds.NON_FINITE_VALUES,
            severity=severity,
            message=message,
            workers=labels_of(evidence.workers),
            detail=detail,
            next=advice or None,
        )


def _report_without_number(
    compared: Sequence[ComparedWorker],
    rows: Sequence[tuple[TensorComparison, Workers]],
    files_text: str,
    detail: tuple[str, ...],
) -> Finding:
    """Report tensors in which nothing was compared, since no exact value is a number.

    Parameters
    ----------
    rows : sequence of tuple
        Tensors, each with workers that have no number to compare with; one or more.
    files_text : str
        The values of the files that are no numbers either; empty where there are none.
    detail : tuple of str
        Lines of detail.
    """
    tensor_counts = Counter(stage for stage, _ in dict.fromkeys((tensor.stage, tensor.name) for tensor, _ in rows))
    tensors = listed([f"{counted(count, 'tensor')} of {stage}" for stage, count in tensor_counts.items()])
    first = rows[0][0]
    message = f"nothing was compared in {tensors}: {NOT_FINITE}, first in {first.tensor} of {first.layer}"
    advice = None
    if files_text:
        message += f"; {files_text}"
        advice = _NEXT
    labels = union_of_workers(workers for _, workers in rows)
    return Finding(
        kind=kinds.NOTHING_COMPARED,
        severity="error",
        message=message,
        workers=tuple(in_order_of(compared, labels)),
        tensors=tuple(dict.fromkeys(tensor.name for tensor, _ in rows)),
        detail=detail,
        next=advice,
    )


def _overflow(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Report outputs that are NaN or infinite and finite in float64, where no wrong tensor explains it.

    Blocks are compared on equal inputs, and one whose passes on the CPU overflow too is not.
    """
    # workers, and their outputs, by dtype and first block, which is empty where none is known
    overflows: dict[tuple[str, str], dict[str, None]] = {}
    outputs: dict[tuple[str, str], dict[str, None]] = {}
    for worker in compared:
        forward = worker.records.stage(standard.FORWARD).values()
        records = [record for record in forward if not record.load_path]
        overflowed = [record for record in records if _is_overflow(record)]
        # a wrong tensor explains the overflow, and is a finding
        if not overflowed or any(record.status == "outside" for record in worker.records.values()):
            continue
        blocks = [record for record in records if OVERFLOWS in (record.reason or "")]
        first_block = min(blocks, key=lambda record: record.order).layer if blocks else ""
        dtype_and_block = overflowed[0].dtype, first_block
        overflows.setdefault(dtype_and_block, {})[worker.label] = None
        names = [tensor_name(*record.key) for record in overflowed]
        outputs.setdefault(dtype_and_block, {}).update(dict.fromkeys(names))
    for (dtype, first_block), labels in overflows.items():
        statement = f"outputs are NaN or infinite in {dtype}, and finite in float64"
        where = f", first in {first_block}" if first_block else ""
        advice = "use bfloat16, which has the range of float32, or float32" if dtype == "float16" else None
        yield Finding(
            kind=kinds.NON_FINITE_VALUES,
            severity="error",
            message=f"forward · {some(list(labels))} · {statement}{where}",
            general=f"forward · {statement}",
            workers=tuple(labels),
            tensors=tuple(outputs[dtype, first_block]),
            next=advice,
        )


def _is_overflow(record: TensorRecord) -> bool:
    """Return whether an output of the whole model is NaN or infinite in places where float64 has a number."""
    measure = record.measure
    if measure is None or not record.tensor.endswith(END_TO_END):
        return False
    return not math.isfinite(float(measure.max_abs)) and measure.not_finite < measure.elements


def _values_in_files(compared: Sequence[ComparedWorker]) -> dict[str, list[str]]:
    """Return descriptions of the values in the files that are NaN or infinite, by file."""
    by_file: dict[str, dict[str, None]] = {}
    for record in _records(compared):
        if record.not_finite:
            file = "adapter's file" if record.stage == standard.ADAPTER else "base's files"
            values = f"{record.not_finite} of {counted(math.prod(record.shape), 'value')}"
            by_file.setdefault(file, {})[f"{values} of {record.tensor} of {record.layer}"] = None
    return {file: list(values) for file, values in by_file.items()}


def _values_beside_others(compared: Sequence[ComparedWorker]) -> tuple[str, ...]:
    """Return the tensors that have values without a number beside others, a line per stage."""
    by_stage: dict[str, dict[str, None]] = {}
    for record in _records(compared):
        measure = record.measure
        if measure is not None and 0 < measure.not_finite < measure.elements:
            values = f"{measure.not_finite} of {measure.elements} values of {record.tensor} of {record.layer}"
            by_stage.setdefault(record.stage, {})[values] = None
    return tuple(f"{stage} · not compared: {some(list(values), _MOST)}" for stage, values in by_stage.items())


def _records(compared: Sequence[ComparedWorker]) -> Iterator[TensorRecord]:
    """Yield the records of all workers; records that workers share come once."""
    for table in tables_of(worker.records for worker in compared):
        yield from table.values()


_UNUSED = "these inputs do not reach it, or the model reads its weight itself, which leaves its adapter out"


@dataclass(slots=True)
class _Skipped:
    """The tensors that were skipped for one reason: layers by the name of the tensor, and sets of workers."""

    workers: list[Workers] = field(default_factory=list)
    layers: dict[str, str] = field(default_factory=dict)


def find_skipped(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report the tensors and checks that were skipped, by stage and reason."""
    facts = {tensor.name for tensor in evidence.tensors if tensor.rule == Rule.LIMIT}
    for (stage, reason), skipped in _skipped_by_reason(evidence.tensors).items():
        labels = in_order_of(evidence.workers, union_of_workers(skipped.workers))
        names = tuple(skipped.layers)
        noun = "check" if facts.issuperset(names) else "tensor"
        layers = list(dict.fromkeys(skipped.layers.values()))
        detail = (f"of {some(layers)}: {_UNUSED}",) if reason == NO_OUTPUT else ()
        yield Finding(
            kind=kinds.SKIPPED,
            severity="note",
            message=f"{stage} · {counted(len(names), noun)} skipped on {some(labels)}: {reason}",
            general=f"{stage} · skipped on {some(labels)}: {reason}",
            workers=tuple(labels),
            tensors=names,
            detail=detail,
        )


def _skipped_by_reason(tensors: Sequence[TensorComparison]) -> dict[tuple[str, str], _Skipped]:
    """Group skipped tensors by stage and reason, without those whose reason is a finding already."""
    by_reason: dict[tuple[str, str], _Skipped] = {}
    reported = _reasons_reported(tensors)
    for tensor, row in rows_of(tensors):
        if row.status == "skipped" and (tensor.stage, row.reason) not in reported:
            skipped = by_reason.setdefault((tensor.stage, row.reason or "no reason given"), _Skipped())
            skipped.workers.append(row.workers)
            skipped.layers[tensor.name] = tensor.layer
    return by_reason


def _reasons_reported(tensors: Iterable[TensorComparison]) -> set[tuple[str, str | None]]:
    """Return the reasons, each with its stage, that are findings already.

    `find_not_finite` reports tensors that have no number to compare with; tensors that are missing because a stage did
    not run are mismatches.
    """
    missing = {(tensor.stage, row.reason) for tensor, row in rows_of(tensors) if row.status == "missing"}
    return missing | {(stage, NOT_FINITE) for stage in SPECS}


FINDERS = (
    Finder(name="nothing compared", phase=Phase.COMPLETENESS, position=4, find=find_nothing_compared),
    Finder(name="values that are not finite", phase=Phase.COMPLETENESS, position=5, find=find_not_finite),
    Finder(name="skipped checks", phase=Phase.REMARKS, position=3, find=find_skipped),
    Finder(name="unexplained tensors", phase=Phase.REMAINDER, position=1, find=find_unexplained),
)
