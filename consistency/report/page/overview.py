"""The first screen: the verdict, the groups by architecture, the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from consistency.capture.wording import counted, some
from consistency.case.load_path import is_alternative
from consistency.case.stages import Stage
from consistency.comparison.result import Comparison, Finding
from consistency.comparison.weight_files.diff import STAGE as FILE_STAGE
from consistency.report import diff, terminal
from consistency.report.summary import Cell, Group, alternative_paths, divergences
from consistency.report.text import one_line

MOST_FINDINGS = 100
"""More than a person reads; `report.json` holds all."""

MOST_TENSORS = 200
"""Names of tensors below a finding."""

_MOST_WORKERS = 8  # names on one line of the table of groups


@dataclass(frozen=True, slots=True, kw_only=True)
class CellText:
    """A cell of the table of groups: what it is, its mark, the words beside it, and where it begins."""

    kind: str
    mark: str
    text: str
    said: str
    place: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineText:
    """Workers that share a line, and their cells."""

    names: tuple[str, ...]
    more: int
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


def sentence(comparison: Comparison) -> str:
    """Say the verdict in one sentence, of a run or of two files."""
    say = diff.sentence if comparison.load_paths == (FILE_STAGE,) else terminal.sentence
    return one_line(say(comparison))


def facts(comparison: Comparison) -> list[str]:
    """Return what was looked at, in a few words each."""
    found = [comparison.dtype, counted(len(comparison.workers), "worker"), counted(len(comparison.tensors), "tensor")]
    mains = [load_path for load_path in comparison.load_paths if not is_alternative(load_path)]
    sides = len(comparison.load_paths) - len(mains)
    found += [f"roads {' and '.join(mains)}" if len(mains) > 1 else ""]
    found += [counted(sides, "side road") if sides else ""]
    found = [text for text in found if text]
    return [one_line(text) for text in (*found, f"level {comparison.level}")]


def alternative_path_texts(comparison: Comparison) -> list[str]:
    """Say of each side road how it ended; those on which all is equal in one sentence."""
    found = alternative_paths(comparison)
    equal = [side.load_path for side in found if not side.bad and not side.skipped]
    texts = [f"side roads on which all is equal: {', '.join(equal)}"] if equal else []
    texts += [
        f"✗ side road {side.load_path}: {side.bad} of {side.total} not what they should be, on {some(side.workers)}"
        for side in found
        if side.bad
    ]
    texts += [f"side road {side.load_path}: skipped" for side in found if side.skipped and not side.bad]
    return [one_line(text) for text in texts]


def stages(comparison: Comparison) -> list[str]:
    """Return the stages that were looked at, in order; such as this version does not know come last."""
    order = {stage.value: place for place, stage in enumerate(Stage)}
    seen = dict.fromkeys(tensor.stage for tensor in comparison.tensors)
    return sorted(seen, key=lambda name: order.get(name, len(order)))


def group_texts(found: Sequence[Group], columns: Sequence[str], reference: str | None) -> list[GroupText]:
    """Return the table of groups of one road."""
    return [
        GroupText(
            name=one_line(group.architecture),
            models=one_line(some([model for model in group.models if model])),
            lines=tuple(
                LineText(
                    names=tuple(one_line(name) for name in _names(line.workers, reference)),
                    more=max(0, len(line.workers) - _MOST_WORKERS),
                    reference=reference in line.workers,
                    cells=tuple(cell_text(name, line.cells.get(name)) for name in columns),
                )
                for line in group.lines
            ),
        )
        for group in found
    ]


def _names(workers: Sequence[str], reference: str | None) -> list[str]:
    return sorted(workers, key=lambda name: name != reference)[:_MOST_WORKERS]


def cell_text(stage: str, cell: Cell | None) -> CellText:
    """Say what workers saw in a stage, the worst of it."""
    if cell is None:
        return CellText(kind="none", mark="–", text="", said="not looked at")
    if cell.bad:
        text = f"{cell.bad} of {cell.total}"
        place = f"from {one_line(cell.first_bad)}" if stage == Stage.FORWARD and cell.first_bad else ""
        said = f"not what it should be: {text} tensors {place}".rstrip()
        return CellText(kind="outside", mark="✗", text=text, said=said, place=place)
    if "blocked" in cell.counts:
        text = f"{cell.counts['blocked']} of {cell.total}"
        return CellText(kind="blocked", mark="!", text=text, said=f"could not be looked at: {text} tensors")
    if "within" in cell.counts and cell.worst_ratio is not None:
        text = f"{cell.worst_ratio:.2f}"
        return CellText(kind="within", mark="≤", text=text, said=f"within the bound, largest share of it {text}")
    if "equal" in cell.counts or "within" in cell.counts:
        return CellText(kind="equal", mark="=", text="", said="equal bits")
    return CellText(kind="skipped", mark="–", text="skipped", said="skipped")


def first_bits(comparison: Comparison) -> list[str]:
    """Say where workers' bits first differ from the reference worker's."""
    texts = []
    for found, workers in divergences(comparison.first_other_bits):
        load_path = f" (road {found.load_path})" if len(comparison.load_paths) > 1 else ""
        ends = {"within": "inside what is allowed", "equal": "inside what is allowed"}.get(found.status, found.status)
        texts.append(
            f"{some(workers)}{load_path}: "
            f"other bits than {comparison.reference} from {found.stage} on, "
            f"first in {found.layer}.{found.tensor} ({ends})"
        )
    return [one_line(text) for text in texts]


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
