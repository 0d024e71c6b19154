"""Record where a worker decided otherwise than the track, one fact per module and operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from consistency.capture.names import DECISIONS
from consistency.capture.wording import counted
from consistency.numerics.rules import ratio
from consistency.numerics.words import Word
from consistency.worker.decisions.track import Flip
from consistency.worker.stages.context import Context

NOT_REPLAYED = "this worker decided otherwise, and its pass cannot be computed again with the reference's decisions"


def record_flips(
    context: Context, stage: str, flips: Sequence[Flip], *, mode: str = "", more: Mapping[str, object] | None = None
) -> None:
    """Record decisions that differ, with `more` as evidence: within, where rounding explains it; else outside."""
    by_place: dict[tuple[str, str], list[Flip]] = {}
    for flip in flips:
        by_place.setdefault((flip.place, flip.name), []).append(flip)
    for (place, name), same in by_place.items():
        if not context.record.wants(stage, place):
            continue
        worst = max(same, key=lambda flip: ratio(flip.margin, flip.allowed))
        number = counted(sum(flip.elements for flip in same), "decision")
        margin = f"margin {worst.margin:.3g}, where rounding explains {worst.allowed:.3g} at most"
        text = f"{number} of {name} in {place} {{}}: {margin}"
        context.record.fact(
            stage=stage,
            layer=place,
            tensor=f"{name}.{DECISIONS}" + (f".{mode}" if mode else ""),
            status="within" if worst.is_undecided else "outside",
            word=None if worst.is_undecided else Word.DECISION_FLIPPED,
            share=ratio(worst.margin, worst.allowed),
            reason=text.format("undecided" if worst.is_undecided else "flipped"),
            evidence={
                "flipped": sum(f.elements for f in same),
                "margin": worst.margin,
                "allowed": worst.allowed,
                **(more or {}),
            },
        )
