"""Texts that healthy devices write differently, and after how many tokens they may."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from consistency.capture.names import WHOLE_MODEL
from consistency.capture.wording import some
from consistency.case.stages import Stage
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import Finding, TensorComparison


def find_texts(tensors: Sequence[TensorComparison]) -> Iterator[Finding]:
    """Report each text that parts from the reference's where rounding explains it, and how soon two part."""
    found: dict[tuple[str, str], list[str]] = {}
    for tensor in tensors:
        for row in tensor.outcomes if tensor.stage == Stage.GENERATION else ():
            if row.status == "within" and row.reason:
                text = row.reason if tensor.layer == WHOLE_MODEL else f"another text for {tensor.layer}: {row.reason}"
                found.setdefault((tensor.name, text), []).extend(row.workers)
    for (name, text), workers in found.items():
        yield Finding(
            kind=FindingKind.UNDECIDED_TEXT, severity="note", message=f"{Stage.GENERATION} · {some(workers)} · {text}",
            workers=tuple(workers), tensors=(name,),
        )  # fmt: skip
