"""The tolerance report: layers, worst first, and what each architecture saw of them; in a terminal and as CSV.

In a terminal architectures are columns where they fit beside the longest name; otherwise each has a line below the
layer. Names are never cut or broken: they are searched for.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from consistency.capture.wording import counted, some
from consistency.comparison.layers import (
    Block,
    LayerCell,
    LayerComparison,
    LayerFilter,
    block_of,
    blocks_of,
    layers_of,
    worst_by_architecture,
)
from consistency.comparison.result import BAD, Comparison
from consistency.numerics.real import Real
from consistency.report.console import Writer, make_console, padded, stripped
from consistency.report.marks import MARKS, key, style_of
from consistency.text import one_line

MOST_ROWS = 8
"""Rows of a stage beside others; of a stage alone `MOST_ROWS_OF_ONE`."""

MOST_ROWS_OF_ONE = 20

LEGEND = (
    "   ".join(f"{mark} {meaning}" for _, mark, meaning in key(("equal", "within", "outside", "blocked", "skipped"))),
    "0 ULP: the exact value, correctly rounded",
    "each figure: worst |difference| / allowed, their ratio, ULP; of another tensor of the block, with its name",
    "{a} {b}: devices of one architecture that differ bitwise",
)

_GAP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShownCell:
    """A cell, and the name of its tensor where the row does not name it."""

    cell: LayerCell
    tensor: str = ""

    @property
    def text(self) -> str:
        figures = cell_figures(self.cell)
        return f"{figures}  {one_line(self.tensor)}" if self.tensor and len(figures) > 1 else figures


def render(
    comparison: Comparison, chosen: LayerFilter, *, verbose: bool = False, console: Console | None = None
) -> Iterator[bytes]:
    """Yield the tolerance report as a console takes it.

    Blocks of a model are folded into their worst tensor unless `chosen` has a pattern, or `verbose` asks for all.
    """
    console = console or make_console()
    with console.capture() as captured:
        _write(Writer(console), comparison, list(chosen.chosen(layers_of(comparison))), chosen, verbose=verbose)
    yield stripped(captured.get(), console)


def summary_lines(layers: Iterable[LayerComparison]) -> Iterator[tuple[str, str]]:
    """Yield a line per architecture and stage, with its worst layer, each with the status of that."""
    for (architecture, stage), one in worst_by_architecture(layers).items():
        cell = one.architectures[architecture]
        yield cell.status, f"{one_line(architecture)}  {stage}: {cell_figures(cell)}  {one_line(one.name)}".rstrip()


def cell_figures(cell: LayerCell) -> str:
    """Write a cell as `≤ 4.1e-05 / 5.5e-05  0.74  12 ULP`."""
    mark = MARKS[cell.status][0]
    if cell.status in ("equal", "skipped", "blocked"):
        return mark
    if cell.status == "within" and cell.max_ulp == 0:
        return "= 0 ULP"
    parts = [mark if cell.status in ("within", "outside") else f"{mark} {cell.status}"]
    if cell.max_abs is not None:
        allowed = "" if cell.allowed is None else f" / {_number(cell.allowed)}"
        parts[0] += f" {_number(cell.max_abs)}{allowed}"
    if cell.ratio is not None:
        parts.append(f"{float(cell.ratio):.3g}" if cell.status in BAD else f"{float(cell.ratio):.2f}")
    if cell.max_ulp is not None:
        parts.append(f"{cell.max_ulp} ULP")
    return "  ".join(parts)


def devices_text(cell: LayerCell) -> str:
    """Name the devices of a cell; in braces, by class, where they differ bitwise."""
    if len(cell.classes) <= 1:
        return some(cell.workers, 4)
    texts = ["{" + some(names, 3) + "}" for names in cell.classes[:3]]
    others = cell.classes[3:]
    return " ".join([*texts, *([f"and {sum(map(len, others))} in {len(others)} more"] if others else [])])


def _number(value: Real) -> str:
    return f"{float(value):.2g}"


def _write(
    write: Writer, comparison: Comparison, layers: Sequence[LayerComparison], chosen: LayerFilter, *, verbose: bool
) -> None:
    stages = list(dict.fromkeys((one.stage, one.load_path) for one in layers))
    if not layers:
        write.line("no layer of this report matches")
        return
    most = MOST_ROWS if len(stages) > 1 else MOST_ROWS_OF_ONE
    architectures = [group.name for group in comparison.architectures]
    for stage, load_path in stages:
        own = [one for one in layers if (one.stage, one.load_path) == (stage, load_path)]
        rows = _rows(own, folded=not verbose and not chosen.pattern)
        rows.sort(key=lambda row: row.worst.badness, reverse=True)  # stable: as bad in the model's order
        shown = rows if verbose else [row for row in rows if row.worst.badness[0] > 1][:most]
        left = rows[len(shown) :]
        here = [name for name in architectures if any(name in one.architectures for one in own)]
        path = f" (load path {load_path})" if load_path != comparison.load_paths[0] else ""
        write.line(f"{stage}{path}", style="bold", indent=0)
        if shown:
            _write_rows(write, shown, here)
        if left:
            equal = all(row.worst.badness[0] <= 1 for row in left)
            number = sum(len(row.members) for row in left)
            count = counted(number, "tensor" if not shown else "more tensor")
            write.line(f"{count}{': bitwise equal' if equal else ', none worse'}", style="dim")
        write.console.print()
    for text in LEGEND:
        write.line(text, style="dim")


def _rows(layers: Sequence[LayerComparison], *, folded: bool) -> list[Block]:
    """Return the rows of a stage: its blocks, or, not folded, every layer as a block of its own."""
    if folded:
        return blocks_of(layers)
    return [Block(name=block_of(one.layer), stage=one.stage, load_path=one.load_path, members=(one,)) for one in layers]


def _note(row: Block) -> str:
    """Return of how many tensors the row shows the worst; empty where it is of one."""
    return f"worst of {len(row.members)} in {one_line(row.name)}" if len(row.members) > 1 else ""


def _cells(row: Block, architectures: Sequence[str]) -> list[_ShownCell | None]:
    """Return what each architecture saw: its own worst tensor, named where it is not the row's."""
    worst, named = row.worst_by_architecture(), row.worst.name
    cells: list[_ShownCell | None] = []
    for name in architectures:
        one = worst.get(name)
        if one is None:
            cells.append(None)
        else:
            tensor = "" if one.name == named else _within(row, one)
            cells.append(_ShownCell(cell=one.architectures[name], tensor=tensor))
    return cells


def _name(one: LayerComparison) -> str:
    return one_line(f"{one.layer}.{one.tensor}")


def _within(block: Block, one: LayerComparison) -> str:
    """Name a tensor of a block by what follows the block's name."""
    return f"{one.layer}.{one.tensor}".removeprefix(f"{block.name}.")


def _write_rows(write: Writer, rows: Sequence[Block], architectures: Sequence[str]) -> None:
    cells = [_cells(row, architectures) for row in rows]
    texts = [[Text() if cell is None else _cell(write, cell) for cell in line] for line in cells]
    titles = [_title(write, name, [line[i] for line in cells]) for i, name in enumerate(architectures)]
    labels = [write.text(_name(row.worst)) for row in rows]
    label = max(text.cell_len for text in labels)
    widths = [max(text.cell_len for text in (*title, *(line[i] for line in texts))) for i, title in enumerate(titles)]
    if 2 + label + sum(widths) + _GAP * len(widths) > write.console.width:
        _write_turned(write, rows, cells, architectures)
        return
    for number in (0, 1):
        write.console.print(padded([Text(), *(title[number] for title in titles)], [label, *widths]))
    for row, name, line in zip(rows, labels, texts, strict=True):
        write.console.print(padded([name, *line], [label, *widths]))
        if note := _note(row):
            write.line(note, indent=4, style="dim")


def _title(write: Writer, name: str, cells: Sequence[_ShownCell | None]) -> tuple[Text, Text]:
    """Return an architecture and its devices, which have a line of their own."""
    workers = dict.fromkeys(worker for one in cells if one is not None for worker in one.cell.workers)
    return write.text(one_line(name), "bold"), write.text(some(list(workers), 3), "dim")


def _cell(write: Writer, shown: _ShownCell) -> Text:
    text = shown.text
    if len(shown.cell.classes) > 1:
        text += f"  {devices_text(shown.cell)}"
    return write.text(text, style_of(shown.cell.status))


def _write_turned(
    write: Writer,
    rows: Sequence[Block],
    cells: Sequence[Sequence[_ShownCell | None]],
    architectures: Sequence[str],
) -> None:
    """Write each layer's name on a line of its own, and a line per architecture below it."""
    label = max(len(one_line(name)) for name in architectures)
    for row, of_row in zip(rows, cells, strict=True):
        write.console.print(Text("  ").append_text(write.text(_name(row.worst))), soft_wrap=True)
        if note := _note(row):
            write.line(note, indent=4, style="dim")
        for name, shown in zip(architectures, of_row, strict=True):
            if shown is None:
                continue
            cell = shown.cell
            line = write.text(f"    {one_line(name)}")
            line.pad_right(label + 4 + _GAP - line.cell_len)
            line.append_text(write.text(shown.text, style_of(cell.status)))
            devices = write.text(devices_text(cell), "dim" if len(cell.classes) <= 1 else "")
            if line.cell_len + _GAP + devices.cell_len <= write.console.width:
                line.pad_right(_GAP)
                write.console.print(line.append_text(devices))
            else:
                write.console.print(line)
                write.console.print(Padding(devices, (0, 0, 0, label + 4 + _GAP), expand=False))


COLUMNS = (
    "stage", "load_path", "layer", "tensor", "architecture", "workers", "status", "max_abs", "allowed", "ratio",
    "max_ulp", "classes",
)  # fmt: skip

_FORMULA = ("=", "+", "-", "@")
"""How a cell begins that a spreadsheet computes: names may come from a stranger."""


def render_csv(layers: Iterable[LayerComparison]) -> Iterator[bytes]:
    """Yield the titles, and the lines of each tensor; workers of one class are bitwise equal."""
    yield _csv_line(COLUMNS)
    for one in layers:
        for architecture, cell in one.architectures.items():
            names = (one.stage, one.load_path, one.layer, one.tensor, architecture, " ".join(cell.workers), cell.status)
            figures = (cell.max_abs, cell.allowed, cell.ratio, cell.max_ulp)
            classes = " | ".join(" ".join(workers) for workers in cell.classes)
            yield _csv_line([*map(_csv_text, names), *map(_figure, figures), _csv_text(classes)])


def _csv_line(cells: Iterable[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _csv_text(name: str) -> str:
    text = one_line(name)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _figure(value: Real | int | None) -> str:
    return "" if value is None else repr(value) if isinstance(value, int) else repr(float(value))
