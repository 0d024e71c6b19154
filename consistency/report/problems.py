"""Why a result is not consistent, in the lines of an assertion: the first states it, the others have the details."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.comparison.result import Comparison
from consistency.comparison.suite import SuiteResult
from consistency.report.findings import findings_of
from consistency.report.sentences import sentence
from consistency.text import one_line

_MOST_FINDINGS = 10  # a screen; the report has the rest
_MOST_TENSORS = 5


def problems(found: Comparison | SuiteResult) -> Iterator[str]:
    """Yield why a result is not consistent: the verdict in a sentence, then each error with its tensors and devices."""
    if isinstance(found, SuiteResult):
        yield one_line(f"{found.verdict}: {found.sentence}")
        for case in found.cases:
            if case.verdict != "consistent":
                yield one_line(f"  {case.name}: {case.verdict}: {case.headline}")
        return
    yield one_line(f"{found.verdict}: {sentence(found)}")
    errors = [finding for finding in findings_of(found) if finding.severity == "error"]
    for number, finding in enumerate(errors[:_MOST_FINDINGS], start=1):
        if len(errors) > 1:  # otherwise the verdict has said it
            yield one_line(f"  {number}  {finding.message}")
        yield from (one_line(f"     {line}") for line in finding.detail)
        if not finding.detail:
            yield from (one_line(f"     {name}") for name in finding.tensors[:_MOST_TENSORS])
        if finding.next:
            yield one_line(f"     next: {finding.next}")
    if len(errors) > _MOST_FINDINGS:
        yield f"  and {len(errors) - _MOST_FINDINGS} more"
