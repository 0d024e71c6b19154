"""The declaration of a remark: what a plug-in knows about findings that others make, and about words. No torch here.

A plug-in names its remarks in `Plugin.remarks`. They add lines to the details of a finding, and to the explanation of a
word; they change neither severity nor verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from consistency import plugins
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.result import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One remark of a plug-in.

    Attributes
    ----------
    on_finding : callable
        Given a finding and the evidence of its comparison, the lines to add to its details.
    on_word : callable
        Given a word that a report prints, the lines to add to its explanation.
    """

    on_finding: Callable[[Finding, ComparisonEvidence], Sequence[str]]
    on_word: Callable[[str], Sequence[str]]


def with_remarks(finding: Finding, evidence: ComparisonEvidence) -> Finding:
    """Return a finding with the lines that remarks add to its details."""
    lines = _lines(lambda remark: remark.on_finding(finding, evidence))
    return msgspec.structs.replace(finding, detail=(*finding.detail, *lines)) if lines else finding


def remarks_on_word(word: str) -> tuple[str, ...]:
    """Return the lines that remarks add to the explanation of a word."""
    return tuple(_lines(lambda remark: remark.on_word(word)))


def _lines(call: Callable[[Remark], Sequence[str]]) -> list[str]:
    """Return the lines of all remarks; one of another distribution may raise anything, and costs its lines alone."""
    lines: list[str] = []
    for reference, remark in _remarks():
        try:
            lines += call(remark)
        except Exception as error:
            if plugins.is_own(reference):
                raise
            plugins.note_failure(f"the remark {reference}", error)
    return lines


def _remarks() -> Iterator[tuple[str, Remark]]:
    """Yield every remark with the reference by which a plug-in names it."""
    for reference, remark in plugins.offered("remarks"):
        if isinstance(remark, Remark):
            yield reference, remark
            continue
        error = TypeError(f"not a {Remark.__module__}.Remark, but {type(remark).__name__}")
        if plugins.is_own(reference):
            raise error
        plugins.note_failure(f"the remark {reference}", error)
