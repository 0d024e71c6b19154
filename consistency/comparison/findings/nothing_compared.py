"""What agreement cannot be claimed over: nothing compared, no numbers, skipped checks, what no finding explains."""

from __future__ import annotations

import functools
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
from consistency.comparison.outcomes import Workers, gathered, names_in
from consistency.comparison.records import Key, tables_of
from consistency.comparison.result import BAD, Finding, TensorComparison, tensor_name
from consistency.comparison.workers import ComparedWorker, in_order_of
from consistency.numerics.rules import Rule

_MOST_REASONS = 3
_MOST_CAPTURES = 4
_ABSENT = frozenset({"skipped", "blocked"})
_LOST = dict.fromkeys(("missing", "unexpected"), "an alternative load path has other tensors than the files")
_ALONE = "there is one worker, and neither a file nor an exact value to compare it with"


def find_nothing_compared(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Report a comparison without a compared tensor, and captures that have none in common with any other.

    Lost workers are a finding already.
    """
    compared, tensors = evidence.workers, evidence.tensors
    whole = [p for p in compared if p.info.status == "ok"]
    if len(whole) < len(compared) and not whole:
        return
    if tensors and not coverage(tensor for tensor in tensors if not _is_lost(tensor)):
        reasons = dict.fromkeys(
            row.reason or _LOST.get(row.status, _ALONE) for tensor in tensors for row in tensor.outcomes
        )
        yield Finding(
            kind=kinds.NOTHING_COMPARED,
            severity="error",
            message=f"nothing was compared: {'; '.join(list(reasons)[:_MOST_REASONS])}",
            workers=tuple(dict.fromkeys(p.label for p in compared)),
            next="choose other --stages, or give another device to compare with",
        )
        return
    by_capture = gathered((id(p.capture), p) for p in whole)
    comparable = functools.cache(lambda table: frozenset(_keys(table)))
    joined = functools.cache(lambda parts: frozenset[Key]().union(*parts))
    tables = (tables_of(p.records for p in members) for members in by_capture.values())
    keys = [joined(frozenset(map(comparable, some))) for some in tables]
    of_captures = Counter(keys)  # most captures of a fleet have the same
    count: Counter[Key] = Counter()
    for found, captures in of_captures.items():
        for key in found:
            count[key] += captures
    apart = [
        (members, found)
        for members, found in zip(by_capture.values(), keys, strict=True)
        if len(keys) > 1 and all(count[key] == 1 for key in found)
    ]
    if apart and len(apart) == len(keys):
        texts = [f"{_names(members)} {_stages(found)}" for members, found in apart]
        yield _finding(
            f"the {len(keys)} captures have no tensor in common: {some(texts, _MOST_CAPTURES)}",
            [p for members, _ in apart for p in members],
        )
        return
    for members, found in apart:
        verb = "has" if len(members) == 1 else "have"
        message = f"{_names(members)} {verb} no tensor in common with the other captures: {_stages(found)}"
        yield _finding(message, members)


def _is_lost(tensor: TensorComparison) -> bool:
    """Return whether nothing of a tensor was compared though it may be in no error: on an alternative load path."""
    return is_alternative(tensor.load_path) and all(row.status in _ABSENT | _LOST.keys() for row in tensor.outcomes)


def _finding(message: str, workers: Iterable[ComparedWorker]) -> Finding:
    return Finding(
        kind=kinds.NOTHING_COMPARED,
        severity="error",
        message=message,
        workers=tuple(dict.fromkeys(p.label for p in workers)),
        next="capture again with the base, the adapter and the --stages of the others",
    )


def _names(workers: Iterable[ComparedWorker]) -> str:
    return some([p.label for p in workers])


def _stages(keys: Iterable[Key]) -> str:
    return f"({some(sorted({key[0] for key in keys})) or 'no stage'})"


def _keys(table: Mapping[Key, TensorRecord]) -> Iterator[Key]:
    """Yield what could be compared with another capture.

    Facts and copies between devices have other names on every host: of these it is the stage.
    """
    for key, record in table.items():
        if record.status not in _ABSENT and key[1] != WHOLE_MODEL:
            own = record.rule == Rule.LIMIT or key[0] == standard.TRANSFER
            yield (key[0], "", "") if own else key


_MOST_DETAILS = 5


def find_unexplained(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Report tensors that are outside, missing or unexpected on workers for which no finding names them.

    An error names them, or on an alternative load path a warning: what all devices alike make of a file is software.
    Of a copy over several hops it names the devices of the hop that is to blame.
    """
    errors = _named(finding for finding in evidence.findings if finding.severity == "error")
    all_named = _named(finding for finding in evidence.findings if finding.severity in ("error", "warning"))
    by_stage: dict[str, dict[str, dict[str, None]]] = {}
    for tensor in evidence.tensors:
        named = (all_named if is_alternative(tensor.load_path) else errors).get(tensor.name, frozenset())
        for row in tensor.outcomes if tensor.is_wrong else ():
            if row.status in BAD and "" not in named and not (named and tensor.stage == standard.TRANSFER):
                left = [worker for worker in row.workers if worker not in named]
                by_stage.setdefault(tensor.stage, {}).setdefault(tensor.name, {}).update(dict.fromkeys(left))
    for stage, of_stage in by_stage.items():
        names = [name for name, workers in of_stage.items() if workers]
        affected = tuple(dict.fromkeys(worker for workers in of_stage.values() for worker in workers))
        if names:
            yield Finding(
                kind=kinds.UNEXPLAINED,
                severity="error",
                message=f"{stage} · {some(list(affected))} · {counted(len(names), 'tensor')} with a mismatch of no "
                "known cause",
                workers=affected,
                tensors=tuple(names),
                detail=tuple(name.partition("::")[2] for name in names[:_MOST_DETAILS]),
            )


def _named(findings: Iterable[Finding]) -> dict[str, frozenset[str]]:
    """Return the workers that findings name by tensor; an empty name stands for all of them."""
    found: dict[str, frozenset[str]] = {}
    for finding in findings:
        workers = frozenset(finding.workers) or frozenset({""})
        for tensor in finding.tensors:
            found[tensor] = found.get(tensor, frozenset()) | workers
    return found


_MOST = 3
_NEXT = "save it again from a training run whose loss is finite: PEFT merges no such layer with safe_merge=True"


def find_not_finite(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report tensors without a number to compare with, and files that hold such values.

    Where the file has none and the others of a tensor were compared, it is a note: an output may rule words out by −∞.
    """
    compared, tensors = evidence.workers, evidence.tensors
    yield from _overflow(compared)
    in_files, in_part = _in_files(compared), _in_part(compared)
    where = "; ".join(f"in the {file}: {some(places, _MOST)}" for file, places in in_files.items())
    unknown = [(t, outcome.workers) for t in tensors for outcome in t.outcomes if outcome.reason == NOT_FINITE]
    if unknown:
        count = Counter(stage for stage, _ in dict.fromkeys((t.stage, t.name) for t, _ in unknown))
        first = unknown[0][0]
        what = listed([f"{counted(number, 'tensor')} of {stage}" for stage, number in count.items()])
        message = f"nothing was compared in {what}: {NOT_FINITE}, first in {first.tensor} of {first.layer}"
        yield Finding(
            kind=kinds.NOTHING_COMPARED,
            severity="error",
            message=f"{message}; {where}" if where else message,
            workers=tuple(in_order_of(compared, dict.fromkeys(name for _, names in unknown for name in names))),
            tensors=tuple(dict.fromkeys(t.name for t, _ in unknown)),
            detail=in_part,
            next=_NEXT if where else None,
        )
    elif where or in_part:
        message = f"values are NaN or infinite {where}" if where else f"NaN or infinite in float64 too: {in_part[0]}"
        yield Finding(
            kind=kinds.NON_FINITE_VALUES,
            severity="warning" if where else "note",
            message=message,
            workers=tuple(dict.fromkeys(p.label for p in compared)),
            detail=in_part,
            next=_NEXT if where else None,
        )


def _overflow(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Report outputs that are NaN or infinite and finite in float64, where nothing that is wrong explains it.

    Blocks are compared on equal inputs, and one whose passes on the CPU overflow too is not.
    """
    overflows: dict[
        tuple[str, str], dict[str, None]
    ] = {}  # workers by dtype and first block, empty where none is known
    outputs: dict[str, None] = {}
    for p in compared:
        records = [record for record in p.records.stage(standard.FORWARD).values() if not record.load_path]
        lost = [
            record
            for record in records
            if record.tensor.endswith(END_TO_END)
            and (seen := record.measure) is not None
            and not math.isfinite(float(seen.max_abs))
            and seen.not_finite < seen.elements
        ]
        if lost and not any(record.status == "outside" for record in p.records.values()):
            beyond = [record for record in records if OVERFLOWS in (record.reason or "")]
            first = min(beyond, key=lambda record: record.order).layer if beyond else ""
            overflows.setdefault((lost[0].dtype, first), {})[p.label] = None
            outputs |= dict.fromkeys(tensor_name(*record.key) for record in lost)
    for (dtype, first), labels in overflows.items():
        text = f"outputs are NaN or infinite in {dtype}, and finite in float64"
        where = f", first in {first}" if first else ""
        yield Finding(
            kind=kinds.NON_FINITE_VALUES,
            severity="error",
            message=f"forward · {some(list(labels))} · {text}{where}",
            general=f"forward · {text}",
            workers=tuple(labels),
            tensors=tuple(outputs),
            next="use bfloat16, which has the range of float32, or float32" if dtype == "float16" else None,
        )


def _in_files(compared: Sequence[ComparedWorker]) -> dict[str, list[str]]:
    """Return what of the files is NaN or infinite, by file."""
    found: dict[str, dict[str, None]] = {}
    for record in _records(compared):
        if record.not_finite:
            file = "adapter's file" if record.stage == standard.ADAPTER else "base's files"
            values = f"{record.not_finite} of {counted(math.prod(record.shape), 'value')}"
            found.setdefault(file, {})[f"{values} of {record.tensor} of {record.layer}"] = None
    return {file: list(places) for file, places in found.items()}


def _in_part(compared: Sequence[ComparedWorker]) -> tuple[str, ...]:
    """Return the tensors that have values without a number beside others, a line per stage."""
    by_stage: dict[str, dict[str, None]] = {}
    for record in _records(compared):
        seen = record.measure
        if seen is not None and 0 < seen.not_finite < seen.elements:
            place = f"{seen.not_finite} of {seen.elements} values of {record.tensor} of {record.layer}"
            by_stage.setdefault(record.stage, {})[place] = None
    return tuple(f"{stage} · not compared: {some(list(places), _MOST)}" for stage, places in by_stage.items())


def _records(compared: Sequence[ComparedWorker]) -> Iterator[TensorRecord]:
    for table in tables_of(p.records for p in compared):
        yield from table.values()


_UNUSED = "these inputs do not reach it, or the model reads its weight itself, which leaves its adapter out"


@dataclass(slots=True)
class _Skipped:
    """Tensors that were skipped for the same reason: name to layer, and the workers that skipped them."""

    workers: list[Workers] = field(default_factory=list)
    layers: dict[str, str] = field(default_factory=dict)


def find_skipped(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report what was skipped, by stage and reason."""
    facts = {tensor.name for tensor in evidence.tensors if tensor.rule == Rule.LIMIT}
    by_reason: dict[tuple[str, str], _Skipped] = {}
    reported = _reasons_reported(evidence.tensors)
    for tensor in evidence.tensors:
        for row in tensor.outcomes:
            if row.status == "skipped" and (tensor.stage, row.reason) not in reported:
                skipped = by_reason.setdefault((tensor.stage, row.reason or "no reason given"), _Skipped())
                skipped.workers.append(row.workers)
                skipped.layers[tensor.name] = tensor.layer
    for (stage, reason), skipped in by_reason.items():
        labels = in_order_of(evidence.workers, names_in(skipped.workers))
        names = tuple(skipped.layers)
        what = counted(len(names), "check" if facts.issuperset(names) else "tensor")
        layers = list(dict.fromkeys(skipped.layers.values()))
        yield Finding(
            kind=kinds.SKIPPED,
            severity="note",
            message=f"{stage} · {what} skipped on {some(labels)}: {reason}",
            general=f"{stage} · skipped on {some(labels)}: {reason}",
            workers=tuple(labels),
            tensors=names,
            detail=(f"of {some(layers)}: {_UNUSED}",) if reason == NO_OUTPUT else (),
        )


def _reasons_reported(tensors: Iterable[TensorComparison]) -> set[tuple[str, str | None]]:
    """Return the reasons, by stage, that are findings already.

    They are of what has no number to compare with, and of what is missing because a stage did not run.
    """
    missing = {(tensor.stage, row.reason) for tensor in tensors for row in tensor.outcomes if row.status == "missing"}
    return missing | {(stage, NOT_FINITE) for stage in SPECS}


FINDERS = (
    Finder(name="nothing compared", phase=Phase.COMPLETENESS, position=4, find=find_nothing_compared),
    Finder(name="values that are not finite", phase=Phase.COMPLETENESS, position=5, find=find_not_finite),
    Finder(name="skipped checks", phase=Phase.REMARKS, position=3, find=find_skipped),
    Finder(name="unexplained tensors", phase=Phase.REMAINDER, position=1, find=find_unexplained),
)
