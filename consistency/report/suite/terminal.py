"""The suite that a person reads in a terminal: the verdict, what to do about it, and one line per case."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from consistency.capture.wording import and_more
from consistency.comparison.result import PLANTED
from consistency.comparison.suite import SuiteResult
from consistency.report.console import Writer, make_console, stripped
from consistency.report.formats import View
from consistency.report.merging import MERGING, MERGING_LEGEND
from consistency.report.sentences import cell_text, legend
from consistency.report.suite.findings import findings_of
from consistency.report.suite.table import case_lines, columns, seconds, suite_facts, suite_origin

MOST_CASES = 20
"""Lines of the table: with verdict and findings, a screen."""

_MOST_FINDINGS, _MOST_NOTES = 10, 5
_STYLES = {"equal": "green", "within": "green", "outside": "bold red", "blocked": "yellow"}
_VERDICTS = {"consistent": "green", "inconsistent": "bold red"}


def render(suite: SuiteResult, view: View, console: Console | None = None) -> Iterator[bytes]:
    """Yield the report as a console takes it: that of standard output where none is given."""
    console = console or make_console()
    with console.capture() as captured:
        _write(Writer(console), suite, view)
    yield stripped(captured.get(), console)


def _write(write: Writer, suite: SuiteResult, view: View) -> None:
    simulated = ["SIMULATED DEVICES"] if suite.simulated else []
    simulated += ["PLANTED FAULT"] if suite.planted else []
    parts = ["consistency", suite.name, *suite_facts(suite), seconds(suite.elapsed_s), *simulated]
    write.heading(parts, below=suite_origin(suite))
    write.verdict(suite.verdict, suite.sentence)
    found = findings_of(suite, view.folder)
    write.findings(found, most=None if view.verbose else _MOST_FINDINGS)
    _table(write, suite, None if view.verbose else MOST_CASES)
    notes = [finding for finding in found if finding.severity == "note"]
    notes.sort(key=lambda note: note.kind != PLANTED)  # a drill must not be mistaken for a real fault
    shown = notes if view.verbose else notes[:_MOST_NOTES]
    write.notes(shown)
    if rest := and_more(len(notes) - len(shown), "note"):
        write.line(f"{rest}: -v shows all")
    if suite.not_checked:
        write.line(f"not checked: {', '.join(suite.not_checked)}")
    for text in suite.unwritten:
        write.line(f"not written: {text}", style="yellow")
    if view.folder is not None:
        write.line(f"reports: {view.folder}")


def _table(write: Writer, suite: SuiteResult, most: int | None) -> None:
    names = columns(suite)
    lines = case_lines(suite.cases, most)
    merges = any(line.merging for line in lines)
    rows: list[tuple[Text, list[Text]]] = []
    for line in lines:
        cells = [cell_text(name, line.cells.get(name)) for name in names]
        texts = [write.text(f"{c.mark} {c.text}".rstrip(), _STYLES.get(c.kind, "dim")) for c in cells]
        texts += [write.text(line.merging)] if merges else []
        verdict = write.text(line.verdict, _VERDICTS.get(line.verdict, "yellow"))
        rows.append((write.text(line.label), [verdict, *texts, write.text(seconds(line.elapsed_s))]))
    titles = [write.text(text, "bold") for text in ("verdict", *names, *([MERGING] if merges else []), "time")]
    if rows:
        write.grid(titles, rows, corner=write.text("case", "bold"))
    explained = [f"{mark} {meaning}" for _, mark, meaning in legend(line.cells for line in lines)]
    explained += [MERGING_LEGEND] if merges else []
    write.line("   ".join(explained), style="dim")
    if any(line.case is None for line in lines):
        write.line("-v shows a line for every case", style="dim")
    write.console.print()
