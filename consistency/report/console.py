"""The console that reports are printed on, and the parts of a printed report: lines, headings, findings, tables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from consistency.capture.wording import and_more
from consistency.comparison.result import Finding, Severity
from consistency.comparison.suite import SuiteVerdict
from consistency.report.findings import COMMANDS, is_command
from consistency.report.marks import style_of
from consistency.text import one_line

PIPE_WIDTH = 140  # a pipe has no width: wide enough for names of layers, narrow enough for an issue tracker

_SEVERITIES: dict[Severity, tuple[str, str]] = {
    "error": ("red", ""),
    "warning": ("yellow", "warning: "),
    "note": ("", "note: "),
}
_PLAIN = str.maketrans({"·": "-", "×": "x", "–": "-", "…": "...", "→": "->", "✗": "x", "≤": "<=", "≠": "!=", "″": '"'})
"""Replacements where the output's encoding lacks a character."""

_TABLE_GAP = 3  # blanks between the columns of a table
_LEAST_LAST = 20  # columns for the last cells of a table, which are folded between words
_LEAST_ROOM = 20  # characters of a line, however narrow the terminal is

_HANG = 2  # columns by which the lines after the first line of a text are indented

_GAPS = (4, 2)  # blanks between the columns of a grid: the second where the first does not fit


class _Console(Console):
    """A console that leaves a closed pipe to the command line, which has an exit status for it: rich exits with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(file: TextIO | None = None) -> Console:
    """Return a console: colours on a terminal, plain text elsewhere. `COLUMNS` is the width of either."""
    file = file or sys.stdout
    console = _Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        width, height = console.size
        if not os.environ.get("COLUMNS", "").isdigit():  # rich heeds it
            width = max(width, PIPE_WIDTH)
        console.size = ConsoleDimensions(width, height)  # a given size is not asked for again with every line
    return console


@contextmanager
def without_trailing_blanks(console: Console) -> Iterator[None]:
    """Leave off the blanks that rich pads lines with, where the output is a file that people compare and paste."""
    if console.is_terminal:
        yield
        return
    with console.capture() as captured:
        yield
    console.file.write(stripped(captured.get(), console).decode(console.encoding or "ascii"))


def stripped(text: str, console: Console) -> bytes:
    """Return text that rich captured as bytes for a file, without trailing blanks."""
    if not console.is_terminal:
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    return text.encode(console.encoding or "ascii", "replace")  # rich folds with characters that not every encoding has


def print_table(console: Console, titles: Sequence[str], rows: Iterable[Sequence[Text]], *, indent: int = 0) -> None:
    """Print a table whose long cells are folded, never cut."""
    lines = [[Text(title, "bold") for title in titles], *rows]
    widths = [max(cell.cell_len for cell in column) for column in zip_longest(*lines, fillvalue=Text())]
    width = indent + sum(widths) + _TABLE_GAP * (len(widths) - 1)
    if width <= console.width and not _has_line_feed(lines):
        _print_fitting(console, lines, widths, indent)
        return
    table = Table(box=None, pad_edge=False, padding=(0, _TABLE_GAP, 0, 0))
    for title in titles:
        table.add_column(title, header_style="bold", overflow="fold")
    for cells in lines[1:]:
        table.add_row(*cells)
    console.print(Padding(table, (0, 0, 0, indent), expand=False))


def _has_line_feed(lines: Iterable[Iterable[Text]]) -> bool:
    return any("\n" in cell.plain for cells in lines for cell in cells)


def _print_fitting(console: Console, lines: Sequence[Sequence[Text]], widths: Sequence[int], indent: int) -> None:
    """Print a table that needs no folding as plain lines: rich measures every cell five times over."""
    console.print(Text("\n").join(padded(cells, widths, indent=indent) for cells in lines), soft_wrap=True)


def padded(cells: Sequence[Text], widths: Sequence[int], *, indent: int = 2, gap: int = _TABLE_GAP) -> Text:
    """Return a line of cells, each padded to the width of its column; there may be fewer cells than columns."""
    line = Text(" " * indent)
    for cell, width in zip(cells, widths, strict=False):
        line.append_text(cell)
        line.pad_right(width - cell.cell_len + gap)
    line.rstrip()
    return line


def print_rows(console: Console, titles: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """Print a table, or a paragraph for each row where the console is so narrow that words would be broken."""
    # The last column alone may be folded, but not within a word.
    widths = [max([len(title), *(len(cells[i]) for cells in rows)]) for i, title in enumerate(titles[:-1])]
    longest_word = max((_longest_word(cells[-1]) for cells in rows), default=0)
    if sum(widths) + _TABLE_GAP * len(widths) + max(longest_word, _LEAST_LAST) <= console.width:
        print_table(console, titles, rows)
        return
    for cells in rows:
        console.print(cells[0])
        titled_cells = zip(titles[1:], cells[1:], strict=True)
        facts = [Text(f"{title} ", "bold") + cell for title, cell in titled_cells if cell]
        console.print(Padding(Text(", ").join(facts), (0, 0, 0, 2), expand=False))


def _longest_word(text: Text) -> int:
    return max(map(len, text.plain.split()), default=0)


def plain_cells(*cells: object) -> list[Text]:
    """Return the cells of a row, without the control characters of a stranger's names."""
    return [Text(one_line("" if cell is None else cell)) for cell in cells]


class Writer:
    """Writes the parts of a report to one console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        encoding = (console.encoding or "ascii").lower()
        # None where every character can be written
        self._encoding = None if encoding.startswith("utf") else encoding

    def text(self, text: str, style: str = "") -> Text:
        """Return a text on one line, with replacements for the characters that the output cannot encode."""
        text = one_line(text)
        if self._encoding is not None:
            text = text.translate(_PLAIN).encode(self._encoding, "replace").decode(self._encoding)
        return Text(text, style=style)

    def line(self, text: str, *, indent: int = 2, hang: int = _HANG, style: str = "") -> None:
        """Write a text, folded between words; `hang` more blanks before its second line and those after it."""
        self.folded(self.text(text, style), indent=indent, hang=hang)

    def folded(self, text: Text, *, indent: int, hang: int = _HANG) -> None:
        """Write a text, folded between words: a name that is longer than a line stays whole, to be searched for.

        `hang` indents the lines after the first: without it, the end of a long name could look like a line of its own,
        such as a verdict.
        """
        for line in text.split("\n", allow_blank=True):
            room = max(_LEAST_ROOM, self.console.width - indent - hang)
            margin = indent
            for folded_line in line.divide(_folds(line.plain, room, first=room + hang)):
                folded_line.rstrip()
                self.console.print(Text(" " * margin).append_text(folded_line), soft_wrap=True)
                margin = indent + hang

    def items(self, texts: Iterable[str], *, indent: int = 2, hang: int = 0, style: str = "") -> None:
        """Write items side by side, folded between items, then between words."""
        lines: list[str] = []
        for text in texts:
            if not lines:
                lines.append(text)
                continue
            margin = indent if len(lines) == 1 else indent + hang
            room = max(_LEAST_ROOM, self.console.width - margin)
            longer = f"{lines[-1]}{' ' * _TABLE_GAP}{text}"
            if cell_len(longer) <= room:
                lines[-1] = longer
            else:
                lines.append(text)
        margin = indent
        for line in lines:
            self.line(line, indent=margin, style=style)
            margin = indent + hang

    def heading(self, parts: Sequence[str], *, below: Sequence[str] = ()) -> None:
        """Write a heading and the lines that belong to it, which a terminal folds: a command can be copied whole."""
        self.folded(self.text(" · ".join(parts), "bold"), indent=0, hang=2 + _HANG)
        for text in below:
            self.console.print(self.text(text, "dim"), soft_wrap=True)
        self.console.print()

    def verdict(self, verdict: SuiteVerdict, sentence: str, *, words: str = "") -> None:
        """Write the verdict, or other words in its colour, and its sentence."""
        text = self.text(words or verdict.upper(), f"bold {style_of(verdict)}")
        text.append_text(self.text(f"   {sentence}", "default"))
        self.folded(text, indent=2)
        self.console.print()

    def findings(self, findings: Iterable[Finding], *, most: int | None = None) -> None:
        """Write the errors and warnings, at most `most` of them, and the number of the others."""
        chosen = [finding for finding in findings if finding.severity != "note"]
        for number, finding in enumerate(chosen[:most], start=1):
            self.finding(finding, number)
        left_out = "" if most is None else and_more(len(chosen) - most, "finding")
        if left_out:
            self.line(f"{left_out}: -v shows all")

    def finding(self, finding: Finding, number: int) -> None:
        """Write a finding with its evidence and what to do next."""
        style, label = _SEVERITIES[finding.severity]
        self.line(f"{number:<3}{label}{finding.message}", hang=3, style=style)
        for text in finding.detail:
            if text.startswith(COMMANDS):
                self.step(text)
            else:
                self.line(text, indent=5)
        self.next_step(finding)
        self.console.print()

    def next_step(self, finding: Finding) -> None:
        """Write what to do next, if anything."""
        if finding.next is not None and is_command(finding.next):
            self.step(f"next: {finding.next}")
        elif finding.next:
            self.line(f"next: {finding.next}", indent=5)

    def step(self, text: str, *, indent: int = 5) -> None:
        """Write a command on one line, however long: if a part of it were pasted alone, it would run alone."""
        self.console.print(self.text(f"{' ' * indent}{one_line(text)}"), soft_wrap=True)

    def notes(self, findings: Iterable[Finding]) -> None:
        """Write the findings that are notes, each with its details and what to do next."""
        for finding in findings:
            if finding.severity == "note":
                self.line(f"note: {finding.message}")
                for text in finding.detail:
                    self.line(text, indent=8)
                self.next_step(finding)

    def table(self, titles: Sequence[str], rows: Iterable[Sequence[str]], *, left_out: int) -> None:
        """Print a table; where it does not fit, each row as lines of its own, so that no name is broken."""
        cells = [[self.text(cell) for cell in row] for row in rows]
        columns = zip_longest((Text(title) for title in titles), *cells, fillvalue=Text())
        widths = [max(text.cell_len for text in column) for column in columns]
        if 2 + sum(widths) + _TABLE_GAP * (len(widths) - 1) <= self.console.width:
            print_table(self.console, titles, cells, indent=2)
        else:
            for row in cells:
                self.items([text.plain for text in row], hang=3)
        if remaining := and_more(left_out):
            self.line(f"{remaining}: -v shows all")
        self.console.print()

    def grid_fits(self, titles: Sequence[Text], rows: Sequence[tuple[Text, Sequence[Text]]]) -> bool:
        """Report whether all columns of a grid fit beside one another."""
        label_width, widths = _grid_widths(titles, rows, Text())
        return 2 + label_width + sum(widths) + _GAPS[-1] * len(widths) <= self.console.width

    def grid(
        self, titles: Sequence[Text], rows: Sequence[tuple[Text, Sequence[Text]]], *, corner: Text | None = None
    ) -> None:
        """Print a label and cells per row, and never cut a cell.

        Columns that do not fit beside the labels follow below, with the labels again. A row without cells is a heading,
        as long as it likes: it takes no width from the cells.
        """
        corner = corner or Text()
        label_width, widths = _grid_widths(titles, rows, corner)
        room = self.console.width - 2 - label_width
        gap = next((gap for gap in _GAPS if sum(widths) + gap * len(widths) <= room), _GAPS[-1])
        for columns in _column_blocks([width + gap for width in widths], room):
            block_widths = [label_width, *(widths[index] for index in columns)]
            for label, cells in ((corner, titles), *rows):
                if not cells:
                    self.folded(label, indent=2)
                    continue
                line = padded([label, *(cells[index] for index in columns)], block_widths, gap=gap)
                self.console.print(line, soft_wrap=True)


def _folds(text: str, room: int, *, first: int) -> list[int]:
    """Return the indices, each of the start of a word, at which a new line begins.

    A line has room for `room` characters, the first one for `first`. A longer word has a line of its own.
    """
    indices: list[int] = []
    start, line_room = 0, first
    for word in re.finditer(r"\S+", text):
        if word.start() > start and cell_len(text[start : word.end()]) > line_room:
            indices.append(word.start())
            start, line_room = word.start(), room
    return indices


def _grid_widths(
    titles: Sequence[Text], rows: Sequence[tuple[Text, Sequence[Text]]], corner: Text
) -> tuple[int, list[int]]:
    """Return the width of the labels, and the widths of the columns; headings, which have no cells, are left out."""
    rows_with_cells = [(label, cells) for label, cells in rows if cells]
    label_width = max(label.cell_len for label in (corner, *(label for label, _ in rows_with_cells)))
    widths = []
    for i, title in enumerate(titles):
        column = [title, *(cells[i] for _, cells in rows_with_cells)]
        widths.append(max(cell.cell_len for cell in column))
    return label_width, widths


def _column_blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Return the indices of the columns that fit side by side, block by block, at least one column in each."""
    blocks: list[list[int]] = [[]]
    for index, width in enumerate(widths):
        if blocks[-1] and sum(widths[i] for i in blocks[-1]) + width > room:
            blocks.append([])
        blocks[-1].append(index)
    return blocks
