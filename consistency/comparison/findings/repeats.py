"""Results that change between repeats on one device: what a soak found, and operations without a fixed order."""

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
from consistency.comparison.outcomes import gathered
from consistency.comparison.records import Key
from consistency.comparison.result import BAD, Finding, TensorComparison, tensor_name
from consistency.comparison.workers import ComparedWorker
from consistency.numerics import words

AS_DEPLOYED = "; the profile deployed promises no equal bits"
"""What a finding of different bits adds where the profile of a worker promises nothing else."""

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
"""How readings are shown; the others, which are counters, by their names."""


def find_soak(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Report what the soak of each worker found."""
    for worker in evidence.workers:
        soak = worker.info.soak
        if soak is None:
            continue
        changed = [stage for stage in soak.stages if stage.changed is not None]
        for stage in changed:
            yield _changed(worker, soak, stage, changed, next_step=_soak_again(evidence, worker, soak))
        yield from _growth(worker, soak)


def _changed(
    worker: ComparedWorker,
    soak: Soak,
    stage: SoakedStage,
    changed: Sequence[SoakedStage],
    *,
    next_step: str | None,
) -> Finding:
    assert stage.changed is not None
    changes = [change for change in soak.changes if change.stage == stage.stage]
    operations = [ran_before([worker], worker.load_path, change.key) for change in changes]
    unordered = bool(operations) and all(operations)
    deployed = not worker.case.is_pinned and stage.stage not in MOVES_WEIGHTS  # moved bytes are the same every time
    why = without_version(dict.fromkeys(chain.from_iterable(operations))) if unordered else ""
    why += AS_DEPLOYED if deployed else ""
    opening = f"{stage.stage} · {worker.label} · "
    what = _what(stage, changes)
    ending = _course(stage.changed, soak.begun, changes)
    cause = next((c for c in changed if _explains(c, stage)), None)
    ending += f": caused by the changed bytes of {cause.stage}" if cause is not None else ""
    ending += why
    # in the order of the model, so the first one is nearest to the cause
    return Finding(
        kind=kinds.NOT_REPEATABLE,
        severity="note" if unordered or deployed else "error",
        message=f"{opening}{what} in {stage.changed.count} of {counted(soak.begun, 'repeat')}{ending}",
        general=f"{opening}tensors changed in some repeats of the soak{why}",
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


def _what(stage: SoakedStage, changes: Sequence[ChangedTensor]) -> str:
    count = max(stage.changed_tensors, len(changes))
    first = changes[0] if changes else None
    names = f"{first.tensor} of {first.layer}" if first is not None and count == 1 else counted(count, "tensor")
    word = None if first is None else first.word
    return f"{names} changed" if word in (None, words.DIFFERS) else words.about(word, names) if word else ""


def _course(changed: Occurrences, repeats: int, changes: Sequence[ChangedTensor]) -> str:
    """State whether it is permanent, and whether the wrong bits are the same each time."""
    if changed.count == repeats and all(change.values == 1 and not change.returned for change in changes):
        return ": all repeats agree with each other, but not with the first run"
    if not any(change.returned for change in changes):
        first = changed.numbers[0] if changed.numbers else 0
        return f", from repeat {first} on"
    if changed.count == 1:
        return ", right again afterwards"
    same = all(change.values == 1 for change in changes)
    return f", {'the same' if same else 'different'} wrong bits each time, and right in between"


def _explains(cause: SoakedStage, stage: SoakedStage) -> bool:
    """Return whether changed weights explain what was computed with them: they changed no later, and as often."""
    if cause.stage not in MOVES_WEIGHTS or stage.stage not in COMPUTES_WITH_WEIGHTS:
        return False
    a, b = cause.changed, stage.changed
    if a is None or b is None or not a.numbers or not b.numbers:
        return False
    return a.count >= b.count and a.numbers[0] <= b.numbers[0]


def _detail(changed: Occurrences, changes: Sequence[ChangedTensor], soak: Soak) -> Iterable[str]:
    numbers = ", ".join(map(str, changed.numbers))
    rest = and_more(changed.count - MOST_NUMBERS)
    more = f", {rest}" if rest else ""
    span = "" if changed.count == 1 else f" to {changed.last_at}"
    yield f"in repeat{'s' if changed.count > 1 else ''} {numbers}{more}: {changed.first_at}{span}"
    yield from (describe_change(change) for change in changes[:_MOST_DETAILS])
    condition = changes[0].condition if changes else None
    if condition is not None and condition.readings:
        yield f"in repeat {condition.repeat}: {readings_text(condition)}"
    elif soak.unread is not None:
        yield f"no readings of the device: {soak.unread}"


def readings_text(condition: Condition) -> str:
    """Write what a device reported of itself in one line; counters without a count are left out."""
    texts = []
    for name, value in condition.readings.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        if name in _READINGS and shown != "":
            texts.append(_READINGS[name].format(shown))
        elif name not in _READINGS and not name.endswith(("_w", "_percent")) and value:
            texts.append(f"{name}: {shown}")
    return ", ".join(texts)


def _growth(worker: ComparedWorker, soak: Soak) -> Iterable[Finding]:
    """Report memory that grew in every quarter of the time, and by more than is allowed altogether."""
    told = soak.memory_bytes
    steps = list(pairwise(told))
    grown = told[-1] - told[0] if told else 0
    if len(steps) < 2 or grown <= soak.memory_allowed_bytes or not all(b > a for a, b in steps):
        return
    yield Finding(
        kind=kinds.MEMORY_GROWTH,
        severity="warning",
        message=(
            f"soak · {worker.label} · memory grew by {size(grown)} over {counted(soak.repeats, 'repeat')}: "
            f"{listed([size(value) for value in told])}; {size(soak.memory_allowed_bytes)} are allowed"
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
        reasons.append("the order in which ranks are added up is not promised from host to host")
    if names:
        reasons.append(f"torch has no deterministic version of {listed(names)}, which ran before")
    return f": {', and '.join(reasons)}"


def ran_before(itself: Sequence[ComparedWorker], load_path: str, key: Key) -> tuple[str, ...]:
    """Return the operations without a deterministic version that ran before a device recorded a tensor.

    Parameters
    ----------
    itself : sequence of ComparedWorker
        The workers of the device; the reference worker stands on load paths that it did not take, as its first one.
    """
    views = (view for worker in itself if (view := worker.on(load_path)) is not None)
    record = next(views, itself[0]).records.get(key)
    return () if record is None else record.nondeterministic


def find_not_repeatable(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report results that changed between runs; only pinned settings promise that they do not."""
    as_deployed = {worker.label for worker in evidence.workers if not worker.case.is_pinned}
    workers_by_tensors: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for (label, stage, operations), names in _changed_on_repeat(evidence).items():
        why = without_version(operations) if operations else ""
        if label in as_deployed and stage not in MOVES_WEIGHTS:  # bytes that were moved are the same every time
            why += AS_DEPLOYED
        workers_by_tensors.setdefault((stage, tuple(names), why), []).append(label)
    for (stage, names_of_all, why), labels in workers_by_tensors.items():
        opening = f"{stage} · {some(labels)}"
        what = f"{counted(len(names_of_all), 'tensor')} changed bitwise on a repeat run on the same device"
        yield Finding(
            kind=kinds.NOT_REPEATABLE,
            severity="note" if why else "error",
            message=f"{opening} · {what}{why}",
            general=f"{opening} · tensors changed bitwise on a repeat run on the same device",
            workers=tuple(labels),
            tensors=tuple(dict.fromkeys(names_of_all)),
        )


def _changed_on_repeat(evidence: ComparisonEvidence) -> dict[tuple[str, str, tuple[str, ...]], list[str]]:
    """Return the tensors that changed, by worker, stage, and operations without a fixed order that ran before."""
    of_soaks = {(worker.label, tensor_name(*key)) for worker in evidence.workers for key in worker.changes}
    workers = gathered((worker.label, worker) for worker in evidence.workers)
    changed: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for tensor in evidence.tensors:
        key = (tensor.stage, tensor.layer, tensor.tensor)
        for label in _workers_that_changed(tensor):
            if (label, tensor.name) not in of_soaks:  # `find_soak` reports these
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
