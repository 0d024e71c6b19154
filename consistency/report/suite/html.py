"""`suite.html`: one page for all cases, with links to their reports; it opens from disk and has no script.

Names may come from strangers, as in `report.html`: the template escapes every value, and a content security policy
allows no script and no request.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator

from markupsafe import Markup

from consistency.capture.version import __version__
from consistency.comparison.suite import SuiteResult, common_findings
from consistency.report.formats import View
from consistency.report.merging import MERGING_LEGEND
from consistency.report.page.rendering import VERDICT_MARKS, page_environment, part
from consistency.report.sentences import cell_text, legend
from consistency.report.suite.findings import shown_finding
from consistency.report.suite.table import case_lines, columns, seconds, suite_facts, suite_origin

_MOST_FINDINGS = 100  # more than a person reads; `suite.json` holds all
_FOLD_ABOVE = 30  # cases: of more, the consistent ones are folded, so that what failed is on the first screens


def render(suite: SuiteResult, view: View) -> Iterator[bytes]:
    """Yield `suite.html`."""
    yield suite_as_html(suite, view.folder).encode()


def suite_as_html(suite: SuiteResult, folder: str | None = None) -> str:
    """Return the page; `folder` holds the reports of the cases, for the commands that the page names."""
    lines = case_lines(suite.cases, None)
    folded = [line for line in lines if line.verdict == "consistent"] if len(lines) > _FOLD_ABOVE else []
    cases = {case.name: case for case in suite.cases}
    found = [
        (shown_finding(one, suite, folder), [cases[name] for name in one.cases]) for one in common_findings(suite.cases)
    ]
    environment = page_environment()
    environment.filters.update(link=urllib.parse.quote, seconds=seconds)
    return environment.from_string(part("suite.html", "consistency.report.suite")).render(
        cell_text=cell_text,
        facts=[*suite_facts(suite), seconds(suite.elapsed_s)],
        findings=[(finding, members) for finding, members in found if finding.severity != "note"],
        folded=folded,
        legend=legend(line.cells for line in lines),
        line_feed=Markup("\n"),
        marks=VERDICT_MARKS,
        merges=any(line.merging for line in lines),
        merging_legend=MERGING_LEGEND,
        most_findings=_MOST_FINDINGS,
        name=suite.name,
        not_checked=suite.not_checked,
        notes=[finding for finding, _ in found if finding.severity == "note"],
        sentence=suite.sentence,
        shown=lines[: len(lines) - len(folded)],
        origin=suite_origin(suite),
        planted=suite.planted,
        simulated=suite.simulated,
        stages=columns(suite),
        style=Markup(part("style.css")),
        tool=__version__,
        total=len(lines),
        verdict=suite.verdict,
    )
