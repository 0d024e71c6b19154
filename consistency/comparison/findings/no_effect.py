"""An adapter that changes nothing: a warning, because what was tuned then equals the base.

Where the model ran with the adapter on and off, the outputs decide; else what is certain of its file and its deltas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from consistency.capture.names import ADAPTER_OFF, ADAPTER_ON, DELTA, END_TO_END, RANK_AND_SCALING, SETTINGS_LAYER
from consistency.capture.records import TensorRecord
from consistency.capture.wording import counted, some
from consistency.case.stages import Stage
from consistency.comparison.kinds import FindingKind
from consistency.comparison.records import Key
from consistency.comparison.result import Finding
from consistency.comparison.workers import ComparedWorker


def find_no_effect(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    """Report an adapter that changes nothing on any worker of its capture, with the cause where it is known."""
    by_capture: dict[int, list[ComparedWorker]] = {}
    for p in compared:
        if p.case.adapter is not None and p.info.status == "ok":
            by_capture.setdefault(id(p.capture), []).append(p)
    known: dict[int, tuple[bool, int] | None] = {}
    for workers in by_capture.values():
        outputs = []
        for p in workers:
            table = p.records.stage(Stage.FORWARD)
            if id(table) not in known:  # workers that saw the same share it
                known[id(table)] = _outputs(table)
            if not p.case.only and (equal := known[id(table)]) is not None:
                outputs.append(equal)
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
            kind=FindingKind.NO_EFFECT,
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


def _outputs(table: Mapping[Key, TensorRecord]) -> tuple[bool, int] | None:
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
    settings = p.records.get((Stage.ADAPTER, SETTINGS_LAYER, RANK_AND_SCALING))
    if settings is None or settings.status == "outside":  # an error of its own: the adapter is not active
        return ""
    match settings.effect:
        case "no-layer":
            return "no layer of the base is adapted"
        case "zero-scaling" | "zero-weights":
            return f"{settings.evidence.get('zero')} {'is' if settings.effect == 'zero-scaling' else 'are'} zero"
        case "layers":
            deltas = [r for (_, _, tensor), r in p.records.stage(Stage.MERGED).items() if tensor == DELTA]
            if deltas and not p.case.only and all(record.effect == "zero-delta" for record in deltas):
                return f"{len(deltas)} of {len(deltas)} deltas are zero"
    return ""


def _adding(p: ComparedWorker) -> Iterator[str]:
    """Yield the layers that a merge adds something to."""
    for (_, layer, tensor), record in p.records.stage(Stage.MERGED).items():
        if tensor == DELTA and record.measure is not None and not record.effect:
            yield layer


def _acts_on_all_tokens(p: ComparedWorker) -> bool:
    """Return whether equal outputs show something: the inputs may lack the tokens that an adapter is for."""
    settings = p.records.get((Stage.ADAPTER, SETTINGS_LAYER, RANK_AND_SCALING))
    return settings is not None and settings.status != "outside" and settings.effect != "some-tokens"
