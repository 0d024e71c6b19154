"""Results that change between repeats on one device, in a soak or a repeat run, and what may excuse them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

from consistency.capture.names import SUM_OVER_RANKS
from consistency.capture.soak import MOST_NUMBERS, ChangedTensor, Condition, Occurrences, Soak, SoakedStage
from consistency.capture.wording import and_more, counted, listed, size, some
from consistency.case import standard
from consistency.case.duration import duration_text
from consistency.case.stages import COMPUTES_WITH_WEIGHTS, MOVES_WEIGHTS
from consistency.comparison import kinds
from consistency.comparison.findings.details import describe_change
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.findings.next_command import run_again
from consistency.comparison.outcomes import group_by_key
from consistency.comparison.records import Key
from consistency.comparison.result import BAD, Finding, Severity, TensorComparison, tensor_name
from consistency.comparison.workers import ComparedWorker
from consistency.numerics import words

AS_DEPLOYED = "; with --profile deployed equal bits are not promised"
"""End of a finding about different bits where the profile of a worker promises no equal ones."""

_MOST_DETAILS = 3

_READINGS = {
    "temperature_c": "{} °C",
    "power_w": "{} W",
    "sm_clock_mhz": "{} MHz",
    "memory_clock_mhz": "memory {} MHz",
    "slowest_clock_mhz": "from {}",
    "fastest_clock_mhz": "to {} MHz",
    "throttle_reasons": "throttled: {}",
}
"""How readings are shown; counters are shown by their names."""


def find_soak(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report the results that changed, and the memory that grew, during the soak of each worker."""
    for worker in evidence.workers:
        soak = worker.info.soak
        if soak is None:
            continue
        changed_stages = [stage for stage in soak.stages if stage.changed is not None]
        for stage in changed_stages:
            yield _report_change(worker, soak, stage, changed_stages, next_step=_soak_again(evidence, worker, soak))
        yield from _growth(worker, soak)


def _report_change(
    worker: ComparedWorker,
    soak: Soak,
    stage: SoakedStage,
    changed_stages: Sequence[SoakedStage],
    *,
    next_step: str | None,
) -> Finding:
    """Report the tensors of one stage that changed between repeats."""
    assert stage.changed is not None
    # in the order of the model, so the first one is nearest to the cause
    changes = [change for change in soak.changes if change.stage == stage.stage]
    operations = [ran_before([worker], worker.load_path, change.key) for change in changes]
    is_unordered = bool(operations) and all(operations)
    is_deployed = not worker.case.is_pinned and stage.stage not in MOVES_WEIGHTS  # moved bytes are the same every time
    excuse = ""
    if is_unordered:
        excuse = without_version(dict.fromkeys(chain.from_iterable(operations)))
    if is_deployed:
        excuse += AS_DEPLOYED
    cause = next((changed for changed in changed_stages if _explains(changed, stage)), None)
    ending = _course(stage.changed, soak.begun, changes)
    if cause is not None:
        ending += f": caused by the changed bytes of {cause.stage}"
    severity: Severity = "note" if is_unordered or is_deployed else "error"
    repeats = f"{stage.changed.count} of {counted(soak.begun, 'repeat')}"
    opening = f"{stage.stage} · {worker.label} · "
    return Finding(
        kind=kinds.NOT_REPEATABLE,
        severity=severity,
        message=f"{opening}{_describe_changes(stage, changes)} in {repeats}{ending}{excuse}",
        general=f"{opening}tensors changed in some repeats of the soak{excuse}",
        workers=(worker.label,),
        tensors=tuple(tensor_name(*change.key) for change in changes),
        detail=tuple(_detail(stage.changed, changes, soak)),
        next=next_step,
    )


def _soak_again(evidence: ComparisonEvidence, worker: ComparedWorker, soak: Soak) -> str | None:
    """Return a command that soaks one device again."""
    command = run_again(evidence, [worker.label])
    if command is None:
        return None
    load = " --load" if soak.load is not None else ""
    return f"{command} --for {duration_text(soak.asked_s)}{load}"


def _describe_changes(stage: SoakedStage, changes: Sequence[ChangedTensor]) -> str:
    """Name the tensors that changed, and their difference where it has a name."""
    # a soak keeps only some of the changed tensors
    count = max(stage.changed_tensors, len(changes))
    if not changes:
        return f"{counted(count, 'tensor')} changed"
    first = changes[0]
    names = f"{first.tensor} of {first.layer}" if count == 1 else counted(count, "tensor")
    if first.word is None or first.word == words.DIFFERS:
        return f"{names} changed"
    return words.about(first.word, names) if first.word else ""


def _course(changed: Occurrences, repeats: int, changes: Sequence[ChangedTensor]) -> str:
    """State whether the change is permanent, and whether the wrong bits are the same each time."""
    # every repeat has the same bits, and the first run has others
    if changed.count == repeats and all(change.values == 1 and not change.returned for change in changes):
        return ": all repeats agree with each other, but not with the first run"
    if not any(change.returned for change in changes):
        first = changed.numbers[0] if changed.numbers else 0
        return f", from repeat {first} on"
    if changed.count == 1:
        return ", right again afterwards"
    if all(change.values == 1 for change in changes):
        return ", the same wrong bits each time, and right in between"
    return ", different wrong bits each time, and right in between"


def _explains(cause: SoakedStage, stage: SoakedStage) -> bool:
    """Return whether changed weights explain the results computed with them: they changed no later, and as often."""
    if cause.stage not in MOVES_WEIGHTS or stage.stage not in COMPUTES_WITH_WEIGHTS:
        return False
    weights, results = cause.changed, stage.changed
    if weights is None or results is None or not weights.numbers or not results.numbers:
        return False
    return weights.count >= results.count and weights.numbers[0] <= results.numbers[0]


def _detail(changed: Occurrences, changes: Sequence[ChangedTensor], soak: Soak) -> Iterator[str]:
    """Yield when a stage changed, its first tensors, and the readings of the device at the first change."""
    numbers = ", ".join(map(str, changed.numbers))
    # only the first numbers are kept
    not_kept = and_more(changed.count - MOST_NUMBERS)
    if not_kept:
        numbers += f", {not_kept}"
    if changed.count > 1:
        yield f"in repeats {numbers}: {changed.first_at} to {changed.last_at}"
    else:
        yield f"in repeat {numbers}: {changed.first_at}"
    yield from (describe_change(change) for change in changes[:_MOST_DETAILS])
    condition = changes[0].condition if changes else None
    if condition is not None and condition.readings:
        yield f"in repeat {condition.repeat}: {readings_text(condition)}"
    elif soak.unread is not None:
        yield f"no readings of the device: {soak.unread}"


def readings_text(condition: Condition) -> str:
    """Write the readings that a device gave of itself in one line; counters without a count are left out."""
    readings = []
    for name, value in condition.readings.items():
        value_text = ", ".join(map(str, value)) if isinstance(value, list) else value
        is_counter = name not in _READINGS and not name.endswith(("_w", "_percent"))
        if name in _READINGS and value_text != "":
            readings.append(_READINGS[name].format(value_text))
        elif is_counter and value:
            readings.append(f"{name}: {value_text}")
    return ", ".join(readings)


def _growth(worker: ComparedWorker, soak: Soak) -> Iterator[Finding]:
    """Report memory that grew in every quarter of the time, and by more than is allowed altogether."""
    measured = soak.memory_bytes
    steps = list(pairwise(measured))
    grown = measured[-1] - measured[0] if measured else 0
    grew_in_every_step = all(after > before for before, after in steps)
    if len(steps) < 2 or grown <= soak.memory_allowed_bytes or not grew_in_every_step:
        return
    yield Finding(
        kind=kinds.MEMORY_GROWTH,
        severity="warning",
        message=(
            f"soak · {worker.label} · memory grew by {size(grown)} over {counted(soak.repeats, 'repeat')}: "
            f"{listed([size(value) for value in measured])}; {size(soak.memory_allowed_bytes)} are allowed"
        ),
        general=f"soak · {worker.label} · memory grew over the repeats",
        workers=(worker.label,),
    )


def without_version(operations: Iterable[str]) -> str:
    """Return the clause that excuses a bitwise difference by these operations."""
    names = list(operations)
    reasons = []
    if SUM_OVER_RANKS in names:
        names.remove(SUM_OVER_RANKS)
        reasons.append("ranks may be added up in another order on another host")
    if names:
        reasons.append(f"torch has no deterministic version of {listed(names)}, which ran before")
    return f": {', and '.join(reasons)}"


def ran_before(workers: Sequence[ComparedWorker], load_path: str, key: Key) -> tuple[str, ...]:
    """Return the operations without a deterministic version that ran before a device recorded a tensor.

    Parameters
    ----------
    workers : sequence of ComparedWorker
        The workers of the device; the reference worker stands on load paths that it did not take, as its first one.
    """
    on_load_path = (worker.on(load_path) for worker in workers)
    recording_worker = next((worker for worker in on_load_path if worker is not None), workers[0])
    record = recording_worker.records.get(key)
    return () if record is None else record.nondeterministic


def find_not_repeatable(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report results that changed between runs; only pinned settings promise that they do not."""
    as_deployed = {worker.label for worker in evidence.workers if not worker.case.is_pinned}
    workers_by_tensors: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for (label, stage, operations), names in _changed_on_repeat(evidence).items():
        excuse = without_version(operations) if operations else ""
        if label in as_deployed and stage not in MOVES_WEIGHTS:  # bytes that were moved are the same every time
            excuse += AS_DEPLOYED
        workers_by_tensors.setdefault((stage, tuple(names), excuse), []).append(label)
    for (stage, tensors, excuse), labels in workers_by_tensors.items():
        severity: Severity = "note" if excuse else "error"
        opening = f"{stage} · {some(labels)}"
        change = "changed bitwise on a repeat run on the same device"
        yield Finding(
            kind=kinds.NOT_REPEATABLE,
            severity=severity,
            message=f"{opening} · {counted(len(tensors), 'tensor')} {change}{excuse}",
            general=f"{opening} · tensors {change}",
            workers=tuple(labels),
            tensors=tuple(dict.fromkeys(tensors)),
        )


def _changed_on_repeat(evidence: ComparisonEvidence) -> dict[tuple[str, str, tuple[str, ...]], list[str]]:
    """Return the tensors that changed, by worker, stage, and operations without a fixed order that ran before."""
    reported_by_soaks: set[tuple[str, str]] = set()  # `find_soak` reports these
    for worker in evidence.workers:
        reported_by_soaks.update((worker.label, tensor_name(*key)) for key in worker.changes)
    workers = group_by_key((worker.label, worker) for worker in evidence.workers)
    changed: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for tensor in evidence.tensors:
        key = (tensor.stage, tensor.layer, tensor.tensor)
        for label in _workers_that_changed(tensor):
            if (label, tensor.name) not in reported_by_soaks:
                operations = ran_before(workers[label], tensor.load_path, key)
                changed.setdefault((label, tensor.stage, operations), []).append(tensor.name)
    return changed


def _workers_that_changed(tensor: TensorComparison) -> Iterator[str]:
    """Yield the workers on which a tensor changed between runs, where no other finding says so.

    An adapter that is wrong when loaded over poison differs from the first load: that is reported already, and does
    not show whether it is wrong again.
    """
    for row in tensor.outcomes:
        is_reported = tensor.stage == standard.ADAPTER and row.status in BAD
        if row.repeated is False and not is_reported:
            yield from row.workers


FINDERS = (
    Finder(name="repeats", phase=Phase.DEVICES, position=2, find=find_not_repeatable),
    Finder(name="soak", phase=Phase.AGREEMENT, position=1, find=find_soak),
)
