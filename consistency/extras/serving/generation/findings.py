"""Generated texts that part from the reference's where rounding explains it."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.capture.names import WHOLE_MODEL
from consistency.capture.wording import some
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.result import Finding
from consistency.extras.serving.generation.spec import GENERATION
from consistency.extras.serving.kinds import UNDECIDED_TEXT


def find_undecided_texts(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report each text that parts from the reference's where rounding explains it, and how soon two part."""
    workers_by_text: dict[tuple[str, str], list[str]] = {}
    for tensor in evidence.tensors:
        if tensor.stage != GENERATION:
            continue
        for row in tensor.outcomes:
            if row.status == "within" and row.reason:
                text = row.reason
                if tensor.layer != WHOLE_MODEL:
                    text = f"another text for {tensor.layer}: {row.reason}"
                workers_by_text.setdefault((tensor.name, text), []).extend(row.workers)
    for (name, text), workers in workers_by_text.items():
        yield Finding(
            kind=UNDECIDED_TEXT,
            severity="note",
            message=f"{GENERATION} · {some(workers)} · {text}",
            workers=tuple(workers),
            tensors=(name,),
        )


UNDECIDED_TEXTS = Finder(name="undecided texts", phase=Phase.STAGES, position=3, find=find_undecided_texts)
