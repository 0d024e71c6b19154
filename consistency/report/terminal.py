"""Reports as text for a terminal: of a run, a suite, two weight files, or the state of a machine."""

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
from consistency.comparison import kinds
from consistency.comparison.findings.host import MOST_ADVICE, about, advise
from consistency.comparison.outcomes import worst_of
from consistency.comparison.result import BAD, Comparison, Finding, Outcome, TensorComparison
from consistency.comparison.suite import SuiteResult
from consistency.devices.seen import FIRST_STEPS, unseen
from consistency.report.console import Writer, make_console, stripped, without_trailing_blanks
from consistency.report.copy_matrix import write_matrices
from consistency.report.document import EXPLAINED, Column, Document, ResultTable
from consistency.report.documents import comparison_document, document_of, seconds
from consistency.report.findings import is_command
from consistency.report.formats import View
from consistency.report.marks import style_of
from consistency.report.runs import REPORT
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


def render(result: Comparison | SuiteResult, view: View, console: Console | None = None) -> Iterator[bytes]:
    """Yield the report as a console takes it: that of standard output where none is given."""
    console = console or make_console()
    view = dataclasses.replace(view, most_rows=None if view.verbose else MOST_ROWS)
    with console.capture() as captured:
        _write(Writer(console), document_of(result, view), view, result)
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


def _write(write: Writer, document: Document, view: View, result: Comparison | SuiteResult) -> None:
    """Write a report from its verdict to its last findings, in the order in which a person needs them."""
    write_head(write, document)
    write.findings((entry.finding for entry in document.to_act_on), most=None if view.verbose else _MOST_FINDINGS)
    write_tables(write, document, verbose=view.verbose)
    if isinstance(result, Comparison):
        write_matrices(write, result.tensors)
    _write_remarks(write, document)
    if isinstance(result, Comparison):
        _write_tensors(write, result, verbose=view.verbose)
        if view.verbose:
            _write_costs(write, result)
    _write_notes(write, document, verbose=view.verbose)
    if document.not_checked:
        is_whole = view.verbose or result.verdict != "consistent"
        write.line(_not_checked_text(document, is_whole=is_whole))
    for text in document.unwritten:
        write.line(f"not written: {text}", style="yellow")
    if view.folder is not None:
        write.line(f"report and captures: {view.folder}")
    _write_end(write, document, view)


def _write_remarks(write: Writer, document: Document) -> None:
    """Write how load paths and workers agree, and what merging does to the outputs."""
    if document.remarks:
        for kind, text in document.remarks:
            write.line(text, style={"outside": "bold red", "skipped": "dim"}.get(kind, ""))
        write.console.print()
    for text in document.merging:
        write.line(text)
        write.console.print()


def _write_notes(write: Writer, document: Document, *, verbose: bool) -> None:
    notes = [entry.finding for entry in document.notes]
    if verbose:
        write.notes(notes)
        return
    write.notes(notes[:_MOST_NOTES])
    if left_out := and_more(len(notes) - _MOST_NOTES, "note"):
        write.line(f"{left_out}: -v shows all")


def _not_checked_text(document: Document, *, is_whole: bool) -> str:
    """Return the parts that were not checked; in a short report the first ones, and the number of the others."""
    first, *others = document.not_checked
    if is_whole or not others:
        return document.not_checked_text
    return f"{document.not_checked_title}: {first} {and_more(len(others), 'thing')}: -v lists them"


def _write_end(write: Writer, document: Document, view: View) -> None:
    """Repeat the verdict and the first findings below a long report of something wrong."""
    errors = [entry for entry in document.entries if entry.finding.severity == "error"]
    if not errors:
        return
    write.console.print()
    write.verdict(document.verdict, document.sentence)
    for entry in errors[:_LAST_FINDINGS]:
        write.line(f"{entry.number:<3}{entry.finding.message}", hang=3, style="red")
        write.next_step(entry.finding)
    left_out = and_more(len(errors) - _LAST_FINDINGS, "finding")
    details = f"{left_out}; details" if left_out else "details"
    files = ""
    if view.folder is not None:
        file = Path(document.file)
        files = f", and in {Path(view.folder, file.with_suffix('.md'))} and {file.stem}.html"
    write.line(f"{details} above{files}", style="dim")
    if document.explain_command:
        write.step(f"{EXPLAINED}: {document.explain_command}", indent=2)


def write_head(write: Writer, document: Document, *, title: str = "consistency", verdict: str = "") -> None:
    """Write the facts of the run, its time, host and command, and the verdict, in other words where these are given."""
    marks = []
    if document.simulated:
        marks.append("SIMULATED DEVICES")
    if document.planted:
        marks.append("PLANTED FAULT")
    left_out = and_more(len(document.sources) - _MOST_SOURCES, "capture")
    below = [document.origin, document.command, *document.sources[:_MOST_SOURCES], left_out]
    write.heading([title, *marks, document.name, *document.facts], below=[text for text in below if text])
    write.verdict(document.verdict, document.sentence, words=verdict)


def write_tables(write: Writer, document: Document, *, verbose: bool = False) -> None:
    """Write the tables, and what their marks mean.

    Where a table does not fit, cells lose the layer of a mismatch, then titles are abbreviated, then each stage of a
    run has a line of its own. With `verbose` cells keep that layer, and name that of the worst ratio of a merge too.
    """
    abbreviated = [_write_table(write, table, verbose=verbose) for table in document.tables]
    explained = [f"{mark} {meaning}".strip() for _, mark, meaning in document.legend]
    if any(abbreviated):
        columns = {column.title: column for table in document.tables for column in table.columns}.values()
        explained += [f"{column.short} {column.title}" for column in columns if column.short]
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
    for is_abbreviated, mismatch_layers in attempts:
        titles = [write.text(_title(column, is_abbreviated=is_abbreviated), "bold") for column in table.columns]
        rows = _grid_rows(write, table, mismatch_layers=mismatch_layers, worst_layers=verbose)
        # An abbreviated table of a suite is written in any case: it breaks between columns, where the table of a run is
        # turned, with a line per stage.
        if write.grid_fits(titles, rows) or (is_abbreviated and not table.heading):
            write.grid(titles, rows, corner=corner)
            break
    else:
        is_abbreviated = False
        _write_turned(write, table, verbose=verbose)
    if table.title:
        write.console.print()
    return is_abbreviated


def _title(column: Column, *, is_abbreviated: bool) -> str:
    return column.short if is_abbreviated and column.short else column.title


def _grid_rows(
    write: Writer, table: ResultTable, *, mismatch_layers: bool, worst_layers: bool
) -> list[tuple[Text, list[Text]]]:
    """Return a title and cells per line of a grid: headings, and rows, whose names may need a line before them."""
    rows: list[tuple[Text, list[Text]]] = []
    for block in table.by_heading:
        indent = ""
        if table.heading:
            rows.append((_heading(write, block[0]), []))
            indent = "   "
        for row in block:
            name = _name(row, table, write.console.width // 2)
            if name is None:
                name = f"these {len(row.names)}"
                rows.append((write.text(f"{indent}{'  '.join(_some_names(row, table))}"), []))
            cells = [_cell(write, cell, mismatch_layer=mismatch_layers, worst_layer=worst_layers) for cell in row.cells]
            rows.append((write.text(f"{indent}{name}"), cells))
    return rows


def _write_turned(write: Writer, table: ResultTable, *, verbose: bool) -> None:
    """Write the names of each row, then the table turned, with a line per column and a column per row.

    Where not even that fits, the cells of each row are listed below its names instead.
    """
    names = [_name(row, table, write.console.width // 2) for row in table.rows]
    titles = [write.text((name or "").replace("  ", ", "), "bold") for name in names]
    rows = []
    for index, column in enumerate(table.columns):
        cells = [_cell(write, row.cells[index], mismatch_layer=verbose, worst_layer=verbose) for row in table.rows]
        rows.append((write.text(column.title), cells))
    side_by_side = all(names) and write.grid_fits(titles, rows)
    width = max((len(column.title) for column in table.columns), default=0) + 2
    for block in table.by_heading:
        write.folded(_heading(write, block[0]), indent=2)
        for row in block:
            write.items(_some_names(row, table), indent=5)
            if side_by_side:
                continue
            for column, cell in zip(table.columns, row.cells, strict=True):
                written = _cell(write, cell, mismatch_layer=True, worst_layer=verbose)
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
    if len(names) <= _MOST_NAMES:
        return names
    return [*names[:_FEW_NAMES], and_more(len(names) - _FEW_NAMES)]


def _names(row: Row, table: ResultTable) -> list[str]:
    return [f"{name}{_REFERENCE}" if name == table.reference else name for name in row.names]


def _cell(write: Writer, cell: CellText, *, mismatch_layer: bool, worst_layer: bool) -> Text:
    return write.text(cell.written(place=mismatch_layer, worst_layer=worst_layer), style_of(cell.kind))


def _write_tensors(write: Writer, comparison: Comparison, *, verbose: bool) -> None:
    """Write the tensors with a mismatch; all of them where `verbose` asks for it."""
    shown = list(comparison.tensors)
    if not verbose:
        # The matrix shows those of copies.
        shown = [tensor for tensor in shown if tensor.is_wrong and tensor.stage != standard.TRANSFER]
    if not shown:
        return
    limit = len(shown) if verbose else _MOST_TENSORS
    default_path = comparison.load_paths[0]
    rows = []
    for tensor in shown[:limit]:
        stage = tensor.stage
        if tensor.load_path != default_path:
            stage = f"{stage} ({tensor.load_path})"
        rows.append((stage, tensor.layer, tensor.tensor, class_text(tensor.classes), _worst_text(tensor)))
    titles = ("stage", "layer", "tensor", "bitwise equal workers", "worst")
    write.table(titles, rows, left_out=len(shown) - limit)


def _write_costs(write: Writer, comparison: Comparison) -> None:
    """Write the time and the memory of each stage on each worker."""
    rows = []
    for worker in comparison.workers:
        name = with_load_path(worker.name, worker.load_path)
        for cost in worker.stage_memory:
            elapsed = "" if cost.elapsed_s is None else seconds(cost.elapsed_s)
            device_peak = "" if cost.device_peak_bytes is None else size(cost.device_peak_bytes)
            rows.append((name, cost.stage, elapsed, size(cost.host_peak_bytes), device_peak))
    if rows:
        write.table(("worker", "stage", "time", "host peak", "device peak"), rows, left_out=0)


def _worst_text(tensor: TensorComparison) -> str:
    """Return the worst outcome of a tensor: a worker, its status, and the error where there is one."""
    worst = worst_of(tensor.outcomes)
    parts = [f"{worst.workers[0]}: {worst.status}"]
    if worst.word and worst.status not in ("within", "equal"):
        parts.append(worst.word)
    # `share` is the ratio, but None of an exact value correctly rounded: that may use up the whole tolerance
    if worst.share is not None:
        parts.append(f"{worst.share:.3g}× tolerance")
    if worst.status in BAD and worst.worst_index is not None:
        parts.append(f"at {list(worst.worst_index)}")
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
        if elapsed_s is not None:
            facts.append(f"{elapsed_s:.2f} s")
        document = dataclasses.replace(comparison_document(comparison, View()), facts=tuple(facts))
        statement = plugins.statement_of(comparison)
        verdict = "" if statement is None else statement.heading
        write_head(write, document, title=title, verdict=verdict)
        findings = list(map(_one_line_texts, comparison.findings))
        write.findings(finding for finding in findings if finding.severity != "note")
        shown = [tensor for tensor in comparison.tensors if verbose or tensor.is_wrong]
        if shown:
            limit = len(shown) if verbose else _MOST_OF_FILES
            titles = ("tensor", "shape", "dtype", "", "differ", "largest", "ulp")
            write.table(titles, map(_file_cells, shown[:limit]), left_out=len(shown) - limit)
        write.notes(findings)
        if folder is not None and not _lacks_report(comparison):
            write.line(f"report: {folder}")


def _lacks_report(comparison: Comparison) -> bool:
    """Return whether the report itself could not be written."""
    unwritten = (finding.message for finding in comparison.findings if finding.kind == kinds.UNWRITTEN)
    return any(message.startswith(f"{REPORT}:") for message in unwritten)


def _one_line_texts(finding: Finding) -> Finding:
    """Return a finding whose texts are a line each; how many tensors its detail leaves out is a line more."""
    detail = tuple(map(one_line, finding.detail))
    if detail and (left_out := and_more(len(finding.tensors) - len(detail))):
        detail = (*detail, left_out)
    return msgspec.structs.replace(finding, message=one_line(finding.message), detail=detail)


def _has_other_sign(outcome: Outcome) -> bool:
    """Return whether the worst element has the other sign: its steps through all numbers around 0 say nothing."""
    values = [outcome.evidence.get(name) for name in ("actual", "expected")]
    signs = [math.copysign(1, value) for value in values if isinstance(value, float) and value]
    return len(set(signs)) > 1


def _file_cells(tensor: TensorComparison) -> list[str]:
    """Return the cells of a tensor of two files; one that cannot be measured has no figures."""
    outcome = tensor.outcomes[-1]  # before it there may be one of the reference itself, which is equal
    cells = [f"{tensor.layer}.{tensor.tensor}", "×".join(map(str, tensor.shape)) or "scalar", tensor.dtype]
    cells.append(outcome.word or outcome.reason or outcome.status)
    if outcome.status == "outside" and outcome.mismatched is not None:
        cells.append(f"{outcome.mismatched} of {outcome.elements}")
        cells.append("" if outcome.max_abs is None else f"{float(outcome.max_abs):.3g}")
        cells.append(_ulp_text(outcome))
    return list(map(one_line, cells))


def _ulp_text(outcome: Outcome) -> str:
    if outcome.max_ulp is None:
        return ""
    return "across 0" if _has_other_sign(outcome) else str(outcome.max_ulp)


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
        _write_advice(write, comparison)
        _write_unseen_models(write, comparison)
        write.notes(comparison.findings)
        if folder is not None:
            write.line(f"report and captures: {folder}")


def _write_unseen_models(write: Writer, comparison: Comparison) -> None:
    """Name the models of devices on which no run of this tool is known, and how to see what it does there."""
    hardware = [worker for worker in comparison.workers if not worker.simulated]
    models = unseen((worker.name.partition(":")[0], worker.model) for worker in hardware)
    if models:
        write.line(f"no run on {some(models)} is known yet: {FIRST_STEPS} has ten commands to see what it does there")


def _write_advice(write: Writer, comparison: Comparison) -> None:
    """Write what to fix on this machine, the first things first."""
    advices = advise(comparison)
    if not advices:
        write.line("nothing to fix", style="bold")
        return
    write.line("fix first:", style="bold")
    for number, advice in enumerate(advices[:MOST_ADVICE], start=1):
        write.line(f"{number:<3}{advice.what}", style="red" if advice.urgent else "yellow")
        if advice.fix is not None and is_command(advice.fix):
            write.step(advice.fix)
        elif advice.fix is not None:
            write.line(advice.fix, indent=5)
    if left_out := and_more(len(advices) - MOST_ADVICE):
        write.line(f"{left_out}: --json has all of them")
