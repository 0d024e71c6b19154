"""The tolerance report: layers, worst first, with the error on each architecture; in a terminal and as CSV.

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
from consistency.comparison.outcomes import group_by_key
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

_GAP = 3  # blanks between columns
_INDENT = 4  # blanks before the lines below a layer
_MOST_CLASSES = 3  # classes of devices that are named


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShownCell:
    """An architecture's cell in a row, and the name of its tensor where that is not the tensor of the row."""

    cell: LayerCell
    tensor: str = ""

    @property
    def text(self) -> str:
        figures = cell_figures(self.cell)
        has_figures = len(figures) > 1  # otherwise it is a mark alone
        return f"{figures}  {one_line(self.tensor)}" if self.tensor and has_figures else figures


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
    """Yield the status and a line of text for the worst layer of each architecture and stage."""
    for (architecture, stage), layer in worst_by_architecture(layers).items():
        cell = layer.architectures[architecture]
        yield cell.status, f"{one_line(architecture)}  {stage}: {cell_figures(cell)}  {one_line(layer.name)}".rstrip()


def cell_figures(cell: LayerCell) -> str:
    """Write a cell as `≤ 4.1e-05 / 5.5e-05  0.74  12 ULP`."""
    mark = MARKS[cell.status][0]
    if cell.status in ("equal", "skipped", "blocked"):
        return mark
    if cell.status == "within" and cell.max_ulp == 0:
        return "= 0 ULP"
    error = mark if cell.status in ("within", "outside") else f"{mark} {cell.status}"
    if cell.max_abs is not None:
        allowed = "" if cell.allowed is None else f" / {_number(cell.allowed)}"
        error += f" {_number(cell.max_abs)}{allowed}"
    parts = [error]
    if cell.ratio is not None:
        # The ratio of a mismatch may be of any size, one within tolerance is at most 1.
        parts.append(f"{float(cell.ratio):.3g}" if cell.status in BAD else f"{float(cell.ratio):.2f}")
    if cell.max_ulp is not None:
        parts.append(f"{cell.max_ulp} ULP")
    return "  ".join(parts)


def devices_text(cell: LayerCell) -> str:
    """Name the devices of a cell; in braces, by class, where they differ bitwise."""
    if len(cell.classes) <= 1:
        return some(cell.workers, 4)
    texts = ["{" + some(names, 3) + "}" for names in cell.classes[:_MOST_CLASSES]]
    unnamed_classes = cell.classes[_MOST_CLASSES:]
    if unnamed_classes:
        texts.append(f"and {sum(map(len, unnamed_classes))} in {len(unnamed_classes)} more")
    return " ".join(texts)


def _number(value: Real) -> str:
    return f"{float(value):.2g}"


def _write(
    write: Writer, comparison: Comparison, layers: Sequence[LayerComparison], chosen: LayerFilter, *, verbose: bool
) -> None:
    """Write a block of rows per stage and load path, and then what the marks mean."""
    if not layers:
        write.line("no layer of this report matches")
        return
    layers_by_stage = group_by_key(((layer.stage, layer.load_path), layer) for layer in layers)
    most = MOST_ROWS if len(layers_by_stage) > 1 else MOST_ROWS_OF_ONE
    for (stage, load_path), stage_layers in layers_by_stage.items():
        path = f" (load path {load_path})" if load_path != comparison.load_paths[0] else ""
        write.line(f"{stage}{path}", style="bold", indent=0)
        rows = _rows(stage_layers, folded=not verbose and not chosen.pattern)
        rows.sort(key=lambda row: row.worst.badness, reverse=True)  # stable: as bad in the model's order
        shown = rows if verbose else [row for row in rows if not _is_equal(row)][:most]
        architectures = [
            group.name
            for group in comparison.architectures
            if any(group.name in layer.architectures for layer in stage_layers)
        ]
        if shown:
            _write_rows(write, shown, architectures)
        left_out = rows[len(shown) :]
        if left_out:
            count = sum(len(row.members) for row in left_out)
            counted_tensors = counted(count, "more tensor" if shown else "tensor")
            remark = ": bitwise equal" if all(map(_is_equal, left_out)) else ", none worse"
            write.line(f"{counted_tensors}{remark}", style="dim")
        write.console.print()
    for text in LEGEND:
        write.line(text, style="dim")


def _is_equal(row: Block) -> bool:
    """Return whether every tensor of a row is bitwise equal on all devices, or was not compared."""
    return row.worst.badness[0] <= 1


def _rows(layers: Sequence[LayerComparison], *, folded: bool) -> list[Block]:
    """Return the rows of a stage: its blocks, or, not folded, every layer as a block of its own."""
    if folded:
        return blocks_of(layers)
    return [
        Block(name=block_of(layer.layer), stage=layer.stage, load_path=layer.load_path, members=(layer,))
        for layer in layers
    ]


def _note(row: Block) -> str:
    """Return `worst of 7 in BLOCK` for a row that stands for several tensors; empty for a row of one."""
    return f"worst of {len(row.members)} in {one_line(row.name)}" if len(row.members) > 1 else ""


def _cells(row: Block, architectures: Sequence[str]) -> list[_ShownCell | None]:
    """Return the worst tensor of a row on each architecture, named where it is another; None where there is none."""
    worst, row_tensor = row.worst_by_architecture(), row.worst.name
    cells: list[_ShownCell | None] = []
    for name in architectures:
        layer = worst.get(name)
        if layer is None:
            cells.append(None)
        else:
            tensor = "" if layer.name == row_tensor else _name_in_block(row, layer)
            cells.append(_ShownCell(cell=layer.architectures[name], tensor=tensor))
    return cells


def _name(layer: LayerComparison) -> str:
    return one_line(f"{layer.layer}.{layer.tensor}")


def _name_in_block(block: Block, layer: LayerComparison) -> str:
    """Return the part of a tensor's name that follows the name of its block."""
    return f"{layer.layer}.{layer.tensor}".removeprefix(f"{block.name}.")


def _write_rows(write: Writer, rows: Sequence[Block], architectures: Sequence[str]) -> None:
    """Write rows with a column per architecture; where these do not fit, with a line per architecture."""
    cells = [_cells(row, architectures) for row in rows]
    texts = [[Text() if cell is None else _cell_text(write, cell) for cell in row_cells] for row_cells in cells]
    titles = [_title(write, name, [row_cells[i] for row_cells in cells]) for i, name in enumerate(architectures)]
    labels = [write.text(_name(row.worst)) for row in rows]
    label_width = max(label.cell_len for label in labels)
    widths = []
    for i, title in enumerate(titles):
        column = (*title, *(row_texts[i] for row_texts in texts))
        widths.append(max(text.cell_len for text in column))
    if 2 + label_width + sum(widths) + _GAP * len(widths) > write.console.width:
        _write_turned(write, rows, cells, architectures)
        return
    for number in (0, 1):  # the line of architectures, and that of their devices
        write.console.print(padded([Text(), *(title[number] for title in titles)], [label_width, *widths]))
    for row, label, row_texts in zip(rows, labels, texts, strict=True):
        write.console.print(padded([label, *row_texts], [label_width, *widths]))
        if note := _note(row):
            write.line(note, indent=_INDENT, style="dim")


def _title(write: Writer, architecture: str, cells: Sequence[_ShownCell | None]) -> tuple[Text, Text]:
    """Return the name of an architecture and the names of its devices, which have a line of their own."""
    workers = dict.fromkeys(worker for shown in cells if shown is not None for worker in shown.cell.workers)
    return write.text(one_line(architecture), "bold"), write.text(some(list(workers), 3), "dim")


def _cell_text(write: Writer, shown: _ShownCell) -> Text:
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
    figures_column = _INDENT + max(len(one_line(name)) for name in architectures) + _GAP
    for row, row_cells in zip(rows, cells, strict=True):
        write.console.print(Text("  ").append_text(write.text(_name(row.worst))), soft_wrap=True)
        if note := _note(row):
            write.line(note, indent=_INDENT, style="dim")
        for architecture, shown in zip(architectures, row_cells, strict=True):
            if shown is not None:
                _write_cell_line(write, architecture, shown, figures_column)


def _write_cell_line(write: Writer, architecture: str, shown: _ShownCell, figures_column: int) -> None:
    """Write an architecture, its figures from a column on, and its devices: below the figures if they do not fit."""
    cell = shown.cell
    line = write.text(f"{' ' * _INDENT}{one_line(architecture)}")
    line.pad_right(figures_column - line.cell_len)
    line.append_text(write.text(shown.text, style_of(cell.status)))
    devices = write.text(devices_text(cell), "dim" if len(cell.classes) <= 1 else "")
    if line.cell_len + _GAP + devices.cell_len <= write.console.width:
        line.pad_right(_GAP)
        write.console.print(line.append_text(devices))
    else:
        write.console.print(line)
        write.console.print(Padding(devices, (0, 0, 0, figures_column), expand=False))


COLUMNS = (
    "stage", "load_path", "layer", "tensor", "architecture", "workers", "status", "max_abs", "allowed", "ratio",
    "max_ulp", "classes",
)  # fmt: skip

_FORMULA = ("=", "+", "-", "@")
"""First characters of a cell that a spreadsheet computes: names may come from a stranger."""


def render_csv(layers: Iterable[LayerComparison]) -> Iterator[bytes]:
    """Yield the line of titles, and a line per tensor and architecture; workers of one class are bitwise equal."""
    yield _csv_line(COLUMNS)
    for layer in layers:
        tensor = (layer.stage, layer.load_path, layer.layer, layer.tensor)
        for architecture, cell in layer.architectures.items():
            names = (*tensor, architecture, " ".join(cell.workers), cell.status)
            figures = (cell.max_abs, cell.allowed, cell.ratio, cell.max_ulp)
            classes = " | ".join(" ".join(workers) for workers in cell.classes)
            yield _csv_line([*map(_csv_text, names), *map(_csv_number, figures), _csv_text(classes)])


def _csv_line(cells: Iterable[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _csv_text(name: str) -> str:
    text = one_line(name)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _csv_number(value: Real | int | None) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, int) else repr(float(value))
