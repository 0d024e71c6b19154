"""What a person reads in a terminal: the report of a run, a suite, two weight files, or the state of a machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from consistency import plugins
from consistency.capture.wording import and_more, counted, size, some
from consistency.case import standard
from consistency.comparison.findings.host import MOST_ADVICE, about, advise
from consistency.comparison.outcomes import worst_of
from consistency.comparison.result import BAD, Comparison, Finding, Outcome, TensorComparison
from consistency.comparison.suite import SuiteResult
from consistency.devices.seen import FIRST_STEPS, unseen
from consistency.report.console import Writer, make_console, stripped, without_trailing_blanks
from consistency.report.copy_matrix import write_matrices
from consistency.report.document import EXPLAINED, Document, ResultTable
from consistency.report.documents import comparison_document, document_of, seconds
from consistency.report.findings import is_command
from consistency.report.formats import View
from consistency.report.marks import style_of
from consistency.report.summarize import with_load_path
from consistency.report.summary import CellText, Row, class_text
from consistency.text import one_line

MOST_ROWS = 20
"""Cases in a table: with verdict and findings, a screen."""

_MOST_SOURCES = 8
_MOST_NAMES, _FEW_NAMES = 32, 3  # of workers that share a line: four hosts of eight; of more, examples
_LAST_FINDINGS = 3  # that a report of something wrong ends with, where the eye of a reader is
_REFERENCE = " (reference)"
_MOST_TENSORS = _MOST_FINDINGS = 20
_MOST_NOTES = 20


def render(found: Comparison | SuiteResult, view: View, console: Console | None = None) -> Iterator[bytes]:
    """Yield the report as a console takes it: that of standard output where none is given."""
    console = console or make_console()
    view = dataclasses.replace(view, most_rows=None if view.verbose else MOST_ROWS)
    with console.capture() as captured:
        _write(Writer(console), document_of(found, view), view, found)
    yield stripped(captured.get(), console)


def render_finding(finding: Finding, number: int) -> Iterator[bytes]:
    """Yield one finding with all of its evidence and the names of its tensors."""
    console = make_console()
    with console.capture() as captured:
        write = Writer(console)
        write.finding(finding, number)
        if finding.workers:
            write.line(f"workers: {', '.join(finding.workers)}")
        if finding.load_paths:
            write.line(f"load paths: {', '.join(finding.load_paths)}")
        if finding.tensors:
            write.line(f"{counted(len(finding.tensors), 'tensor')}:")
        for name in finding.tensors:
            write.line(name, indent=5)
    yield stripped(captured.get(), console)


def _write(write: Writer, document: Document, view: View, found: Comparison | SuiteResult) -> None:
    write_head(write, document)
    write.findings((entry.finding for entry in document.to_act_on), most=None if view.verbose else _MOST_FINDINGS)
    write_tables(write, document, verbose=view.verbose)
    if isinstance(found, Comparison):
        write_matrices(write, found.tensors)
    if document.remarks:
        for kind, text in document.remarks:
            write.line(text, style={"outside": "bold red", "skipped": "dim"}.get(kind, ""))
        write.console.print()
    for text in document.merging:
        write.line(text)
        write.console.print()
    if isinstance(found, Comparison):
        _tensors(write, found, verbose=view.verbose)
        _taken(write, found if view.verbose else None)
    notes = [entry.finding for entry in document.notes]
    write.notes(notes if view.verbose else notes[:_MOST_NOTES])
    if rest := "" if view.verbose else and_more(len(notes) - _MOST_NOTES, "note"):
        write.line(f"{rest}: -v shows all")
    if document.not_checked:
        first, *others = document.not_checked
        is_whole = view.verbose or found.verdict != "consistent" or not others
        short = f"{document.not_checked_title}: {first} {and_more(len(others), 'thing')}: -v lists them"
        write.line(document.not_checked_text if is_whole else short)
    for text in document.unwritten:
        write.line(f"not written: {text}", style="yellow")
    if view.folder is not None:
        write.line(f"report and captures: {view.folder}")
    _end(write, document, view)


def _end(write: Writer, document: Document, view: View) -> None:
    """Repeat the verdict and the first findings below a long report of something wrong."""
    found = [entry for entry in document.entries if entry.finding.severity == "error"]
    if not found:
        return
    write.console.print()
    write.verdict(document.verdict, document.sentence)
    for entry in found[:_LAST_FINDINGS]:
        write.line(f"{entry.number:<3}{entry.finding.message}", hang=3, style="red")
        write.next_step(entry.finding)
    rest = and_more(len(found) - _LAST_FINDINGS, "finding")
    file = Path(document.file)
    where = "" if view.folder is None else f", and in {Path(view.folder, file.with_suffix('.md'))} and {file.stem}.html"
    write.line(f"{f'{rest}; details' if rest else 'details'} above{where}", style="dim")
    if document.explain_command:
        write.step(f"{EXPLAINED}: {document.explain_command}", indent=2)


def write_head(write: Writer, document: Document, *, title: str = "consistency", verdict: str = "") -> None:
    """Write what was compared, when, where and by which command, and the verdict, in other words where given."""
    marks = ["SIMULATED DEVICES"] if document.simulated else []
    marks += ["PLANTED FAULT"] if document.planted else []
    rest = and_more(len(document.sources) - _MOST_SOURCES, "capture")
    below = [document.origin, document.command, *document.sources[:_MOST_SOURCES], rest]
    write.heading([title, *marks, document.name, *document.facts], below=[text for text in below if text])
    write.verdict(document.verdict, document.sentence, words=verdict)


def write_tables(write: Writer, document: Document, *, verbose: bool = False) -> None:
    """Write the tables, and what their marks mean.

    Where a table does not fit, cells lose the layer of a mismatch, then titles are abbreviated, then each stage of a
    run has a line of its own. With `verbose` cells keep that layer, and name that of the worst ratio of a merge too.
    """
    abbreviated = [_write_table(write, table, verbose=verbose) for table in document.tables]
    columns = {column.title: column for table in document.tables for column in table.columns}.values()
    explained = [f"{mark} {meaning}".strip() for _, mark, meaning in document.legend]
    explained += [f"{column.short} {column.title}" for column in columns if any(abbreviated) and column.short]
    if any(table.label == "case" and row.kinds > 1 for table in document.tables for row in table.rows):
        explained.append("-v shows a line for every case")
    write.items(explained, style="dim")
    write.console.print()


def _write_table(write: Writer, table: ResultTable, *, verbose: bool) -> bool:
    """Write a table; return whether its titles are abbreviated."""
    if table.title:
        write.line(table.title, style="bold")
    corner = write.text("" if table.heading else table.label, "bold")
    # whether titles are abbreviated, and cells name the layer of a mismatch: in turn, until the table fits
    attempts = [(False, True), (False, False), (True, False)]
    if verbose:
        attempts = [(False, True), (True, True)]
    for short, places in attempts:
        titles = [write.text((column.short if short else "") or column.title, "bold") for column in table.columns]
        rows = _grid_rows(write, table, places=places, worst_layers=verbose)
        if write.grid_fits(titles, rows) or (short and not table.heading):
            write.grid(titles, rows, corner=corner)
            break
    else:
        short = False
        _write_turned(write, table, verbose=verbose)
    if table.title:
        write.console.print()
    return short


def _grid_rows(write: Writer, table: ResultTable, *, places: bool, worst_layers: bool) -> list[tuple[Text, list[Text]]]:
    """Return the headings, and a line per row; names that fill the line have one of their own."""
    rows: list[tuple[Text, list[Text]]] = []
    for below in table.by_heading:
        indent = ""
        if table.heading:
            rows.append((_heading(write, below[0]), []))
            indent = "   "
        for row in below:
            name = _name(row, table, write.console.width // 2)
            if name is None:
                name = f"these {len(row.names)}"
                rows.append((write.text(f"{indent}{'  '.join(_some_names(row, table))}"), []))
            cells = [_cell(write, cell, places=places, worst_layer=worst_layers) for cell in row.cells]
            rows.append((write.text(f"{indent}{name}"), cells))
    return rows


def _write_turned(write: Writer, table: ResultTable, *, verbose: bool) -> None:
    """Write a line per column, with a column per row of the table; a list per row where not even that fits."""
    names = [_name(row, table, write.console.width // 2) for row in table.rows]
    titles = [write.text((name or "").replace("  ", ", "), "bold") for name in names]
    rows = []
    for place, column in enumerate(table.columns):
        cells = [_cell(write, row.cells[place], places=verbose, worst_layer=verbose) for row in table.rows]
        rows.append((write.text(column.title), cells))
    side_by_side = all(names) and write.grid_fits(titles, rows)
    for below in table.by_heading:
        write.folded(_heading(write, below[0]), indent=2)
        for row in below:
            write.items(_some_names(row, table), indent=5)
            if side_by_side:
                continue
            width = max(len(column.title) for column in table.columns) + 2
            for column, cell in zip(table.columns, row.cells, strict=True):
                written = _cell(write, cell, places=True, worst_layer=verbose)
                write.folded(write.text(column.title.ljust(width)).append_text(written), indent=7, hang=0)
    if side_by_side:
        write.grid(titles, rows)


def _heading(write: Writer, row: Row) -> Text:
    """Return the heading that a row is below: its architecture, and the models of that."""
    return write.text(f"{row.architecture}    {', '.join(row.models)}", "bold")


def _name(row: Row, table: ResultTable, room: int) -> str | None:
    """Name the workers of a row, the reference worker too; None where there is no room for all names."""
    if row.kinds > 1 and table.heading:
        return f"{len(row.names)} others, {row.kinds} different results"
    text = "  ".join(_names(row, table))
    return text if len(text) <= room or len(row.names) == 1 else None


def _some_names(row: Row, table: ResultTable) -> list[str]:
    """Name as many workers of a row as a reader takes in, the reference worker before all."""
    if row.kinds > 1:
        return [f"{len(row.names)} others, {row.kinds} different results"]
    names = sorted(_names(row, table), key=lambda text: not text.endswith(_REFERENCE))
    shown = names if len(names) <= _MOST_NAMES else names[:_FEW_NAMES]
    return [*shown, *filter(None, [and_more(len(names) - len(shown))])]


def _names(row: Row, table: ResultTable) -> list[str]:
    return [f"{name}{_REFERENCE}" if name == table.reference else name for name in row.names]


def _cell(write: Writer, cell: CellText, *, places: bool, worst_layer: bool) -> Text:
    return write.text(cell.written(place=places, worst_layer=worst_layer), style_of(cell.kind))


def _tensors(write: Writer, comparison: Comparison, *, verbose: bool) -> None:
    """Write the tensors with a mismatch; all of them where `verbose` asks for it."""
    shown = [
        tensor for tensor in comparison.tensors if verbose or (tensor.is_wrong and tensor.stage != standard.TRANSFER)
    ]  # the matrix shows those of copies
    if not shown:
        return
    limit = len(shown) if verbose else _MOST_TENSORS
    default = comparison.load_paths[0]
    write.table(
        ("stage", "layer", "tensor", "bitwise equal workers", "worst"),
        [
            (
                t.stage if t.load_path == default else f"{t.stage} ({t.load_path})",
                t.layer,
                t.tensor,
                class_text(t.classes),
                _worst(t),
            )
            for t in shown[:limit]
        ],
        left_out=len(shown) - limit,
    )


def _taken(write: Writer, comparison: Comparison | None) -> None:
    """Write what each stage took of time and memory."""
    rows = [
        (
            with_load_path(worker.name, worker.load_path),
            one.stage,
            "" if one.elapsed_s is None else seconds(one.elapsed_s),
            size(one.host_peak_bytes),
            "" if one.device_peak_bytes is None else size(one.device_peak_bytes),
        )
        for worker in (comparison.workers if comparison else ())
        for one in worker.stage_memory
    ]
    if rows:
        write.table(("worker", "stage", "time", "host peak", "device peak"), rows, left_out=0)


def _worst(tensor: TensorComparison) -> str:
    row = worst_of(tensor.outcomes)
    parts = [f"{row.workers[0]}: {row.status}"]
    if row.word and row.status not in ("within", "equal"):
        parts.append(row.word)
    if row.share is not None:
        parts.append(f"{row.share:.3g}× tolerance")
    if row.status in BAD and row.worst_index is not None:
        parts.append(f"at {list(row.worst_index)}")
    return ", ".join(parts)


_MOST_OF_FILES = 20


def print_weights(
    comparison: Comparison,
    console: Console,
    *,
    title: str,
    elapsed_s: float | None = None,
    verbose: bool = False,
    folder: str | None = None,
) -> None:
    """Print a comparison of weights that are in files, by the command of this title."""
    with without_trailing_blanks(console):
        write = Writer(console)
        facts = [comparison.dtype, counted(len(comparison.tensors), "tensor")]
        facts += [] if elapsed_s is None else [f"{elapsed_s:.2f} s"]
        document = dataclasses.replace(comparison_document(comparison, View()), facts=tuple(facts))
        statement = plugins.statement_of(comparison)
        write_head(write, document, title=title, verdict="" if statement is None else statement.heading)
        findings = list(map(_in_lines, comparison.findings))
        write.findings(f for f in findings if f.severity != "note")
        shown = [t for t in comparison.tensors if verbose or t.is_wrong]
        if shown:
            limit = len(shown) if verbose else _MOST_OF_FILES
            titles = ("tensor", "shape", "dtype", "", "differ", "largest", "ulp")
            write.table(titles, map(_file_cells, shown[:limit]), left_out=len(shown) - limit)
        write.notes(findings)
        if folder is not None:
            write.line(f"report: {folder}")


def _in_lines(finding: Finding) -> Finding:
    detail = tuple(map(one_line, finding.detail))
    if more := and_more(len(finding.tensors) - len(detail)) if detail else "":
        detail = (*detail, more)
    return msgspec.structs.replace(finding, message=one_line(finding.message), detail=detail)


def _has_other_sign(row: Outcome) -> bool:
    """Return whether the worst element has the other sign: its steps through all numbers around 0 say nothing."""
    values = [row.evidence.get(name) for name in ("actual", "expected")]
    signs = [math.copysign(1, value) for value in values if isinstance(value, float) and value]
    return len(set(signs)) > 1


def _file_cells(tensor: TensorComparison) -> list[str]:
    row = tensor.outcomes[-1]
    cells = [f"{tensor.layer}.{tensor.tensor}", "×".join(map(str, tensor.shape)) or "scalar", tensor.dtype]
    cells.append(row.word or row.reason or row.status)
    if row.status == "outside" and row.mismatched is not None:
        cells += [f"{row.mismatched} of {row.elements}", "" if row.max_abs is None else f"{float(row.max_abs):.3g}"]
        cells.append("" if row.max_ulp is None else "across 0" if _has_other_sign(row) else str(row.max_ulp))
    return list(map(one_line, cells))


def print_doctor(comparison: Comparison, console: Console, *, elapsed_s: float, folder: str | None = None) -> None:
    """Print the state of this machine."""
    with without_trailing_blanks(console):
        write = Writer(console)
        document = comparison_document(comparison, View(elapsed_s=elapsed_s))
        write_head(write, document)
        write_tables(write, document)
        write_matrices(write, comparison.tensors)
        for host_facts in comparison.hosts:
            for text in about(host_facts):
                write.line(text)
            console.print()
        _fix(write, comparison)
        _first_run(write, comparison)
        write.notes(comparison.findings)
        if folder is not None:
            write.line(f"report and captures: {folder}")


def _first_run(write: Writer, comparison: Comparison) -> None:
    """Say that nobody is known to have run this tool on such a device, and how to see what it does there."""
    real = [worker for worker in comparison.workers if not worker.simulated]
    models = unseen((worker.name.partition(":")[0], worker.model) for worker in real)
    if models:
        write.line(f"no run on {some(models)} is known yet: {FIRST_STEPS} has ten commands to see what it does there")


def _fix(write: Writer, comparison: Comparison) -> None:
    found = advise(comparison)
    if not found:
        write.line("nothing to fix", style="bold")
        return
    write.line("fix first:", style="bold")
    for number, advice in enumerate(found[:MOST_ADVICE], start=1):
        write.line(f"{number:<3}{advice.what}", style="red" if advice.urgent else "yellow")
        if advice.fix is not None and is_command(advice.fix):
            write.step(advice.fix)
        elif advice.fix is not None:
            write.line(advice.fix, indent=5)
    if rest := and_more(len(found) - MOST_ADVICE):
        write.line(f"{rest}: --json has all of them")
