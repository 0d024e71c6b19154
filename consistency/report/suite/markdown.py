"""`suite.md`: a suite to paste into an issue, below 60 lines for any number of cases."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.capture.version import __version__
from consistency.comparison.result import PLANTED, Finding
from consistency.comparison.suite import SuiteResult
from consistency.report.formats import View
from consistency.report.markdown import escaped, fence, folded, numbered
from consistency.report.merging import MERGING
from consistency.report.sentences import cell_text
from consistency.report.suite.findings import findings_of
from consistency.report.suite.table import case_lines, columns, seconds, suite_facts, suite_origin
from consistency.report.text import one_line

_CASES, _FINDINGS, _DETAILS = 20, 6, 2


def render(suite: SuiteResult, view: View) -> Iterator[bytes]:
    """Yield `suite.md`."""
    yield suite_as_markdown(suite, view.folder).encode()


def suite_as_markdown(suite: SuiteResult, folder: str | None = None) -> str:
    """Return the suite in GitHub's Markdown; `folder` is where the reports of the cases are."""
    found = findings_of(suite, folder)
    acted_on = [finding for finding in found if finding.severity != "note"]
    planted = [finding.message for finding in found if finding.kind == PLANTED]
    lines = [*_head(suite, planted), *numbered(acted_on, _FINDINGS), *_table(suite), *_details(acted_on)]
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


def _details(found: list[Finding]) -> list[str]:
    lines = []
    for number, finding in enumerate(found[:_FINDINGS], start=1):
        lines += [f"{number}. {text.strip()}" for text in finding.detail[:_DETAILS]]
        lines += [f"{number}. next: {finding.next}"] if finding.next else []
    return folded("Details", lines) if lines else []
