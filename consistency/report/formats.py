"""The formats of a report: each one is a file of this folder and a row of `FORMATS`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from consistency.optional import is_there
from consistency.report.runs import RUN_STATUS, SUITE_STATUS

if TYPE_CHECKING:
    from consistency.comparison.result import Comparison
    from consistency.comparison.suite import SuiteResult
    from consistency.report.summary import Architecture


class Subject(StrEnum):
    """What a report is about."""

    RUN = "run"
    """One `Comparison`."""
    SUITE = "suite"
    """The `SuiteResult` of many cases, each of which also has a report of its own."""


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
    folder: str | None = None  # where the files of the report and the captures are
    # `summary.groups` by load path, where they are known already: computing them visits every row
    groups: Mapping[str, Sequence[Architecture]] | None = None
    most_rows: int | None = None  # rows of a table of cases; None is all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of the report."""

    name: str  # for `--format`, the name of the file in `--out`, or the option
    chosen: Chosen
    # `module:function`, imported when the format is written; given a comparison, or the result of a suite, and a
    # `View`, it yields bytes
    writer: str
    help: str  # for `--help`
    subject: Subject = Subject.RUN

    def render(self, found: Comparison | SuiteResult, view: View) -> Iterable[bytes]:
        """Return the report of what the row's subject is, piece by piece."""
        render: Callable[[object, View], Iterable[bytes]] = pkgutil.resolve_name(self.writer)
        return render(found, view)


FORMATS: tuple[Format, ...] = (
    Format(name="text", chosen=Chosen.FORMAT, writer="consistency.report.terminal:render", help="for people"),
    Format(name="json", chosen=Chosen.FORMAT, writer="consistency.report.json:render", help="report.json"),
    Format(
        name="github", chosen=Chosen.FORMAT, writer="consistency.report.github:render",
        help="text, and annotations of a GitHub Actions run",
    ),
    Format(name="report.json", chosen=Chosen.OUT, writer="consistency.report.json:render", help="for programs"),
    Format(name="report.html", chosen=Chosen.OUT, writer="consistency.report.html:render", help="one page"),
    Format(name="report.md", chosen=Chosen.OUT, writer="consistency.report.markdown:render", help="for an issue"),
    Format(
        name=RUN_STATUS, chosen=Chosen.OUT, writer="consistency.report.status.make:render", help="for `status`"
    ),
    Format(
        name="junit", chosen=Chosen.OPTION, writer="consistency.report.junit:render",
        help="JUnit XML: one test case per stage and worker",
    ),
    *(
        Format(name=name, chosen=chosen, writer=f"consistency.report.{writer}", help=text, subject=Subject.SUITE)
        for name, chosen, writer, text in (
            ("text", Chosen.FORMAT, "terminal:render", "for people"),
            ("json", Chosen.FORMAT, "suite_json:render", "suite.json"),
            ("github", Chosen.FORMAT, "github:render", "text, and annotations of a GitHub Actions run"),
            ("suite.json", Chosen.OUT, "suite_json:render", "for programs"),
            ("suite.html", Chosen.OUT, "html:render", "one page, with links to those of the cases"),
            ("suite.md", Chosen.OUT, "markdown:render", "for an issue"),
            ("junit", Chosen.OPTION, "junit:render", "JUnit XML: one test suite per case"),
            (SUITE_STATUS, Chosen.OUT, "status.make:render_suite", "for `status`"),
        )
    ),
)  # fmt: skip
"""`report.json` comes first of the files, because programs build on it, and the status last, because it sums them up.

What is printed has the same name for both subjects; files have different ones.
"""


def shared() -> Iterator[Format]:
    """Yield the files of a report that are made for others to read."""
    return (row for row in formats(Chosen.OUT) if row.name != RUN_STATUS)


def formats(chosen: Chosen, subject: Subject = Subject.RUN) -> Iterator[Format]:
    """Yield the formats of a subject that are asked for in this way."""
    return (row for row in FORMATS if row.chosen is chosen and row.subject is subject and is_there(row.writer))
