"""`report.md` and `suite.md`: a report to paste into an issue. A screen of it is visible at most; the rest is folded.

Every name may come from a stranger: outside of code fences Markdown's special characters are escaped, and a fence is
longer than any run of backticks in it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from consistency.capture.version import __version__
from consistency.capture.wording import and_more, some
from consistency.comparison.result import Comparison, Finding
from consistency.comparison.suite import SuiteResult
from consistency.report.document import EXPLAINED, Document, Entry, ResultTable, Sheet
from consistency.report.documents import document_of
from consistency.report.findings import is_command
from consistency.report.formats import View
from consistency.report.sentences import facts
from consistency.text import one_line

MOST_LINES = 40
"""Visible ones of a run: readers of an issue skip more than a screen; the parts below add up to no more than this."""

MOST_ROWS = 20
"""Rows of a table of cases."""

_SOURCES = 3
_ROWS, _FINDINGS = 5, 3
_FOLDED = 20_000  # characters of a folded part
_LONGEST = 400  # characters of a visible line: a sentence with a hundred workers is cut
_LONGEST_FOLDED = 4000
_NAMES = 4  # workers of a row

_SPECIAL = re.compile(
    r"([\\`*_{}\[\]<>|~$!^=])|(?<!\w)([@#])(?=\w)|(://)|(?<!\w)(www)(\.)|^([-+#]|\d+(?=[.)](?:\s|$)))"
)


def render(found: Comparison | SuiteResult, view: View) -> Iterator[bytes]:
    """Yield the file."""
    yield as_markdown(found, view).encode()


def as_markdown(found: Comparison | SuiteResult, view: View | None = None) -> str:
    """Return the report in GitHub's Markdown."""
    document = document_of(found, dataclasses.replace(view or View(), most_rows=MOST_ROWS))
    lines = [*_head(document), *_numbered(document.to_act_on), *_explained(document)]
    lines += [*_tables(document), *_details(document)]
    lines += folded("Environment", document.environment, document.file)
    return "".join(f"{line}\n" for line in lines)


def escaped(text: object) -> str:
    """Return text that Markdown shows literally: no markup, no HTML, no link, no mention."""

    def escape(match: re.Match[str]) -> str:
        special, call, scheme, www, dot, first = match.groups()
        if call:
            return f"{call}\u2060"  # word joiner: no backslash keeps a tracker from calling @somebody or linking #1
        if scheme:
            return "\\:\\/\\/"
        if www:
            return f"{www}\\{dot}"
        if first:
            return f"\\{first}" if first in "-+#" else f"{first}\u2060"
        return f"\\{special}"

    line = _cut(one_line(text)).replace("&", "&amp;")
    return _SPECIAL.sub(escape, line)


def fence(lines: Sequence[str]) -> list[str]:
    """Return lines as a block of code that none of them can end."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    ticks = "`" * max(3, longest + 1)
    return [f"{ticks}text", *lines, ticks]


def _numbered(found: Sequence[Entry]) -> Iterator[str]:
    """Yield the first findings as a numbered list, each with its evidence and what to do next; and how many follow."""
    if found:
        yield ""
    for entry in found[:_FINDINGS]:
        finding = entry.finding
        mark = "✗" if finding.severity == "error" else "warning:"
        lines = [f"{mark} **{escaped(finding.kind)}** {escaped(finding.message)}"]
        lines += [escaped(text.strip()) for text in finding.detail[:1]]
        lines += [f"Next: {_next(finding.next)}"] if finding.next else []
        indent = " " * len(f"{entry.number}. ")
        yield f"{entry.number}. " + f"\\\n{indent}".join(lines)
    if rest := and_more(len(found) - _FINDINGS, "finding"):
        yield f"{_FINDINGS + 1}. {rest}"


def _explained(document: Document) -> Iterator[str]:
    if document.explain_command:
        yield ""
        yield f"{EXPLAINED[0].upper()}{EXPLAINED[1:]}: `{document.explain_command}`"


def _next(text: str) -> str:
    """Return what to do next: a command as code, whole."""
    if not is_command(text):
        return escaped(text)
    line = one_line(text)
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    blank = " " if "`" in line else ""
    return f"{ticks}{blank}{line}{blank}{ticks}"


def _finding_lines(document: Document) -> Iterator[str]:
    """Yield what the numbered list leaves out: further findings, of each the evidence and the command; the notes."""
    for place, entry in enumerate(document.to_act_on):
        finding, is_shown = entry.finding, place < _FINDINGS
        if not is_shown:
            yield f"{entry.number}. {finding.kind}: {finding.message}"
        yield from (f"{entry.number}. {text}" for text in finding.detail[is_shown:])
        if finding.next and not is_shown:
            yield f"{entry.number}. next: {finding.next}"
    for entry in document.notes:
        yield f"note: {entry.finding.message}"
        yield from (f"      {text}" for text in entry.finding.detail)


def _cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]} …"


def _within(lines: Sequence[str], file: str) -> list[str]:
    """Return the first lines, as many as a tracker takes, and how many follow."""
    room, kept = _FOLDED, 0
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            break
        kept += 1
    rest = and_more(len(lines) - kept, "line")
    return [*lines[:kept], *([f"{rest}: {file} has them all"] if rest else [])]


def folded(title: str, lines: Sequence[str], file: str, *, above: Sequence[str] = ()) -> list[str]:
    """Return lines as a block of code that a reader opens, below Markdown; nothing where there is neither."""
    code = fence(_within([_cut(one_line(line), _LONGEST_FOLDED) for line in lines], file)) if lines else []
    content = [*above, *([""] if above else []), *code]
    return ["", f"<details><summary>{title}</summary>", "", *content, "</details>"] if content else []


def _head(document: Document) -> Iterator[str]:
    drill = f" **A drill: {escaped(document.drill[:_LONGEST])}.**" if document.drill else ""
    yield f"**{document.verdict.upper()}** {escaped(document.sentence)}{drill}"
    yield ""
    if document.simulated:
        yield "**SIMULATED DEVICES: simulated in software; this report does not describe hardware.**"
        yield ""
    yield f"{' · '.join(map(escaped, (document.name, *document.facts)))} · consistency {__version__}"
    if document.origin:
        rest = and_more(len(document.sources) - _SOURCES, "capture")
        code = [document.command, *document.sources[:_SOURCES], *([rest] if rest else [])]
        yield ""
        yield escaped(document.origin)
        yield ""
        yield from fence([one_line(text) for text in code])


def _tables(document: Document) -> Iterator[str]:
    """Yield all tables as one, mismatches first where not every row is shown."""
    if not document.tables:
        return
    most = MOST_ROWS if document.tables[0].label == "case" else _ROWS
    most -= 2 * bool(document.merging)  # the line below the table, and the empty one before it
    lines = [line for table in document.tables for line in _rows(table)]
    if len(lines) > most:
        lines.sort(key=lambda line: not line[0])
    table = document.tables[0]
    titles = [*([table.heading] if table.heading else []), table.label, *(column.title for column in table.columns)]
    yield ""
    yield f"| {' | '.join(map(escaped, titles))} |"
    yield "|---" * len(titles) + "|"
    yield from (line for _, line in lines[:most])
    if rest := and_more(len(lines) - most, "line"):
        yield f"| {rest} |"
    if document.merging:
        yield ""
        yield escaped(" · ".join(document.merging))


def _rows(table: ResultTable) -> Iterator[tuple[bool, str]]:
    """Yield each row, and whether it has a mismatch."""
    for row in table.rows:
        cells = [f"{cell.mark} {escaped(f'{cell.text} {cell.place}'.rstrip())}".strip() for cell in row.cells]
        cells.insert(0, escaped(some(row.names, _NAMES)))
        if table.heading:
            path = table.title.removeprefix("load path: ")
            cells.insert(0, escaped(row.architecture) + (f" ({escaped(path)})" if path else ""))
        yield row.bad, f"| {' | '.join(cells)} |"


def _details(document: Document) -> list[str]:
    """Return the worst layers, the rest of the findings, where workers diverge, and what was not checked."""
    lines = [*_finding_lines(document), *(text for _, text in document.remarks)]
    lines += filter(None, [document.not_checked_text, *(f"not written: {text}" for text in document.unwritten)])
    above = [] if document.layers is None else list(_sheet(document.layers))
    title = "Layers by architecture, details, notes, and what was not checked"
    return folded(title if above else "Details, notes, and what was not checked", lines, document.file, above=above)


def _sheet(sheet: Sheet) -> Iterator[str]:
    yield f"| {' | '.join(map(escaped, sheet.titles))} |"
    yield "|---" * len(sheet.titles) + "|"
    for row in sheet.rows:
        yield f"| {' | '.join(map(escaped, row))} |"


MOST_EVIDENCE = 20
"""Lines of evidence: a stack has about as many, and `report.json` holds all."""

_TENSORS = 3


def finding_as_markdown(comparison: Comparison, finding: Finding, number: int) -> str:
    """Return a finding with its evidence, the devices it names, and what was compared."""
    mark = {"error": "✗", "warning": "warning:"}.get(finding.severity, "note:")
    lines = [f"{mark} **{escaped(finding.kind)}** {escaped(finding.message)}", ""]
    if comparison.simulated or comparison.planted:  # as the report's own first lines
        lines += ["**Not a fault of a device: simulated devices or a planted fault.**", ""]
    evidence = [one_line(line) for line in finding.detail[:MOST_EVIDENCE]]
    if len(finding.detail) > MOST_EVIDENCE:
        evidence.append(f"and {len(finding.detail) - MOST_EVIDENCE} more lines")
    evidence += [f"next: {one_line(finding.next)}"] if finding.next else []
    if evidence:
        lines += [*fence(evidence), ""]
    if finding.tensors:
        lines.append(f"* tensors: {escaped(some(finding.tensors, _TENSORS))}")
    named = set(finding.workers)
    devices = [f"{one.name} ({one.architecture}, {one.model})" for one in comparison.workers if one.name in named]
    if devices:
        lines.append(f"* devices: {escaped(some(devices))}")
    case = " · ".join(escaped(text) for text in (comparison.case, *facts(comparison)))
    lines.append(f"* finding {number} of {case} · consistency {__version__}")
    return "".join(f"{line}\n" for line in lines)
