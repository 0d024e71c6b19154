"""`report.md` and `suite.md`: a report to paste into an issue. A screen of it is visible at most; the rest is folded.

Every name may come from a stranger: outside of code fences Markdown's special characters are escaped, and a fence is
longer than any run of backticks in it.
"""

from __future__ import annotations

import dataclasses
import itertools
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
"""Visible lines of a run: readers of an issue skip more than a screen; the parts below add up to no more than this."""

MOST_ROWS = 20
"""Rows of a table of cases."""

_MOST_SOURCES = 3
_MOST_WORKER_ROWS, _MOST_FINDINGS = 5, 3
_MOST_FOLDED = 20_000  # characters of a folded part
_LONGEST = 400  # characters of a visible line: a sentence with a hundred workers is cut
_LONGEST_FOLDED = 4000
_MOST_NAMES = 4  # workers of a row

_SPECIAL = re.compile(
    r"([\\`*_{}\[\]<>|~$!^=])|(?<!\w)([@#])(?=\w)|(://)|(?<!\w)(www)(\.)|^([-+#]|\d+(?=[.)](?:\s|$)))"
)
"""Characters of markup; a mention or an issue; a URL with and without scheme; the beginning of a list or a heading."""


def render(result: Comparison | SuiteResult, view: View) -> Iterator[bytes]:
    """Yield the file."""
    yield as_markdown(result, view).encode()


def as_markdown(result: Comparison | SuiteResult, view: View | None = None) -> str:
    """Return the report in GitHub's Markdown."""
    document = document_of(result, dataclasses.replace(view or View(), most_rows=MOST_ROWS))
    lines = [*_head(document), *_numbered_list(document.to_act_on), *_explain_command(document)]
    lines += [*_tables(document), *_details(document)]
    lines += folded("Environment", document.environment, document.file)
    return "".join(f"{line}\n" for line in lines)


def escaped(text: object) -> str:
    """Return text that Markdown shows literally: no markup, no HTML, no link, no mention."""
    line = _cut(one_line(text)).replace("&", "&amp;")
    return _SPECIAL.sub(_escape, line)


def _escape(match: re.Match[str]) -> str:
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


def fence(lines: Sequence[str]) -> list[str]:
    """Return lines as a block of code whose fence no line can close."""
    ticks = "`" * max(3, 1 + max(map(_longest_ticks, lines), default=0))
    return [f"{ticks}text", *lines, ticks]


def _longest_ticks(line: str) -> int:
    """Return the length of the longest run of backticks in a line."""
    return max(map(len, re.findall("`+", line)), default=0)


def _numbered_list(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the first findings as a numbered list, each with its evidence and what to do next; and how many follow."""
    if entries:
        yield ""
    for entry in entries[:_MOST_FINDINGS]:
        finding = entry.finding
        mark = "✗" if finding.severity == "error" else "warning:"
        lines = [f"{mark} **{escaped(finding.kind)}** {escaped(finding.message)}"]
        lines += [escaped(text.strip()) for text in finding.detail[:1]]
        if finding.next:
            lines.append(f"Next: {_next_step(finding.next)}")
        indent = " " * len(f"{entry.number}. ")
        # A backslash before the line feed breaks the line within the item.
        yield f"{entry.number}. " + f"\\\n{indent}".join(lines)
    if left_out := and_more(len(entries) - _MOST_FINDINGS, "finding"):
        yield f"{_MOST_FINDINGS + 1}. {left_out}"


def _explain_command(document: Document) -> Iterator[str]:
    if document.explain_command:
        yield ""
        yield f"{EXPLAINED[0].upper()}{EXPLAINED[1:]}: `{document.explain_command}`"


def _next_step(text: str) -> str:
    """Return a next step in Markdown: a command as code, whole."""
    if not is_command(text):
        return escaped(text)
    line = one_line(text)
    ticks = "`" * (1 + _longest_ticks(line))
    blank = " " if "`" in line else ""
    return f"{ticks}{blank}{line}{blank}{ticks}"


def _finding_lines(document: Document) -> Iterator[str]:
    """Yield the parts that the numbered list leaves out: further findings, evidence and commands, and the notes."""
    for index, entry in enumerate(document.to_act_on):
        finding, is_listed = entry.finding, index < _MOST_FINDINGS
        if not is_listed:
            yield f"{entry.number}. {finding.kind}: {finding.message}"
        unlisted_details = finding.detail[1:] if is_listed else finding.detail
        yield from (f"{entry.number}. {text}" for text in unlisted_details)
        if finding.next and not is_listed:
            yield f"{entry.number}. next: {finding.next}"
    for entry in document.notes:
        yield f"note: {entry.finding.message}"
        yield from (f"      {text}" for text in entry.finding.detail)


def _cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]} …"


def _shortened(lines: Sequence[str], file: str) -> list[str]:
    """Return the first lines, as many as a tracker takes, and how many follow."""
    room, count = _MOST_FOLDED, 0
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            break
        count += 1
    shown = [*lines[:count]]
    if left_out := and_more(len(lines) - count, "line"):
        shown.append(f"{left_out}: {file} has them all")
    return shown


def folded(title: str, lines: Sequence[str], file: str, *, above: Sequence[str] = ()) -> list[str]:
    """Return lines as a block of code that a reader opens, below Markdown; nothing where there is neither.

    Parameters
    ----------
    title : str
        Visible text that opens it.
    lines : sequence of str
        Lines of the block of code.
    file : str
        The file that has the lines for which there is no room.
    above : sequence of str
        Lines of Markdown before the code.
    """
    content = [*above]
    if above:
        content.append("")
    if lines:
        content += fence(_shortened([_cut(one_line(line), _LONGEST_FOLDED) for line in lines], file))
    if not content:
        return []
    return ["", f"<details><summary>{title}</summary>", "", *content, "</details>"]


def _head(document: Document) -> Iterator[str]:
    """Yield the verdict, the facts of the run, and the origin of the report."""
    drill = f" **A drill: {escaped(document.drill[:_LONGEST])}.**" if document.drill else ""
    yield f"**{document.verdict.upper()}** {escaped(document.sentence)}{drill}"
    yield ""
    if document.simulated:
        yield "**SIMULATED DEVICES: simulated in software; this report does not describe hardware.**"
        yield ""
    yield f"{' · '.join(map(escaped, (document.name, *document.facts)))} · consistency {__version__}"
    if document.origin:
        code = [document.command, *document.sources[:_MOST_SOURCES]]
        if left_out := and_more(len(document.sources) - _MOST_SOURCES, "capture"):
            code.append(left_out)
        yield ""
        yield escaped(document.origin)
        yield ""
        yield from fence([one_line(text) for text in code])


def _tables(document: Document) -> Iterator[str]:
    """Yield all tables as one, mismatches first where not every row is shown."""
    if not document.tables:
        return
    table = document.tables[0]
    most = MOST_ROWS if table.label == "case" else _MOST_WORKER_ROWS
    if document.merging:
        most -= 2  # the line below the table, and the empty one before it
    rows = list(itertools.chain.from_iterable(map(_rows, document.tables)))
    if len(rows) > most:
        rows.sort(key=lambda row: not row[0])
    titles = [table.label, *(column.title for column in table.columns)]
    if table.heading:
        titles.insert(0, table.heading)
    yield ""
    yield f"| {' | '.join(map(escaped, titles))} |"
    yield "|---" * len(titles) + "|"
    yield from (line for _, line in rows[:most])
    if left_out := and_more(len(rows) - most, "line"):
        yield f"| {left_out} |"
    if document.merging:
        yield ""
        yield escaped(" · ".join(document.merging))


def _rows(table: ResultTable) -> Iterator[tuple[bool, str]]:
    """Yield for each row whether it has a mismatch, and its line of Markdown."""
    path = table.title.removeprefix("load path: ")
    for row in table.rows:
        cells = []
        if table.heading:
            cells.append(f"{escaped(row.architecture)} ({escaped(path)})" if path else escaped(row.architecture))
        cells.append(escaped(some(row.names, _MOST_NAMES)))
        for cell in row.cells:
            text = escaped(f"{cell.text} {cell.place}".rstrip())
            cells.append(f"{cell.mark} {text}".strip())
        yield row.bad, f"| {' | '.join(cells)} |"


def _details(document: Document) -> list[str]:
    """Return the worst layers, the other findings, the places where workers diverge, and the parts not checked."""
    lines = [*_finding_lines(document), *(text for _, text in document.remarks)]
    if document.not_checked_text:
        lines.append(document.not_checked_text)
    lines += [f"not written: {text}" for text in document.unwritten]
    if document.layers is None:
        return folded("Details, notes, and what was not checked", lines, document.file)
    title = "Layers by architecture, details, notes, and what was not checked"
    return folded(title, lines, document.file, above=list(_sheet(document.layers)))


def _sheet(sheet: Sheet) -> Iterator[str]:
    yield f"| {' | '.join(map(escaped, sheet.titles))} |"
    yield "|---" * len(sheet.titles) + "|"
    for row in sheet.rows:
        yield f"| {' | '.join(map(escaped, row))} |"


MOST_EVIDENCE = 20
"""Lines of evidence: a stack has about as many, and `report.json` holds all."""

_MOST_TENSORS = 3


def finding_as_markdown(comparison: Comparison, finding: Finding, number: int) -> str:
    """Return a finding with its evidence, the devices that it names, and the facts of the comparison."""
    mark = {"error": "✗", "warning": "warning:"}.get(finding.severity, "note:")
    lines = [f"{mark} **{escaped(finding.kind)}** {escaped(finding.message)}", ""]
    if comparison.simulated or comparison.planted:  # as the report's own first lines
        lines += ["**Not a fault of a device: simulated devices or a planted fault.**", ""]
    evidence = [one_line(line) for line in finding.detail[:MOST_EVIDENCE]]
    if len(finding.detail) > MOST_EVIDENCE:
        evidence.append(f"and {len(finding.detail) - MOST_EVIDENCE} more lines")
    if finding.next:
        evidence.append(f"next: {one_line(finding.next)}")
    if evidence:
        lines += [*fence(evidence), ""]
    if finding.tensors:
        lines.append(f"* tensors: {escaped(some(finding.tensors, _MOST_TENSORS))}")
    names = set(finding.workers)
    devices = [
        f"{worker.name} ({worker.architecture}, {worker.model})"
        for worker in comparison.workers
        if worker.name in names
    ]
    if devices:
        lines.append(f"* devices: {escaped(some(devices))}")
    case = " · ".join(escaped(text) for text in (comparison.case, *facts(comparison)))
    lines.append(f"* finding {number} of {case} · consistency {__version__}")
    return "".join(f"{line}\n" for line in lines)
