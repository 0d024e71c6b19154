"""The first screen: the verdict, the groups by architecture, the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from consistency.capture.wording import counted, shortened, some
from consistency.case.load_path import is_alternative
from consistency.comparison.result import Comparison, Finding
from consistency.report.sentences import CellText, cell_text
from consistency.report.summary import Group
from consistency.report.text import one_line

MOST_FINDINGS = 100
"""More than a person reads; `report.json` holds all."""

MOST_TENSORS = 200
"""Names of tensors below a finding."""

_MOST_WORKERS = 8  # names on one line of the table of groups


@dataclass(frozen=True, slots=True, kw_only=True)
class LineText:
    """Workers that share a line, and their cells."""

    names: tuple[str, ...]
    reference: bool
    cells: tuple[CellText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupText:
    """An architecture."""

    name: str
    models: str
    lines: tuple[LineText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingText:
    """A finding, with as many names as a page has room for."""

    number: int
    kind: str
    severity: str
    message: str
    workers: str
    detail: tuple[str, ...]
    next: str | None
    tensors: tuple[str, ...]
    more: int


def facts(comparison: Comparison) -> list[str]:
    """Return what was checked, in a few words each."""
    found = [comparison.dtype, counted(len(comparison.workers), "worker"), counted(len(comparison.tensors), "tensor")]
    mains = [load_path for load_path in comparison.load_paths if not is_alternative(load_path)]
    sides = len(comparison.load_paths) - len(mains)
    found += [f"load paths {' and '.join(mains)}" if len(mains) > 1 else ""]
    found += [counted(sides, "alternative load path") if sides else ""]
    found = [text for text in found if text]
    return [one_line(text) for text in (*found, f"level {comparison.level}")]


def group_texts(found: Sequence[Group], columns: Sequence[str], reference: str | None) -> list[GroupText]:
    """Return the table of groups of one load path."""
    return [
        GroupText(
            name=one_line(group.architecture),
            models=one_line(some([model for model in group.models if model])),
            lines=tuple(
                LineText(
                    names=tuple(map(one_line, shortened(_reference_first(line.workers, reference), _MOST_WORKERS))),
                    reference=reference in line.workers,
                    cells=tuple(cell_text(name, line.cells.get(name)) for name in columns),
                )
                for line in group.lines
            ),
        )
        for group in found
    ]


def _reference_first(workers: Sequence[str], reference: str | None) -> list[str]:
    return sorted(workers, key=lambda name: name != reference)


def finding_texts(findings: Sequence[Finding], *, notes: bool) -> list[FindingText]:
    """Return the findings to act on, or the notes, in order of weight."""
    chosen = [finding for finding in findings if (finding.severity == "note") == notes]
    return [
        FindingText(
            number=number,
            kind=one_line(finding.kind),
            severity=finding.severity,
            message=one_line(finding.message),
            workers=one_line(some(finding.workers)),
            detail=tuple(one_line(text) for text in finding.detail),
            next=None if finding.next is None else one_line(finding.next),
            tensors=tuple(one_line(name) for name in finding.tensors[:MOST_TENSORS]),
            more=max(0, len(finding.tensors) - MOST_TENSORS),
        )
        for number, finding in enumerate(chosen[:MOST_FINDINGS], start=1)
    ]


def left_out(comparison: Comparison) -> Mapping[str, int]:
    """Return how many findings and notes a page has no room for."""
    notes = sum(finding.severity == "note" for finding in comparison.findings)
    return {
        "findings": max(0, len(comparison.findings) - notes - MOST_FINDINGS),
        "notes": max(0, notes - MOST_FINDINGS),
    }
