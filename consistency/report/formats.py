"""The formats of a report: each one is a file of this folder and a row of `FORMATS`; a plug-in has others."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from consistency import plugins
from consistency.optional import is_there
from consistency.report.runs import REPORT, RUN_STATUS, SUITE

if TYPE_CHECKING:
    from consistency.comparison.result import Comparison
    from consistency.comparison.suite import SuiteResult
    from consistency.report.summary import Rows


class Chosen(StrEnum):
    """How a user asks for a format."""

    FORMAT = "--format"
    """`--format NAME` prints it."""
    OUT = "--out"
    """`--out DIR` leaves it in the folder, under the name of the format."""
    OPTION = "--NAME FILE"
    """An option with the name of the format takes the file to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a format may show beside the comparison."""

    elapsed_s: float | None = None  # time that the run took
    verbose: bool = False  # every layer, not only those with a mismatch, and every case
    folder: str | None = None  # folder of the report's files and of the captures
    # `summary.all_rows`, where they are computed already: that visits every outcome
    rows: Rows | None = None
    most_rows: int | None = None  # rows of a table of cases; None is all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of the report of a run, and of a suite where it has a name for that."""

    name: str  # for `--format`, the name of the file in `--out`, or the option
    suite: str = ""
    chosen: Chosen
    writer: str  # `module:function`, imported when used; of a comparison or a suite, and a `View`, it yields bytes
    help: str  # for `--help`

    def render(self, result: Comparison | SuiteResult, view: View) -> Iterable[bytes]:
        """Return the report, piece by piece."""
        render: Callable[[object, View], Iterable[bytes]] = pkgutil.resolve_name(self.writer)
        return render(result, view)


FORMATS: tuple[Format, ...] = (
    *(
        Format(name=name, suite=suite, chosen=chosen, writer=f"consistency.report.{writer}:render", help=text)
        for name, suite, chosen, writer, text in (
            ("text", "text", Chosen.FORMAT, "terminal", "for people"),
            ("json", "json", Chosen.FORMAT, "json", "report.json"),
            ("github", "github", Chosen.FORMAT, "github", "text, and annotations of a GitHub Actions run"),
            (REPORT, SUITE, Chosen.OUT, "json", "for programs"),
            ("report.html", "suite.html", Chosen.OUT, "html", "one page"),
            ("report.md", "suite.md", Chosen.OUT, "markdown", "for an issue"),
            ("junit", "junit", Chosen.OPTION, "junit", "JUnit XML: one test case per stage and worker"),
        )
    ),
)
"""`report.json` comes first of the files, because programs build on it; those of plug-ins come last.

What is printed has the same name for a run and a suite; files have different ones.
"""


def shared() -> Iterator[Format]:
    """Yield the files of a report that are made for people and programs to read, without the status for monitoring."""
    return (row for row in formats(Chosen.OUT) if row.name != RUN_STATUS)


def formats(chosen: Chosen, *, of_suite: bool = False) -> Iterator[Format]:
    """Yield the formats that are asked for in this way, by their names for a run or for a suite."""
    for row in (*FORMATS, *(row for _, row in plugins.offered("formats"))):
        has_name = bool(row.suite) or not of_suite
        if row.chosen is chosen and is_there(row.writer) and has_name:
            yield replace(row, name=row.suite) if of_suite else row
