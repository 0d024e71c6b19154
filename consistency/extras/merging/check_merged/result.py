"""Check a folder of merged weights, and state the result as a comparison: `consistency check-merged`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from consistency.capture.adapter_remarks import AdapterRemark
from consistency.capture.names import split_name
from consistency.capture.wording import and_more, counted, layers_text, some
from consistency.case import recognition
from consistency.case.case import Case
from consistency.case.preflight import folder_in_cache
from consistency.comparison import kinds
from consistency.comparison.outcomes import group_by_key
from consistency.comparison.result import (
    BAD,
    ArchitectureGroup,
    Comparison,
    Finding,
    Outcome,
    Severity,
    TensorComparison,
    WorkerSummary,
    in_order,
    tensor_name,
    verdict_of,
    with_provenance,
)
from consistency.errors import UsageError
from consistency.extras.merging.check_merged.causes import CAUSES, MERGED_FOLDER, ROLE, ZERO_DELTA, MergeCause
from consistency.extras.merging.check_merged.check import check
from consistency.extras.merging.check_merged.folder import Problem
from consistency.extras.merging.check_merged.state import MergedFolder, TensorState
from consistency.extras.merging.kinds import DIFFERENCE, NAMES, ROUNDED
from consistency.numerics.real import Real
from consistency.plugins import Statement
from consistency.workflows.api import AnyPath
from consistency.workflows.report_folder import output, refuse_among_weights, write_reports

_BASE_ALONE = frozenset(
    {
        MergeCause.NOT_MERGED,
        MergeCause.TOWER_LEFT_OUT,
        MergeCause.EXPERTS_LEFT_OUT,
        MergeCause.SAVED_DROPPED,
    }
)

"""Causes for which a tensor holds the base alone."""

_REFERENCE = "base + adapter"
_MOST_NAMES = 3
_MOST_DETAIL = 6
_LEAST_LOSS = 0.01
"""Least part of the adapter's effect that rounding takes for a finding about it."""


def check_merged(
    merged: AnyPath,
    *,
    base: AnyPath,
    adapter: AnyPath | Sequence[AnyPath] | None = None,
    weights: Sequence[float] = (),
    out: AnyPath | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    replace: bool = False,
) -> Comparison:
    """Check whether a folder of merged weights, by whatever writer, holds base + adapter.

    Parameters
    ----------
    merged : path
        The folder, or one file of weights.
    base : path
        A folder, or a hub id whose repository is in the hub's cache; nothing is downloaded.
    adapter : path, or sequence of path
        Folders of adapters; of several the folder has to hold the sum. Without one the result tells what differs from
        the base.
    weights : sequence of float
        A factor for what each adapter adds, in their order; 1 for all without it.
    out : path, optional
        Folder for the report; nothing is kept without it.
    allow_pickle : bool
        Read `.bin` weights, with `weights_only=True`.
    trust_remote_code : bool
        Let the base's own code make its model, where the names of its weights take one.
    replace : bool
        Overwrite an earlier report in `out`.

    Raises
    ------
    ConsistencyError
        One of them cannot be read. A wrong merge is never raised: give the result to `assert_consistent`.
    """
    base_folder = folder_in_cache(str(base), what="base")
    adapters = [folder_in_cache(str(path), what="adapter") for path in _paths(adapter)]
    if weights and len(weights) != len(adapters):
        raise UsageError("not as many weights as adapters", got=f"{len(weights)} and {len(adapters)}")
    target = None if out is None else Path(out)
    case = Case(name="", base=str(base_folder), allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    for path in adapters:
        recognition.refuse_swapped_folders(base_folder, path)
        recognition.refuse_adapter_without_config(path)
    recognition.refuse_base_without_config(base_folder, weights_alone=True)
    if target is not None:
        refuse_among_weights(target, base_folder, Path(merged), *adapters)
    with output(target, replace=replace):  # refused before any work
        started = time.monotonic()
        cases = [msgspec.structs.replace(case, adapter=str(path)) for path in adapters] or [case]
        folder = check(cases, Path(merged), weights)
        comparison = as_comparison(folder, case, str(merged), adapters=[str(path) for path in adapters])
        return write_reports(with_provenance(comparison, time.monotonic() - started), target)


def _paths(adapter: AnyPath | Sequence[AnyPath] | None) -> list[Path]:
    """Return the folders of the adapters, of which there may be one, several or none."""
    if adapter is None:
        return []
    if isinstance(adapter, str | os.PathLike):
        return [Path(adapter)]
    return [Path(path) for path in adapter]


def as_comparison(folder: MergedFolder, case: Case, label: str, *, adapters: Sequence[str]) -> Comparison:
    """Return the result of a check as a comparison of the folder, called `label`, with base + adapters."""
    about_tensors = _wrong(folder) if adapters else _differences(folder)
    findings = in_order(
        [
            *_problems(folder.problems),
            *folder.settings,
            *_remarks(folder.remarks),
            *about_tensors,
            *_unpaired(folder),
            *_not_judged(folder),
            *_notes(folder),
        ]
    )
    has_skipped = any(state.status == "skipped" for state in folder.tensors)
    is_wrong = any(finding.severity == "error" for finding in findings)
    names = (_REFERENCE, label)
    return Comparison(
        case=label,
        base=case.base,
        adapter=" + ".join(adapters) or None,
        dtype=folder.dtype,
        level="every element",
        load_paths=(MERGED_FOLDER,),
        verdict=verdict_of(findings, incomplete=has_skipped and not is_wrong),
        reference=_REFERENCE,
        workers=tuple(
            WorkerSummary(name=name, load_path=MERGED_FOLDER, architecture="weights", model="", status="ok")
            for name in names
        ),
        architectures=(ArchitectureGroup(name="weights", workers=names),),
        tensors=tuple(_row(state, label) for state in folder.tensors),
        findings=findings,
        not_checked=tuple(folder.not_checked),
    )


def _row(state: TensorState, label: str) -> TensorComparison:
    """Return a tensor of the folder as a row of the comparison; its last outcome is the folder's."""
    layer, tensor = split_name(state.name)
    evidence: dict[str, Any] = {ROLE: state.role}
    if state.causes:
        evidence[CAUSES] = {str(cause): text for cause, text in state.causes.items()}
    if state.is_delta_zero:
        evidence[ZERO_DELTA] = True
    if state.keys:
        evidence["names_in_folder"] = list(state.keys)
    outcome = Outcome(
        workers=(label,), reference=_REFERENCE, status=state.status, evidence=evidence, reason=state.reason or None
    )
    if state.status in ("equal", "within", "outside"):
        outcome = msgspec.structs.replace(outcome, elements=state.elements, mismatched=state.outside)
    if state.worst is not None:
        index, actual, low, high = state.worst
        evidence |= {"actual": Real(actual), "lowest": Real(low), "highest": Real(high)}
        # How far the element is beyond the nearer end of what it may be.
        error = Real(max(low - actual, actual - high))
        outcome = msgspec.structs.replace(outcome, worst_index=index, max_abs=error)
    return TensorComparison(
        stage=MERGED_FOLDER,
        load_path=MERGED_FOLDER,
        layer=layer,
        tensor=tensor,
        shape=state.shape,
        dtype=state.dtype,
        rule="rounding" if state.role == "adapted" else "bitwise",
        classes=((_REFERENCE, label),) if state.status == "equal" else ((_REFERENCE,), (label,)),
        outcomes=(Outcome(workers=(_REFERENCE,), reference=_REFERENCE, status="equal"), outcome),
    )


def _names(states: Iterable[TensorState]) -> tuple[str, ...]:
    return tuple(tensor_name(MERGED_FOLDER, *split_name(state.name)) for state in states)


def _problems(problems: Sequence[Problem]) -> Iterator[Finding]:
    """Yield a finding per kind of problem."""
    for cause, alike in group_by_key((problem.cause, problem) for problem in problems).items():
        texts = [problem.text for problem in alike[:_MOST_NAMES]]
        texts.append(and_more(len(alike) - _MOST_NAMES))
        severity = min((problem.severity for problem in alike), key=get_args(Severity).index)
        tensors = [name for problem in alike for name in problem.tensors]
        yield Finding(
            kind=cause,
            severity=severity,
            message=cause.sentence("; ".join(text for text in texts if text)),
            tensors=tuple(tensors),
            next=None if severity == "note" else alike[0].todo or cause.todo,
        )


def _remarks(remarks: Sequence[AdapterRemark]) -> Iterator[Finding]:
    """Yield a finding per flaw of the adapter itself."""
    for remark in remarks:
        yield Finding(
            kind=remark.flaw, severity=remark.severity, message=f"the adapter: {remark.text}", next=remark.next
        )


def _wrong(folder: MergedFolder) -> Iterator[Finding]:
    """Yield one finding where one explanation holds for all wrong tensors, else one per explanation."""
    # A problem of the folder states the cause of its tensors already.
    stated = {(problem.cause, name) for problem in folder.problems for name in problem.tensors}
    wrong = []
    for state in folder.tensors:
        is_stated = any((cause, state.name) in stated for cause in state.causes)
        if state.status == "outside" and not is_stated:
            wrong.append(state)
    common_causes = set.intersection(*(set(state.causes) for state in wrong)) if wrong else set()
    groups: dict[tuple[MergeCause, ...], list[TensorState]] = {}
    for state in wrong:
        causes = tuple(cause for cause in state.causes if not common_causes or cause in common_causes)
        if not causes:
            causes = (MergeCause.CHANGED if state.role == "untouched" else MergeCause.OFF,)
        groups.setdefault(causes, []).append(state)
    for causes, states in groups.items():
        yield _explained(causes, states, folder)


def _explained(causes: tuple[MergeCause, ...], states: list[TensorState], folder: MergedFolder) -> Finding:
    """Return the finding of tensors with the same causes.

    The text of the causes is in its message where it is the same for all tensors, else in a line for each.
    """
    texts = {}
    for state in states:
        cause_texts = [state.causes.get(cause, "") for cause in causes]
        texts[state.name] = " or ".join(text for text in cause_texts if text)
    has_one_text = len(set(texts.values())) == 1
    is_explained = bool(states[0].causes) and (has_one_text or not any(texts.values()))
    detailed_states = [] if is_explained else states
    subject = _subject(states, folder)
    name = states[0].name
    if len(states) == 1 and is_explained and split_name(name)[0] not in texts[name]:
        subject = f"{subject} ({name})"
    if 1 < len(states) < _count_alike(states, folder) and is_explained and not any(texts.values()):
        layers = layers_text([split_name(state.name)[0] for state in states])
    else:
        layers = ""
    sentences: list[str] = []
    for cause in causes:
        sentence = cause.sentence("they" if sentences else subject)
        if len(states) == 1:
            sentence = sentence.replace(" hold ", " holds ", 1).replace(" are ", " is ", 1)
        cause_text = states[0].causes.get(cause, "") if has_one_text else ""
        sentences.append(f"{sentence}: {cause_text}" if cause_text else sentence)
    return Finding(
        kind=causes[0],
        severity="error",
        message=f"{'; or '.join(sentences)}: {layers}" if layers else "; or ".join(sentences),
        tensors=_names(states),
        detail=tuple(_detail(state, texts[state.name]) for state in detailed_states[:_MOST_DETAIL]),
        next=states[0].advice or causes[0].todo,
    )


def _subject(states: Sequence[TensorState], folder: MergedFolder) -> str:
    """Return `2 of 9 adapted tensors`: how many tensors there are, of all with their roles."""
    roles = {state.role for state in states}
    noun = f"{next(iter(roles))} tensor" if len(roles) == 1 else "tensor"
    return f"{len(states)} of {counted(_count_alike(states, folder), noun)}"


def _count_alike(states: Sequence[TensorState], folder: MergedFolder) -> int:
    """Return how many tensors of the folder have the roles of some."""
    roles = {state.role for state in states}
    return sum(state.role in roles for state in folder.tensors)


def _differences(folder: MergedFolder) -> Iterator[Finding]:
    """Yield how many tensors differ from the base, and then a finding per rank of the difference."""
    differing = [(state, state.difference) for state in folder.tensors if state.difference is not None]
    yield Finding(
        kind=DIFFERENCE,
        severity="note",
        message=f"{len(differing)} of {counted(len(folder.tensors), 'tensor')} differ from the base",
        tensors=_names(state for state, _ in differing),
    )
    by_rank = group_by_key((difference.rank, (state, difference)) for state, difference in differing)
    for rank, alike in sorted(by_rank.items(), key=lambda item: -len(item[1])):
        layers = [split_name(state.name)[0] for state, _ in alike]
        sizes = [difference.share for _, difference in alike]
        size = f"{min(sizes):.2%} to {max(sizes):.2%} of the base's norm"
        rank_text = "full rank" if rank is None else f"rank {rank}, as a LoRA of that rank leaves"
        yield Finding(
            kind=DIFFERENCE,
            severity="note",
            tensors=_names(state for state, _ in alike),
            message=f"{counted(len(alike), 'tensor')} by {rank_text}: {layers_text(layers)}; {size}",
        )


def _detail(state: TensorState, text: str) -> str:
    """Return a line about one tensor: the text of its causes, or its worst element."""
    if text:
        return f"{state.name}   {text}"
    if state.worst is None or state.causes:
        return f"{state.name}   {state.reason}" if state.reason else state.name
    measure = f"{state.reason}; " if state.reason and state.role == "adapted" else ""
    index, actual, low, high = state.worst
    expected = f"{low:.9g}" if low == high else f"{low:.9g} to {high:.9g}"
    position = ", ".join(map(str, index))
    element = f"[{position}] is {actual:.9g}, not {expected}"
    return f"{state.name}   {measure}{state.outside} of {state.elements} elements; {element}"


def _unpaired(folder: MergedFolder) -> Iterator[Finding]:
    """Yield the tensors that only the base has, and those that only the folder has."""
    severities: dict[str, tuple[Severity, str]] = {
        "missing": ("error", "the folder lacks {} of the base"),
        "unexpected": ("warning", "the folder has {} that neither base nor adapter has"),
    }
    for status, (severity, template) in severities.items():
        states = [state for state in folder.tensors if state.status == status]
        if states:
            statement = template.format(counted(len(states), "tensor"))
            names = some([state.name for state in states], _MOST_NAMES)
            yield Finding(
                kind=MergeCause.FILES,
                severity=severity,
                message=f"{statement}: {names}",
                tensors=_names(states),
                next=MergeCause.FILES.todo,
            )


def _not_judged(folder: MergedFolder) -> Iterator[Finding]:
    """Yield a finding per reason for which tensors could not be judged."""
    by_reason = group_by_key((state.reason, state) for state in folder.tensors if state.status == "skipped")
    for reason, states in by_reason.items():
        message = f"{counted(len(states), 'tensor')} not judged: {reason}"
        yield Finding(kind=kinds.SKIPPED, severity="note", message=message, tensors=_names(states))


def _notes(folder: MergedFolder) -> Iterator[Finding]:
    """Yield how names were matched, how the writer rounded, and what that took of the adapter's effect."""
    if folder.mapping:
        yield Finding(kind=NAMES, severity="note", message=f"names matched: {'; '.join(folder.mapping)}")
    if folder.orders:
        texts = []
        for order, count in folder.orders.items():
            noun = "matrix" if count == 1 else "matrices"
            texts.append(f"{order.text} ({count} {noun})")
        yield Finding(kind=ROUNDED, severity="note", message=f"how it was rounded: {', '.join(texts)}")
    lost, least, in_float32 = (folder.effect.share(name) for name in ("lost", "least", "in_float32"))
    if lost >= _LEAST_LOSS:
        took = f"took {_percent(lost)} of" if lost < 1 else "is larger than"
        parts = [f"rounding to {folder.dtype} {took} the adapter's effect here"]
        # Another way to merge is worth a word where it loses clearly less.
        if least < 0.95 * lost:
            parts.append(f"rounded once it would be {_percent(least)}")
        if in_float32 < 0.95 * lost:
            parts.append(f"merged and saved in float32 {_percent(in_float32)}")
        yield Finding(kind=MergeCause.LOSS, severity="note", message="; ".join(parts), next=MergeCause.LOSS.todo)


def _percent(fraction: float) -> str:
    if fraction >= 0.095:
        return f"{fraction:.0%}"
    return f"{fraction:.1%}" if fraction >= 0.0005 else f"{fraction:.1e}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Numbers of tensors in a folder; all but the last three are of tensors that the adapter changes or has whole."""

    adapted: int
    right: int  # hold base + adapter, the unchanged ones too
    unchanged: int  # right, where the adapter adds nothing
    base_alone: int
    in_part: int  # hold base + adapter in some rows, and the base in the others
    missing: int
    broken: int  # cannot be judged, because the adapter is not finite there
    overflowed: int  # hold NaN or infinity
    adapted_skipped: int
    skipped: int  # of all tensors
    untouched: int  # that the adapter leaves as they are
    changed: int  # untouched, and not the base's

    @property
    def otherwise_wrong(self) -> int:
        """Return the number of adapted tensors that none of the other numbers counts."""
        counted_ones = self.right + self.base_alone + self.in_part + self.missing + self.broken + self.overflowed
        return self.adapted - counted_ones - self.adapted_skipped


def _counts(comparison: Comparison) -> _Counts:
    """Count the tensors of a folder by what they hold, from the outcomes of the folder."""
    outcomes = [tensor.outcomes[-1] for tensor in comparison.tensors]
    adapted = [outcome for outcome in outcomes if outcome.evidence.get(ROLE) in ("adapted", "saved")]
    right = [outcome for outcome in adapted if outcome.status in ("equal", "within")]
    causes = [set(outcome.evidence.get(CAUSES, ())) for outcome in adapted if outcome.status == "outside"]
    untouched = [outcome for outcome in outcomes if outcome.evidence.get(ROLE) == "untouched"]
    return _Counts(
        adapted=len(adapted),
        right=len(right),
        unchanged=sum(ZERO_DELTA in outcome.evidence for outcome in right),
        base_alone=sum(bool(of_tensor) and of_tensor <= _BASE_ALONE for of_tensor in causes),
        in_part=sum(of_tensor == {MergeCause.PART_LEFT_OUT} for of_tensor in causes),
        missing=sum(outcome.status == "missing" for outcome in adapted),
        broken=sum(of_tensor == {MergeCause.ADAPTER_NOT_FINITE} for of_tensor in causes),
        overflowed=sum(of_tensor == {MergeCause.OVERFLOW} for of_tensor in causes),
        adapted_skipped=sum(outcome.status == "skipped" for outcome in adapted),
        skipped=sum(outcome.status == "skipped" for outcome in outcomes),
        untouched=len(untouched),
        changed=sum(outcome.status in BAD for outcome in untouched),
    )


def statement(comparison: Comparison) -> Statement:
    """Return what a folder of merged weights is, and the verdict in one sentence."""
    counts = _counts(comparison)
    if comparison.adapter is None:
        sentence = f"{counts.changed} of {counted(counts.untouched, 'tensor')} differ from the base"
        return Statement(heading="COMPARED", sentence=sentence)
    parts = [*_adapted_texts(counts), *_other_texts(counts)]
    return Statement(heading=_heading(comparison, counts), sentence="; ".join(parts))


def _holds(count: int) -> str:
    return "holds" if count == 1 else "hold"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _adapted_texts(counts: _Counts) -> Iterator[str]:
    """Yield what the tensors hold that the adapter changes or has whole."""
    merged = counts.right - counts.unchanged
    yield f"{merged} of {counted(counts.adapted, 'adapted tensor')} {_holds(merged)} base + adapter"
    if counts.unchanged:
        yield f"{counts.unchanged} {_holds(counts.unchanged)} the base, to which the adapter adds nothing"
    if counts.broken:
        yield f"{counts.broken} cannot be judged, since the adapter is not finite there"
    if counts.base_alone:
        yield f"{counts.base_alone} {_holds(counts.base_alone)} the base alone"
    if counts.in_part:
        yield f"{counts.in_part} {_holds(counts.in_part)} it in a part of the rows alone"
    if counts.missing:
        yield f"{counts.missing} {_is(counts.missing)} missing"
    if counts.overflowed:
        yield f"{counts.overflowed} {_holds(counts.overflowed)} NaN or infinity"
    if counts.otherwise_wrong:
        yield f"{counts.otherwise_wrong} {_is(counts.otherwise_wrong)} something else"


def _other_texts(counts: _Counts) -> Iterator[str]:
    """Yield whether the untouched tensors are the base's, and how many tensors could not be judged."""
    if counts.changed:
        others = counted(counts.untouched, "other")
        yield f"{counts.changed} of {others} {_is(counts.changed)} not the base's"
    elif counts.untouched == 1:
        yield "the other is the base's"
    elif counts.untouched:
        yield f"the {counts.untouched} others are the base's"
    if counts.skipped:
        yield f"{counted(counts.skipped, 'tensor')} could not be judged"


def _does_not_load(comparison: Comparison) -> bool:
    """Return whether transformers does not load the folder, or not all of it."""
    return any(
        finding.kind == MergeCause.DOES_NOT_LOAD and finding.severity == "error" for finding in comparison.findings
    )


def _heading(comparison: Comparison, counts: _Counts) -> str:
    """Return the verdict in capitals: what the folder is."""
    if comparison.verdict != "inconsistent":
        if counts.unchanged and counts.unchanged == counts.adapted:
            return "NOTHING TO MERGE"
        return "MERGED" if comparison.verdict == "consistent" else "NOT ALL JUDGED"
    # First what is no fault of the merge, then how much of the adapter is missing.
    if counts.broken and counts.right + counts.broken == counts.adapted and not counts.changed:
        return "BROKEN ADAPTER"
    if counts.skipped and counts.right + counts.adapted_skipped == counts.adapted and not counts.changed:
        return "NOT ALL JUDGED"
    if counts.base_alone == counts.adapted:  # no adapted tensor at all, too
        return "NOT MERGED"
    if counts.right + counts.base_alone + counts.in_part + counts.missing == counts.adapted:
        if counts.base_alone or counts.in_part or counts.missing:
            return "NOT MERGED WHOLE"
        return "MERGED, AND DOES NOT LOAD" if _does_not_load(comparison) else "MERGED, AND WRONG BESIDE"
    return "WRONGLY MERGED"
