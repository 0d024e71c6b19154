"""`suite.md`: a suite to paste into an issue: a screen for any number of cases, and the rest folded."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.capture.version import __version__
from consistency.comparison.result import PLANTED
from consistency.comparison.suite import SuiteResult
from consistency.report.formats import View
from consistency.report.markdown import escaped, fence, finding_lines, folded, numbered
from consistency.report.merging import MERGING
from consistency.report.sentences import cell_text
from consistency.report.suite.findings import findings_of
from consistency.report.suite.table import case_lines, columns, seconds, suite_facts, suite_origin
from consistency.text import one_line

_CASES, _FINDINGS = 20, 6


def render(suite: SuiteResult, view: View) -> Iterator[bytes]:
    """Yield `suite.md`."""
    yield suite_as_markdown(suite, view.folder).encode()


def suite_as_markdown(suite: SuiteResult, folder: str | None = None) -> str:
    """Return the suite in GitHub's Markdown; `folder` is where the reports of the cases are."""
    found = findings_of(suite, folder)
    acted_on = [finding for finding in found if finding.severity != "note"]
    left = [*finding_lines(found, _FINDINGS)]
    left += [f"not checked: {', '.join(suite.not_checked)}"] if suite.not_checked else []
    planted = [finding.message for finding in found if finding.kind == PLANTED]
    lines = [
        *_head(suite, planted),
        *numbered(acted_on, _FINDINGS),
        *_table(suite),
        *folded("Details, notes, and what was not checked", left),
    ]
    return "".join(f"{line}\n" for line in lines)


def _head(suite: SuiteResult, planted: list[str]) -> Iterator[str]:
    drill = f" **A drill: {escaped('; '.join(planted))}.**" if planted else ""
    yield f"**{suite.verdict.upper()}** {escaped(suite.sentence)}{drill}"
    yield ""
    if suite.simulated:
        yield "**SIMULATED DEVICES: simulated in software; this report does not describe hardware.**"
        yield ""
    about = [suite.name, *suite_facts(suite), seconds(suite.elapsed_s)]
    yield f"{' · '.join(escaped(part) for part in about)} · consistency {__version__}"
    if origin := suite_origin(suite):
        yield ""
        yield from fence([one_line(text) for text in origin])


def _table(suite: SuiteResult) -> Iterator[str]:
    names = columns(suite)
    yield ""
    lines = case_lines(suite.cases, _CASES)
    merges = any(line.merging for line in lines)
    titles = ["case", "verdict", *map(escaped, names), *([MERGING] if merges else []), "time"]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for line in lines:
        texts = [cell_text(name, line.cells.get(name)) for name in names]
        marks = [f"{cell.mark} {escaped(cell.text)}".rstrip() for cell in texts]
        marks += [escaped(line.merging)] if merges else []
        yield f"| {' | '.join([escaped(line.label), line.verdict, *marks, seconds(line.elapsed_s)])} |"
