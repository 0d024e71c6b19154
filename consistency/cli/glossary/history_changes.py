"""What `consistency history --changes` lists; the kinds of changes are `ChangeKind`'s."""

from __future__ import annotations

from collections.abc import Mapping

from consistency.cli.glossary.entry import Explanation, Family, GlossaryEntry
from consistency.cli.glossary.entry import entries as entries_of
from consistency.comparison.history.changes import ChangeKind

FAMILY = Family(name="change in a history", title="changes in a history (consistency history --changes)")

EXPLANATIONS: Mapping[ChangeKind, Explanation] = {
    ChangeKind.DRIFT: Explanation(
        summary="a device drifted in a stage",
        meaning="Its bits differ from its latest run without a drift, inputs and software being equal.",
        cause="See the kind of finding `drift`.",
        action="Look at the run since when, and at what was done to the host before it.",
        example="since 2026-11-21 02:00:00 UTC   drift in merged   gpu-07:cuda:3",
    ),
    ChangeKind.SOFTWARE: Explanation(
        summary="a device has other software or settings than in its run before",
        meaning="Its versions, driver or settings changed: bits are not compared across it.",
        cause="An update.",
        action="Nothing, if it was meant.",
        example="2026-11-20 02:00:00 UTC   other software or settings: torch 2.12.1 -> 2.13.0   gpu-[01-32]:cuda:[0-7]",
    ),
    ChangeKind.INPUTS: Explanation(
        summary="a device had other inputs than in its run before",
        meaning="Base, adapter or inputs of the case changed: bits are not compared across it.",
        cause="Another adapter or base under the same name, another level.",
        action="Nothing, if it was meant; else give the case the files that it had.",
        example="2026-11-20 02:00:00 UTC   other inputs   cpu, cuda:0",
    ),
    ChangeKind.LOST: Explanation(
        summary="the worker of a device was lost or failed",
        meaning="The device was there, and its worker did not end well in these runs.",
        cause="See the kinds `lost-worker` and `failed-worker`.",
        action="Look at the report of the first of these runs.",
        example="since 2026-11-21 02:00:00 UTC   worker lost   gpu-07:cuda:3",
    ),
    ChangeKind.INCONSISTENT: Explanation(
        summary="a device has an error other than a drift",
        meaning="An error finding names its worker in these runs.",
        cause="See the findings of the run.",
        action="`consistency show` the report of the first of these runs.",
        example="since 2026-11-21 02:00:00 UTC   inconsistent   gpu-07:cuda:3",
    ),
    ChangeKind.GONE: Explanation(
        summary="a device is missing from a run of its case",
        meaning="A run that shares at least half of its devices with an earlier one does not have this one.",
        cause="A card that is gone, a node that was not part of the run, another --devices.",
        action="See the kind of finding `gone-device`.",
        example="since 2026-11-21 02:00:00 UTC   missing   gpu-07:cuda:3",
    ),
    ChangeKind.NEW: Explanation(
        summary="a device is in a run of its case for the first time",
        meaning="No earlier run of this history has it.",
        cause="New or swapped hardware.",
        action="Nothing, if it was meant.",
        example="2026-11-22 02:00:00 UTC   new   gpu-33:cuda:[0-7]",
    ),
}


def entries() -> tuple[GlossaryEntry, ...]:
    """Return an entry per kind of change."""
    return entries_of(FAMILY, EXPLANATIONS.items())
