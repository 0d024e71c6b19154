"""What a user of a quantized base has to know besides whether devices agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from consistency.capture.names import AFTER_A_PASS
from consistency.capture.records import TensorRecord
from consistency.capture.wording import counted, some
from consistency.case.stages import Stage
from consistency.comparison.records import Records, tables_of
from consistency.comparison.result import Finding
from consistency.comparison.workers import ComparedWorker

REQUANTIZED = "requantized"
"""Kind of the note on what merging into quantized weights costs."""

REPACKED = "repacked-weights"
"""Kind of the warning that a forward pass leaves weights that are then read wrongly."""


def find_quantized(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    """Report the error of requantizing, and weights that a pass leaves in another form."""
    yield from _requantized(compared)
    yield from _repacked(compared)


def _requantized(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Compare the error of requantizing with half a step and with what the adapter adds."""
    of_tables: dict[int, list[TensorRecord]] = {}  # workers that saw the same share a table
    merged = {}
    for p in compared:
        table = p.records.stage(Stage.MERGED)
        if id(table) not in of_tables:
            of_tables[id(table)] = [one for one in table.values() if "error_in_steps_max" in one.evidence]
        if of_tables[id(table)]:
            merged[p.label] = of_tables[id(table)]
    if not merged:
        return
    records = [record for found in of_tables.values() for record in found]
    steps = max(float(record.evidence["error_in_steps_max"]) for record in records)
    rms = max(float(record.evidence["error_in_steps_rms"]) for record in records)
    shares = [share for record in records if (share := _share(record)) is not None]
    beside = ""
    if shares:
        beside = f"; that is {min(shares):.2g} to {max(shares):.2g} times the RMS of what the adapter adds"
    weights = counted(max(len({record.layer for record in found}) for found in of_tables.values()), "weight")
    opening = f"merged · {some(list(merged))} · merging quantizes {weights} again"
    yield Finding(
        kind=REQUANTIZED,
        severity="note",
        message=f"{opening}: error at most {steps:.2f} steps, RMS {rms:.2f} steps{beside}",
        general=opening,
        workers=tuple(merged),
        detail=(
            "a step is the distance of two neighbouring levels; rounding to the nearest makes up to half of one",
            "to keep all of the adapter, leave it unmerged, or merge it into the base that was not quantized",
        ),
    )


def _share(record: TensorRecord) -> float | None:
    """Return error over delta, None where the adapter adds nothing."""
    error, delta = float(record.evidence["error_rms"]), float(record.evidence["delta_rms"])
    return error / delta if delta else None


def _repacked(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    tables = tables_of(Records({Stage.BASE: p.records.stage(Stage.BASE)}) for p in compared)
    rewritten = {
        id(table): [one for one in table.values() if one.tensor == AFTER_A_PASS and one.status != "equal"]
        for table in tables
    }
    found = {p.label: record for p in compared for record in rewritten[id(p.records.stage(Stage.BASE))]}
    if not found:
        return
    first = next(iter(found.values()))
    opening = f"base · {some(list(found))} · a forward pass rewrites quantized weights"
    yield Finding(
        kind=REPACKED,
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
