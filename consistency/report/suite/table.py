"""The table of a suite: one line per case and a cell per stage. No layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from consistency.capture.wording import and_more, counted
from consistency.case.case import CHECKED_IN
from consistency.case.stages import Stage
from consistency.comparison.suite import CaseResult, SuiteResult, SuiteVerdict, worst_first
from consistency.report.merging import merging_cell
from consistency.report.sentences import command_text, profile_texts, time_text, versions_text
from consistency.report.summary import Cell, merged, stage_order


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseLine:
    """A case, or the sum of those that have no line of their own.

    Attributes
    ----------
    case : CaseResult or None
        None where the line stands for several.
    elapsed_s : float
        Of all cases of the line.
    merging : str
        What merging does to the outputs, in the fewest words.
    """

    label: str
    verdict: SuiteVerdict
    cells: dict[str, Cell]
    elapsed_s: float
    merging: str = ""
    case: CaseResult | None = None


def columns(suite: SuiteResult) -> list[str]:
    """Return the stages that any case has, in order."""
    return sorted({stage.stage for case in suite.cases for stage in case.stages}, key=stage_order)


def case_lines(cases: Sequence[CaseResult], most: int | None) -> list[CaseLine]:
    """Return a line per case, the worst first; of more than `most` cases those with the same outcome share a line.

    Where there are more outcomes than that, the last ones share a line by verdict.
    """
    ordered = worst_first(cases)
    if most is None or len(ordered) <= most:
        return [_line(case.name, [case]) for case in ordered]
    outcomes: dict[object, list[CaseResult]] = {}
    for case in ordered:
        outcomes.setdefault(_outcome(case), []).append(case)
    same = list(outcomes.values())
    shown = same if len(same) <= most else same[: most - len({case.verdict for case in ordered})]
    rest = [case for members in same[len(shown) :] for case in members]
    lines = [_line(_label(members, of=len(cases)), members) for members in shown]
    for verdict in dict.fromkeys(case.verdict for case in rest):
        left = [case for case in rest if case.verdict == verdict]
        lines.append(_line(f"{len(left)} of {counted(len(cases), 'case')}", left))
    return lines


def _outcome(case: CaseResult) -> object:
    """Return what two cases with the same outcome have in common: the verdict and the causes of it."""
    causes = {(f.kind, f.workers, f.general) for f in case.findings if f.severity == "error"}
    return (case.verdict, frozenset(causes), case.headline if case.error is not None else None)


def _label(same: Sequence[CaseResult], *, of: int) -> str:
    if same[0].verdict == "consistent":
        return f"{len(same)} of {counted(of, 'case')}"
    return f"{same[0].name} {and_more(len(same) - 1)}".rstrip()


def _line(label: str, same: Sequence[CaseResult]) -> CaseLine:
    return CaseLine(
        label=label,
        verdict=same[0].verdict,
        cells=cells(same[0]) if len(same) == 1 else merged(map(cells, same)),
        elapsed_s=sum(case.elapsed_s for case in same),
        merging=merging_cell([one for case in same for one in case.merging]),
        case=same[0] if len(same) == 1 else None,
    )


def cells(case: CaseResult) -> dict[str, Cell]:
    """Return the cell of each stage of a case, over all of its workers, also of those that another case checked."""
    elsewhere = {
        stage: Cell(elsewhere=place[1])
        for text in case.not_checked
        for stage in Stage
        if (place := re.fullmatch(rf"stage {stage} \({CHECKED_IN} (.*)\)", text)) is not None
    }
    return elsewhere | {
        stage.stage: Cell(
            counts=dict(stage.counts),
            worst_ratio=None if stage.worst_ratio is None else float(stage.worst_ratio),
            first_bad=stage.first_bad,
            flag=next((f.kind for f in case.findings if f.severity == "error" and stage.stage in f.stages), ""),
        )
        for stage in case.stages
    }


def suite_facts(suite: SuiteResult) -> list[str]:
    """Return what was checked, in a few words each."""
    dtypes = dict.fromkeys(case.dtype for case in suite.cases if case.dtype)
    levels = dict.fromkeys(case.level for case in suite.cases if case.level)
    found = [counted(len(suite.cases), "case"), ", ".join(dtypes), counted(len(suite.workers), "worker")]
    profiles = dict.fromkeys(text for case in suite.cases for text in profile_texts(case))
    return [text for text in (*found, f"level {', '.join(levels)}" if levels else "", *profiles) if text]


def suite_origin(suite: SuiteResult) -> list[str]:
    """Return when, where and with which versions a suite ran, and its command line; nothing where that is unknown."""
    if not suite.command:
        return []
    about = [time_text(suite.created), suite.host, versions_text(suite.versions)]
    return [" · ".join(about), command_text(suite.command)]


def seconds(elapsed_s: float) -> str:
    """Write a time: `0.4 s`, `12 s`."""
    return f"{elapsed_s:.1f} s" if elapsed_s < 10 else f"{elapsed_s:.0f} s"
