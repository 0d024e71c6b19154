"""The document that the terminal, `report.md` and `report.html` print: what they say, in which order, decided once.

It is made from a comparison or from the result of a suite (`of_comparison.py`, `of_suite.py`), and has no layout. What
only one of them has room for stays with that one: the tensors in a terminal, the map of layers on the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from consistency.capture.engine_causes import Cause
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import Finding
from consistency.comparison.suite import SuiteVerdict
from consistency.numerics.words import Word
from consistency.optional import is_there
from consistency.report.sentences import CellText

EXPLAINED = "what this means, what causes it, and what to do"
"""What the command below the findings prints."""

_EXPLAIN = "consistency.cli.commands.explain"
_EXPLAINED: frozenset[str] = frozenset({*Word, *FindingKind, *Cause})  # a stranger's report may have other kinds
_MOST_EXPLAINED = 5

LegendRow = tuple[str, str, str]
"""Kind of a cell, its mark, and what it means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of cells; `short` is its title where there is no room."""

    title: str
    short: str = ""
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table.

    Attributes
    ----------
    names : tuple of str
        Workers that are bitwise equal, or the case.
    kinds : int
        More than 1 where the row sums up all results without a row of their own.
    folder : str or None
        Of the case's own report, relative to this one's.
    remark : str
        One sentence on the case.
    """

    names: tuple[str, ...]
    cells: tuple[CellText, ...]
    kinds: int = 1
    folder: str | None = None
    remark: str = ""

    @property
    def bad(self) -> bool:
        """Return whether any cell is a mismatch or has an error finding."""
        return any(cell.kind in ("outside", "flagged") for cell in self.cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows below one heading: an architecture and its models; a table of cases has one without a title."""

    rows: tuple[Row, ...]
    title: str = ""
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTable:
    """Results at a glance.

    Attributes
    ----------
    label : str
        What a row is of: `workers`, `case`.
    heading : str
        What the groups are, empty where there are none.
    title : str
        Load path, where there are several.
    reference : str or None
        The worker that others are compared with.
    """

    label: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    heading: str = ""
    title: str = ""
    reference: str | None = None

    @property
    def rows(self) -> Iterator[tuple[Group, Row]]:
        return ((group, row) for group in self.groups for row in group.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A finding as it is shown; of a suite, with the cases that have it: name, and folder of the report if any."""

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
    """A report, in the order in which it is read.

    Attributes
    ----------
    name : str
        Of the case or the suite.
    facts : tuple of str
        What was checked, in a few words each.
    origin : str
        When, where and with which versions.
    command : str
        The command line.
    sources : tuple of str
        Where each of several captures is from.
    entries : tuple of Entry
        The findings, most severe first, numbered as `consistency reproduce --finding` takes them; notes come last.
    remarks : tuple of (str, str)
        Kind of a cell and a sentence: alternative load paths, how many workers agree, where they first differ.
    merging : tuple of str
        What merging does to the outputs.
    not_checked : str
        What was left out, in one line.
    unwritten : tuple of str
        Files that cannot be written, and why.
    layers : Sheet or None
        The layers nearest to their tolerance or beyond it, by architecture.
    environment : tuple of str
        Versions and devices, a line each.
    file : str
        The file for programs that holds everything.
    """

    name: str
    facts: tuple[str, ...]
    verdict: SuiteVerdict
    sentence: str
    entries: tuple[Entry, ...]
    tables: tuple[ResultTable, ...]
    legend: tuple[LegendRow, ...]
    origin: str = ""
    command: str = ""
    sources: tuple[str, ...] = ()
    simulated: bool = False
    planted: tuple[str, ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()
    merging: tuple[str, ...] = ()
    not_checked: str = ""
    unwritten: tuple[str, ...] = ()
    layers: Sheet | None = None
    environment: tuple[str, ...] = ()
    file: str = "report.json"

    @property
    def to_act_on(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.finding.severity != "note"]

    @property
    def explain_command(self) -> str:
        """Return the command that explains the first kinds of findings to act on; empty where it has none of them."""
        known = _EXPLAINED if is_there(_EXPLAIN) else frozenset()
        kinds = dict.fromkeys(str(entry.finding.kind) for entry in self.to_act_on)
        chosen = [kind for kind in kinds if kind in known][:_MOST_EXPLAINED]
        return " ".join(["consistency explain", *chosen]) if chosen else ""

    @property
    def notes(self) -> list[Entry]:
        """Return the notes, that of a planted fault first: a drill must not be mistaken for a real fault."""
        notes = [entry for entry in self.entries if entry.finding.severity == "note"]
        return sorted(notes, key=lambda entry: entry.finding.kind != FindingKind.PLANTED)

    @property
    def drill(self) -> str:
        """Return the messages of planted faults, in one line."""
        return "; ".join(entry.finding.message for entry in self.entries if entry.finding.kind == FindingKind.PLANTED)


def numbered(findings: Sequence[Finding]) -> tuple[Entry, ...]:
    """Return the findings of a report with their numbers."""
    return tuple(Entry(finding=finding, number=number) for number, finding in enumerate(findings, 1))
