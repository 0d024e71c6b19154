"""What a user of a quantized base has to know besides whether devices agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from consistency.capture.names import AFTER_A_PASS
from consistency.capture.records import TensorRecord
from consistency.capture.wording import counted, some
from consistency.case.stages import Stage
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import Finding
from consistency.comparison.workers import ComparedWorker


def find_quantized(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    """Report the error of requantizing, and weights that a pass leaves in another form."""
    yield from _requantized(compared)
    yield from _repacked(compared)


def _requantized(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Compare the error of requantizing with half a step and with what the adapter adds."""
    merged = _having(compared, Stage.MERGED, lambda one: "error_in_steps_max" in one.evidence)
    if not merged:
        return
    records = [one for found in {id(found): found for found in merged.values()}.values() for one in found]
    steps = max(float(record.evidence["error_in_steps_max"]) for record in records)
    rms = max(float(record.evidence["error_in_steps_rms"]) for record in records)
    shares = [share for record in records if (share := _share(record)) is not None]
    beside = ""
    if shares:
        beside = f"; that is {min(shares):.2g} to {max(shares):.2g} times the RMS of what the adapter adds"
    weights = counted(max(len({record.layer for record in found}) for found in merged.values()), "weight")
    opening = f"merged · {some(list(merged))} · merging quantizes {weights} again"
    yield Finding(
        kind=FindingKind.REQUANTIZED,
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
    of_tables: dict[int, list[TensorRecord]] = {}
    found = {}
    for p in compared:
        table = p.records.stage(stage)
        if id(table) not in of_tables:
            of_tables[id(table)] = [one for one in table.values() if wanted(one)]
        if of_tables[id(table)]:
            found[p.label] = of_tables[id(table)]
    return found


def _share(record: TensorRecord) -> float | None:
    """Return error over delta, None where the adapter adds nothing."""
    error, delta = float(record.evidence["error_rms"]), float(record.evidence["delta_rms"])
    return error / delta if delta else None


def _repacked(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    found = _having(compared, Stage.BASE, lambda one: one.tensor == AFTER_A_PASS and one.status != "equal")
    if not found:
        return
    first = next(iter(found.values()))[0]
    opening = f"base · {some(list(found))} · a forward pass rewrites quantized weights"
    yield Finding(
        kind=FindingKind.REPACKED_WEIGHTS,
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
