"""The formats of a report: each one is a file of this folder and a row of `FORMATS`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from consistency.comparison.result import Comparison
    from consistency.report.summary import Group


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
    """What a format may show beside the comparison.

    Attributes
    ----------
    elapsed_s : float or None
        Time that the run took.
    verbose : bool
        Every layer, not only those with a mismatch.
    folder : str or None
        Where the files of the report and the captures are.
    groups : mapping of str to sequence of Group, optional
        `summary.groups` by load path, where they are known already: computing them visits every row.
    """

    elapsed_s: float | None = None
    verbose: bool = False
    folder: str | None = None
    groups: Mapping[str, Sequence[Group]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of the report.

    Attributes
    ----------
    name : str
        For `--format`, the name of the file in `--out`, or the option.
    writer : str
        `module:function`, imported when the format is written; given a comparison and a `View`, it yields bytes.
    help : str
        For `--help`.
    """

    name: str
    chosen: Chosen
    writer: str
    help: str

    def render(self, comparison: Comparison, view: View) -> Iterable[bytes]:
        """Return the report piece by piece."""
        module, _, name = self.writer.partition(":")
        render: Callable[[Comparison, View], Iterable[bytes]] = getattr(importlib.import_module(module), name)
        return render(comparison, view)


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
        name="junit", chosen=Chosen.OPTION, writer="consistency.report.junit:render",
        help="JUnit XML: one test case per stage and worker",
    ),
)  # fmt: skip
"""`report.json` comes first of the files, because programs build on it."""


def formats(chosen: Chosen) -> Iterator[Format]:
    """Yield the formats that are asked for in this way."""
    return (row for row in FORMATS if row.chosen is chosen)
