"""Check a folder of merged weights, and say what is in it: `consistency check-merged`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from consistency.capture.adapter_remarks import AdapterRemark
from consistency.capture.names import split_name
from consistency.capture.wording import and_more, counted, layers_text, some
from consistency.case import recognition
from consistency.case.case import Case
from consistency.comparison import kinds
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
from consistency.extras.merging.check_merged.causes import CAUSES, MERGED_FOLDER, ROLE, ZERO_DELTA, MergeCause
from consistency.extras.merging.check_merged.check import MergedFolder, TensorState, check
from consistency.extras.merging.check_merged.folder import Problem
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
        MergeCause.PART_LEFT_OUT,
        MergeCause.SAVED_DROPPED,
    }
)

_REFERENCE = "base + adapter"
_MOST = 3
_MOST_DETAIL = 6
_SAID = 0.01
"""Share of the adapter's effect that rounding has to take to be said."""


def check_merged(
    merged: AnyPath,
    *,
    base: AnyPath,
    adapter: AnyPath | None = None,
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
    base, adapter : path
        Folders, as `consistency run` takes them. Without an adapter the result tells what differs from the base.
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
    folders = [Path(folder) for folder in (base, adapter) if folder is not None]
    target = None if out is None else Path(out)
    case = Case(
        name="",
        base=str(base),
        adapter=None if adapter is None else str(adapter),
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    if adapter is not None:
        recognition.swapped(*folders)
    recognition.base_folder(folders[0])
    if target is not None:
        refuse_among_weights(target, folders[0], Path(merged), *folders[1:])
    with output(target, replace=replace):  # refused before any work
        started = time.monotonic()
        found = check(case, Path(merged))
        comparison = with_provenance(as_comparison(found, case, str(merged)), time.monotonic() - started)
        return write_reports(comparison, target)


def as_comparison(found: MergedFolder, case: Case, label: str) -> Comparison:
    """Return what was found as a comparison of the folder with base + adapter."""
    wrong = _wrong(found) if case.adapter is not None else _differences(found)
    findings = in_order(
        [*_problems(found.problems), *_remarks(found.remarks), *wrong, *_missing(found), *_notes(found)]
    )
    skipped = any(state.status == "skipped" for state in found.tensors)
    is_wrong = any(finding.severity == "error" for finding in findings)
    names = (_REFERENCE, label)
    return Comparison(
        case=label,
        base=case.base,
        adapter=case.adapter,
        dtype=found.dtype,
        level="every element",
        load_paths=(MERGED_FOLDER,),
        verdict=verdict_of(findings, incomplete=skipped and not is_wrong),
        reference=_REFERENCE,
        workers=tuple(
            WorkerSummary(name=name, load_path=MERGED_FOLDER, architecture="weights", model="", status="ok")
            for name in names
        ),
        architectures=(ArchitectureGroup(name="weights", workers=names),),
        tensors=tuple(_row(state, label) for state in found.tensors),
        findings=findings,
    )


def _row(state: TensorState, label: str) -> TensorComparison:
    layer, tensor = split_name(state.name)
    evidence: dict[str, Any] = {ROLE: state.role}
    if state.causes:
        evidence[CAUSES] = {str(cause): text for cause, text in state.causes.items()}
    if state.is_delta_zero:
        evidence[ZERO_DELTA] = True
    if state.keys:
        evidence["names_in_folder"] = list(state.keys)
    row = Outcome(
        workers=(label,), reference=_REFERENCE, status=state.status, evidence=evidence, reason=state.reason or None
    )
    if state.status in ("equal", "within", "outside"):
        row = msgspec.structs.replace(row, elements=state.elements, mismatched=state.outside)
    if state.worst is not None:
        index, actual, low, high = state.worst
        evidence |= {"actual": Real(actual), "lowest": Real(low), "highest": Real(high)}
        row = msgspec.structs.replace(row, worst_index=index, max_abs=Real(max(low - actual, actual - high)))
    return TensorComparison(
        stage=MERGED_FOLDER,
        load_path=MERGED_FOLDER,
        layer=layer,
        tensor=tensor,
        shape=state.shape,
        dtype=state.dtype,
        rule="rounding" if state.role == "adapted" else "bitwise",
        classes=((_REFERENCE, label),) if state.status == "equal" else ((_REFERENCE,), (label,)),
        outcomes=(Outcome(workers=(_REFERENCE,), reference=_REFERENCE, status="equal"), row),
    )


def _names(states: Iterable[TensorState]) -> tuple[str, ...]:
    return tuple(tensor_name(MERGED_FOLDER, *split_name(state.name)) for state in states)


def _problems(problems: Sequence[Problem]) -> Iterator[Finding]:
    """Yield a finding per kind of problem."""
    for cause in dict.fromkeys(problem.cause for problem in problems):
        of = [problem for problem in problems if problem.cause is cause]
        texts = [*(one.text for one in of[:_MOST]), and_more(len(of) - _MOST)]
        severity = min((problem.severity for problem in of), key=get_args(Severity).index)
        yield Finding(
            kind=cause,
            severity=severity,
            message=cause.sentence("; ".join(filter(None, texts))),
            tensors=tuple(name for one in of for name in one.tensors),
            next=None if severity == "note" else cause.todo,
        )


def _remarks(remarks: Sequence[AdapterRemark]) -> Iterator[Finding]:
    """Yield a finding per flaw of the adapter itself."""
    for remark in remarks:
        yield Finding(
            kind=remark.flaw, severity=remark.severity, message=f"the adapter: {remark.text}", next=remark.next
        )


def _wrong(found: MergedFolder) -> Iterator[Finding]:
    """Yield one finding where one explanation holds for all wrong tensors, else one per explanation."""
    said = {(problem.cause, name) for problem in found.problems for name in problem.tensors}
    wrong = [
        state
        for state in found.tensors
        if state.status == "outside" and not any((cause, state.name) in said for cause in state.causes)
    ]
    common = set.intersection(*(set(state.causes) for state in wrong)) if wrong else set()
    groups: dict[tuple[MergeCause, ...], list[TensorState]] = {}
    for state in wrong:
        causes = tuple(cause for cause in state.causes if not common or cause in common)
        plain = MergeCause.CHANGED if state.role == "untouched" else MergeCause.OFF
        groups.setdefault(causes or (plain,), []).append(state)
    for causes, states in groups.items():
        yield _explained(causes, states, found)


def _explained(causes: tuple[MergeCause, ...], states: list[TensorState], found: MergedFolder) -> Finding:
    """Return what explains some tensors: said once where it is the same of all, else in a line for each."""
    texts = {one.name: " or ".join(filter(None, (one.causes.get(cause, "") for cause in causes))) for one in states}
    shared = len(set(texts.values())) == 1
    roles = {state.role for state in states}
    role = f"{next(iter(roles))} " if len(roles) == 1 else ""
    what = f"{len(states)} of {counted(sum(one.role in roles for one in found.tensors), f'{role}tensor')}"
    shown = [] if states[0].causes and (shared or not any(texts.values())) else states
    layer = split_name(states[0].name)[0]
    if len(states) == 1 and not shown and layer not in texts[states[0].name]:
        what = f"{what} ({states[0].name})"
    said: list[str] = []
    for cause in causes:
        text = cause.sentence("they" if said else what)
        text = text.replace(" hold ", " holds ", 1).replace(" are ", " is ", 1) if len(states) == 1 else text
        own = states[0].causes.get(cause, "") if shared else ""
        said.append(f"{text}: {own}" if own else text)
    message, first = "; or ".join(said), causes[0]
    return Finding(
        kind=first,
        severity="error",
        message=message,
        tensors=_names(states),
        detail=tuple(_detail(state, texts[state.name]) for state in shown[:_MOST_DETAIL]),
        next=first.todo,
    )


def _differences(found: MergedFolder) -> Iterator[Finding]:
    """Yield what differs from the base, by rank."""
    states = [state for state in found.tensors if state.difference is not None]
    yield Finding(
        kind=DIFFERENCE,
        severity="note",
        message=f"{len(states)} of {counted(len(found.tensors), 'tensor')} differ from the base",
        tensors=_names(states),
    )
    ranks: dict[int | None, list[TensorState]] = {}
    for state in states:
        assert state.difference is not None
        ranks.setdefault(state.difference.rank, []).append(state)
    for rank, of in sorted(ranks.items(), key=lambda item: -len(item[1])):
        layers = [split_name(state.name)[0] for state in of]
        shares = [one.difference.share for one in of if one.difference is not None]
        size = f"{min(shares):.2%} to {max(shares):.2%} of the base's norm"
        what = "full rank" if rank is None else f"rank {rank}, as a LoRA of that rank leaves"
        yield Finding(
            kind=DIFFERENCE,
            severity="note",
            tensors=_names(of),
            message=f"{counted(len(of), 'tensor')} by {what}: {layers_text(layers)}; {size}",
        )


def _detail(state: TensorState, text: str) -> str:
    """Return a line about one tensor: what explains it, or its worst element."""
    if text:
        return f"{state.name}   {text}"
    if state.worst is None or state.causes:
        return f"{state.name}{f'   {state.reason}' if state.reason else ''}"
    index, actual, low, high = state.worst
    wanted = f"{low:.9g}" if low == high else f"{low:.9g} to {high:.9g}"
    place = ", ".join(map(str, index))
    return f"{state.name}   {state.outside} of {state.elements} elements; [{place}] is {actual:.9g}, not {wanted}"


def _missing(found: MergedFolder) -> Iterator[Finding]:
    """Yield what one side lacks, and what could not be judged."""
    severities: dict[str, tuple[Severity, str]] = {
        "missing": ("error", "the folder lacks {} of the base"),
        "unexpected": ("warning", "the folder has {} that neither base nor adapter has"),
    }
    for status, (severity, text) in severities.items():
        states = [state for state in found.tensors if state.status == status]
        if states:
            what = text.format(counted(len(states), "tensor"))
            names = some([state.name for state in states], _MOST)
            yield Finding(
                kind=MergeCause.FILES,
                severity=severity,
                message=f"{what}: {names}",
                tensors=_names(states),
                next=MergeCause.FILES.todo,
            )
    reasons: dict[str, list[TensorState]] = {}
    for state in found.tensors:
        if state.status == "skipped":
            reasons.setdefault(state.reason, []).append(state)
    for reason, states in reasons.items():
        message = f"{counted(len(states), 'tensor')} not judged: {reason}"
        yield Finding(kind=kinds.SKIPPED, severity="note", message=message, tensors=_names(states))


def _notes(found: MergedFolder) -> Iterator[Finding]:
    """Yield how names were matched, how the writer rounded, and what that took of the adapter's effect."""
    if found.mapping:
        yield Finding(kind=NAMES, severity="note", message=f"names matched {'; '.join(found.mapping)}")
    if found.orders:
        used = ", ".join(
            f"{order.text} ({number} {'matrix' if number == 1 else 'matrices'})"
            for order, number in found.orders.items()
        )
        yield Finding(kind=ROUNDED, severity="note", message=f"how it was rounded: {used}")
    lost, least, in_float32 = (found.effect.share(name) for name in ("lost", "least", "in_float32"))
    if lost >= _SAID:
        took = f"took {_percent(lost)} of" if lost < 1 else "is larger than"
        parts = [f"rounding to {found.dtype} {took} the adapter's effect here"]
        parts += [f"rounded once it would be {_percent(least)}"] if least < 0.95 * lost else []
        parts += [f"merged and saved in float32 {_percent(in_float32)}"] if in_float32 < 0.95 * lost else []
        yield Finding(kind=MergeCause.LOSS, severity="note", message="; ".join(parts), next=MergeCause.LOSS.todo)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 else f"{share:.1%}" if share >= 0.0005 else f"{share:.1e}"


def statement(comparison: Comparison) -> Statement:
    """Return what a folder of merged weights is, and the verdict in one sentence."""
    rows = [tensor.outcomes[-1] for tensor in comparison.tensors]
    adapted = [row for row in rows if row.evidence.get(ROLE) in ("adapted", "saved")]
    right = sum(row.status in ("equal", "within") for row in adapted)
    unchanged = sum(row.status in ("equal", "within") and ZERO_DELTA in row.evidence for row in adapted)
    wrong = [set(row.evidence.get(CAUSES, ())) for row in adapted if row.status == "outside"]
    alone = sum(bool(causes) and causes <= _BASE_ALONE for causes in wrong)
    merged = right - unchanged
    parts = [f"{merged} of {counted(len(adapted), 'adapted tensor')} hold{'s' if merged == 1 else ''} base + adapter"]
    if unchanged:
        parts.append(f"{unchanged} hold{'s' if unchanged == 1 else ''} the base, to which the adapter adds nothing")
    if broken := sum(causes == {MergeCause.ADAPTER_NOT_FINITE} for causes in wrong):
        parts.append(f"{broken} cannot be judged, since the adapter is not finite there")
    parts += [f"{alone} hold{'s' if alone == 1 else ''} the base alone"] if alone else []
    missing = sum(row.status == "missing" for row in adapted)
    parts += [f"{missing} {'is' if missing == 1 else 'are'} missing"] if missing else []
    if overflowed := sum(causes == {MergeCause.OVERFLOW} for causes in wrong):
        parts.append(f"{overflowed} hold{'s' if overflowed == 1 else ''} NaN or infinity")
    others = len(adapted) - right - alone - missing - broken - overflowed
    others -= sum(row.status == "skipped" for row in adapted)
    parts += [f"{others} {'is' if others == 1 else 'are'} something else"] if others else []
    left = [row for row in rows if row.evidence.get(ROLE) == "untouched"]
    changed = sum(row.status in BAD for row in left)
    if changed:
        parts.append(f"{changed} of {counted(len(left), 'other')} {'is' if changed == 1 else 'are'} not the base's")
    elif left:
        parts.append("the other is the base's" if len(left) == 1 else f"the {len(left)} others are the base's")
    if skipped := sum(row.status == "skipped" for row in rows):
        parts.append(f"{counted(skipped, 'tensor')} could not be judged")
    if comparison.adapter is None:
        text = f"{changed} of {counted(len(left), 'tensor')} differ from the base"
        return Statement(heading="COMPARED", sentence=text)
    if comparison.verdict != "inconsistent":
        what = "MERGED" if comparison.verdict == "consistent" else "NOT ALL JUDGED"
        if unchanged and unchanged == len(adapted):
            what = "NOTHING TO MERGE"
    elif broken and right + broken == len(adapted) and not changed:
        what = "BROKEN ADAPTER"
    elif skipped and right + sum(row.status == "skipped" for row in adapted) == len(adapted) and not changed:
        what = "NOT ALL JUDGED"
    elif not adapted or alone == len(adapted):
        what = "NOT MERGED"
    elif right + alone + missing == len(adapted):
        what = "NOT MERGED WHOLE" if alone or missing else "MERGED, AND WRONG BESIDE"
    else:
        what = "WRONGLY MERGED"
    return Statement(heading=what, sentence="; ".join(parts))
