"""What a user has to know of the adapter and the base besides whether devices agree: no effect, quantized weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from consistency.capture.names import (
    ADAPTER_OFF,
    ADAPTER_ON,
    AFTER_A_PASS,
    DELTA,
    END_TO_END,
    RANK_AND_SCALING,
    SETTINGS_LAYER,
)
from consistency.capture.records import TensorRecord
from consistency.capture.wording import counted, some
from consistency.case import standard
from consistency.case.stage import Stage
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.outcomes import gathered
from consistency.comparison.records import StageTable
from consistency.comparison.result import Finding
from consistency.comparison.workers import ComparedWorker


def find_no_effect(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Report an adapter that changes nothing on any worker of its capture, with the cause where it is known."""
    with_adapter = (p for p in evidence.workers if p.case.adapter is not None and p.info.status == "ok")
    by_capture = gathered((id(p.capture), p) for p in with_adapter)
    outputs_of = functools.cache(_outputs)  # workers that saw the same share a table
    for workers in by_capture.values():
        tables = [p.records.stage(standard.FORWARD) for p in workers if not p.case.only]
        outputs = [equal for table in tables if (equal := outputs_of(table)) is not None]
        if any(not equal for equal, _ in outputs):
            continue
        cause = next((text for p in workers if (text := _cause(p))), "")
        alike = ""
        if outputs and any(_acts_on_all_tokens(p) for p in workers):
            number = max(number for _, number in outputs)
            alike = f"{counted(number, 'output')} with and without it {'is' if number == 1 else 'are'} bitwise equal"
        if not cause and not alike:
            continue
        labels = tuple(dict.fromkeys(p.label for p in workers))
        opening = f"adapter · {some(labels)} · the adapter changes nothing"
        unused = [] if cause else list(dict.fromkeys(layer for p in workers for layer in _adding(p)))
        why = f"the deltas are not zero, so the model leaves out {some(unused)}" if unused else ""
        texts = [text for text in (cause, alike, why) if text]
        yield Finding(
            kind=kinds.NO_EFFECT,
            severity="warning",
            message=f"{opening}: {'; '.join(texts)}",
            general=opening,
            workers=labels,
            cause=cause or why or None,
            detail=(f"adapter {workers[0].case.adapter}",),
            next="look in the model's code for what reads the weight of these layers itself, and have it call them"
            if unused
            else "check that this is the trained adapter, and that the model calls its layers",
        )


def _outputs(table: StageTable) -> tuple[bool, int] | None:
    """Return whether all outputs are bitwise equal with the adapter on and off, and how many there are.

    None where that shows nothing: it did not run in both modes, or in part, or its values are not finite.
    """
    pairs = [
        (record, off)
        for (stage, layer, tensor), record in table.items()
        if tensor == f"{ADAPTER_ON}.{END_TO_END}" and record.digest is not None
        if (off := table.get((stage, layer, f"{ADAPTER_OFF}.{END_TO_END}"))) is not None and off.digest is not None
    ]
    finite = all(on.measure is None or math.isfinite(float(on.measure.max_abs)) for on, _ in pairs)
    if not pairs or not finite:
        return None
    return all(on.digest == off.digest for on, off in pairs), len(pairs)


def _cause(p: ComparedWorker) -> str:
    """Return why the adapter can change nothing, where its file, its settings or its deltas show it."""
    settings = p.records.get((standard.ADAPTER, SETTINGS_LAYER, RANK_AND_SCALING))
    if settings is None or settings.status == "outside":  # an error of its own: the adapter is not active
        return ""
    match settings.effect:
        case "no-layer":
            return "no layer of the base is adapted"
        case "zero-scaling" | "zero-weights":
            return f"{settings.evidence.get('zero')} {'is' if settings.effect == 'zero-scaling' else 'are'} zero"
        case "layers":
            deltas = [r for (_, _, tensor), r in p.records.stage(standard.MERGED).items() if tensor == DELTA]
            if deltas and not p.case.only and all(record.effect == "zero-delta" for record in deltas):
                return f"{len(deltas)} of {len(deltas)} deltas are zero"
    return ""


def _adding(p: ComparedWorker) -> Iterator[str]:
    """Yield the layers that a merge adds something to."""
    for (_, layer, tensor), record in p.records.stage(standard.MERGED).items():
        if tensor == DELTA and record.measure is not None and not record.effect:
            yield layer


def _acts_on_all_tokens(p: ComparedWorker) -> bool:
    """Return whether equal outputs show something: the inputs may lack the tokens that an adapter is for."""
    settings = p.records.get((standard.ADAPTER, SETTINGS_LAYER, RANK_AND_SCALING))
    return settings is not None and settings.status != "outside" and settings.effect != "some-tokens"


def find_quantized(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Report the error of requantizing, and weights that a pass leaves in another form."""
    yield from _requantized(evidence.workers)
    yield from _repacked(evidence.workers)


def _requantized(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Compare the error of requantizing with half a step and with what the adapter adds."""
    merged = _having(compared, standard.MERGED, lambda one: "error_in_steps_max" in one.evidence)
    if not merged:
        return
    records = [record for found in merged.values() for record in found]
    steps = max(float(record.evidence["error_in_steps_max"]) for record in records)
    rms = max(float(record.evidence["error_in_steps_rms"]) for record in records)
    shares = [share for record in records if (share := _share(record)) is not None]
    beside = ""
    if shares:
        beside = f"; that is {min(shares):.2g} to {max(shares):.2g} times the RMS of what the adapter adds"
    weights = counted(max(len({record.layer for record in found}) for found in merged.values()), "weight")
    opening = f"merged · {some(list(merged))} · merging quantizes {weights} again"
    yield Finding(
        kind=kinds.REQUANTIZED,
        severity="note",
        message=f"{opening}: error at most {steps:.2f} steps, RMS {rms:.2f} steps{beside}",
        general=opening,
        workers=tuple(merged),
        detail=(
            "a step is the distance of two neighbouring levels; rounding to the nearest makes up to half of one",
            "to keep all of the adapter, leave it unmerged, or dequantize the base, merge into that, and keep 16 bits",
        ),
    )


def _having(
    compared: Sequence[ComparedWorker], stage: Stage, wanted: Callable[[TensorRecord], bool]
) -> dict[str, list[TensorRecord]]:
    """Return the wanted records of a stage by worker, without workers that have none.

    Workers that saw the same share a table, and so the records.
    """
    of_table = functools.cache(lambda table: [one for one in table.values() if wanted(one)])
    return {p.label: found for p in compared if (found := of_table(p.records.stage(stage)))}


def _share(record: TensorRecord) -> float | None:
    """Return error over delta, None where the adapter adds nothing."""
    error, delta = float(record.evidence["error_rms"]), float(record.evidence["delta_rms"])
    return error / delta if delta else None


def _repacked(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    found = _having(compared, standard.BASE, lambda one: one.tensor == AFTER_A_PASS and one.status != "equal")
    if not found:
        return
    first = next(iter(found.values()))[0]
    opening = f"base · {some(list(found))} · a forward pass rewrites quantized weights"
    yield Finding(
        kind=kinds.REPACKED_WEIGHTS,
        severity="warning",
        message=f"{opening}, and the library then dequantizes other values: {first.evidence.get('read')}",
        general=opening,
        workers=tuple(found),
        detail=(
            f"seen at {first.layer}: {first.evidence.get('how')}",
            "here every stage starts from the weights as they were loaded",
        ),
        next="merge, save and train before the first pass in eval mode, or load the model again for it",
    )


FINDERS = (
    Finder(name="adapter without effect", phase=Phase.MODEL, position=1, find=find_no_effect),
    Finder(name="quantized weights", phase=Phase.MODEL, position=3, find=find_quantized),
)
