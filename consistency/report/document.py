"""The content of a report, in reading order and without layout: what the terminal, `report.md` and `report.html` print.

`documents.py` makes it from a comparison or from the result of a suite. What only one format has room for stays with
that format: the tensors in a terminal, the map of layers on the page.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from consistency.comparison import kinds
from consistency.comparison.result import Finding
from consistency.comparison.suite import SuiteVerdict
from consistency.optional import is_there
from consistency.report.summary import Row, by_architecture

EXPLAINED = "what this means, what causes it, and what to do"
"""Words for the output of the command below the findings, with which a report announces that command."""

_EXPLAIN = "consistency.cli.commands.explain"
_MOST_EXPLAINED = 5


@functools.cache
def _explained() -> frozenset[str]:
    """Return the kinds of findings that the glossary explains; a stranger's report may have others."""
    return kinds.known()


LegendRow = tuple[str, str, str]
"""Kind of a cell, its mark, and what it means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of cells; `short` is its title where there is no room."""

    title: str
    short: str = ""
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTable:
    """Results at a glance."""

    label: str  # `workers` or `case`: the title of the column that names the rows
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    heading: str = ""  # `architecture` where rows are below headings; empty where there are none
    title: str = ""  # load path, where there are several
    reference: str | None = None  # the worker that others are compared with

    @property
    def by_heading(self) -> list[tuple[Row, ...]]:
        """Return the rows below each heading."""
        return by_architecture(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A finding as it is shown; in a suite, with its cases: the name of each, and the folder of its report if any."""

    finding: Finding
    number: int
    cases: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table of text."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A report, in the order in which it is read."""

    name: str  # of the case or the suite
    facts: tuple[str, ...]  # what was checked, in a few words each
    verdict: SuiteVerdict
    sentence: str
    # the findings, most severe first, numbered as `consistency reproduce --finding` takes them; notes come last
    entries: tuple[Entry, ...]
    tables: tuple[ResultTable, ...]
    legend: tuple[LegendRow, ...]
    origin: str = ""  # when, where and with which versions
    command: str = ""  # the command line
    sources: tuple[str, ...] = ()  # where each of several captures is from
    simulated: bool = False
    planted: tuple[str, ...] = ()
    # kind of a cell and a sentence: alternative load paths, how many workers agree, where they first differ
    remarks: tuple[tuple[str, str], ...] = ()
    merging: tuple[str, ...] = ()  # what merging does to the outputs
    not_checked: tuple[str, ...] = ()  # what was left out
    not_checked_title: str = "not checked"
    unwritten: tuple[str, ...] = ()  # files that cannot be written, and why
    layers: Sheet | None = None  # the layers nearest to their tolerance or beyond it, by architecture
    environment: tuple[str, ...] = ()  # versions and devices, a line each
    file: str = "report.json"  # the file for programs that holds everything

    @property
    def not_checked_text(self) -> str:
        """Return one line on the parts that were left out; empty where none was."""
        return f"{self.not_checked_title}: {', '.join(self.not_checked)}" if self.not_checked else ""

    @property
    def to_act_on(self) -> list[Entry]:
        """Return the errors and warnings."""
        return [entry for entry in self.entries if entry.finding.severity != "note"]

    @property
    def explain_command(self) -> str:
        """Return the command that explains the first kinds of findings to act on; empty without such a finding."""
        if not is_there(_EXPLAIN):  # an installation without that command
            return ""
        kinds_to_act_on = dict.fromkeys(str(entry.finding.kind) for entry in self.to_act_on)
        chosen = [kind for kind in kinds_to_act_on if kind in _explained()][:_MOST_EXPLAINED]
        return " ".join(["consistency explain", *chosen]) if chosen else ""

    @property
    def notes(self) -> list[Entry]:
        """Return the notes. The note of a planted fault comes first: a drill must not be mistaken for a real fault."""
        notes = [entry for entry in self.entries if entry.finding.severity == "note"]
        return sorted(notes, key=lambda entry: entry.finding.kind != kinds.PLANTED)

    @property
    def drill(self) -> str:
        """Return the messages of planted faults, in one line."""
        return "; ".join(entry.finding.message for entry in self.entries if entry.finding.kind == kinds.PLANTED)


def numbered(findings: Sequence[Finding]) -> tuple[Entry, ...]:
    """Return the findings of a report with their numbers."""
    return tuple(Entry(finding=finding, number=number) for number, finding in enumerate(findings, 1))
