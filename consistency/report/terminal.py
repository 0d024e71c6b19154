"""The report that a person reads in a terminal: the verdict, what to do about it, and a table at a glance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from consistency.capture.wording import and_more, counted
from consistency.case.load_path import is_alternative
from consistency.case.stages import SPECS, Stage
from consistency.comparison.result import BAD, Comparison, Finding, TensorComparison
from consistency.report.console import Writer, make_console, stripped
from consistency.report.copy_matrix import write_matrices
from consistency.report.findings import findings_of
from consistency.report.formats import View
from consistency.report.merging import merging_texts
from consistency.report.sentences import (
    agreement_texts,
    alternative_path_texts,
    cell_text,
    command_text,
    divergence_texts,
    dtype_texts,
    legend,
    not_checked_texts,
    origin_texts,
    profile_texts,
    sentence,
    soak_texts,
    source_texts,
)
from consistency.report.summary import Group, Groups, Line, all_groups, badness, class_text, stages

_MOST_SOURCES = 8
_MOST_NAMES, _FEW_NAMES = 32, 3  # of workers that share a line: four hosts of eight; of more, examples
_LAST_FINDINGS = 3  # that a report of something wrong ends with, where the eye of a reader is
_REFERENCE = " (reference)"
_MOST_TENSORS = _MOST_FINDINGS = 20
_STYLES = {
    "equal": "green",
    "within": "green",
    "outside": "bold red",
    "flagged": "bold red",
    "blocked": "yellow",
}  # of cells; others are dim


def render(comparison: Comparison, view: View, console: Console | None = None) -> Iterator[bytes]:
    """Yield the report as a console takes it: that of standard output where none is given."""
    console = console or make_console()
    with console.capture() as captured:
        _write(Writer(console), comparison, view)
    yield stripped(captured.get(), console)


def render_finding(finding: Finding, number: int, console: Console | None = None) -> Iterator[bytes]:
    """Yield one finding with all of its evidence and the names of its tensors."""
    console = console or make_console()
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


def _write(write: Writer, comparison: Comparison, view: View) -> None:
    title(write, comparison, view)
    findings = findings_of(comparison, view.folder)
    write.findings(findings, most=None if view.verbose else _MOST_FINDINGS)
    found = all_groups(comparison) if view.groups is None else view.groups
    write_groups(write, comparison, found)
    write_matrices(write, comparison.tensors)
    _load_paths(write, comparison)
    texts = [*agreement_texts(comparison, found), *divergence_texts(comparison)]
    for text in texts:
        write.line(text)
    if texts:
        write.console.print()
    for text in merging_texts(comparison.merging):
        write.line(text)
        write.console.print()
    _layers(write, comparison, verbose=view.verbose)
    write.notes(findings)
    for text in not_checked_texts(comparison):
        write.line(text)
    if view.folder is not None:
        write.line(f"report and captures: {view.folder}")
    _end(write, comparison, view, findings)


def _end(write: Writer, comparison: Comparison, view: View, findings: Sequence[Finding]) -> None:
    """Repeat the verdict and the first findings below a long report of something wrong."""
    found = [finding for finding in findings if finding.severity == "error"]
    if not found:
        return
    write.console.print()
    write.verdict(comparison.verdict, sentence(comparison))
    for number, finding in enumerate(found[:_LAST_FINDINGS], start=1):
        write.line(f"{number:<3}{finding.message}", hang=3, style="red")
        write.next_step(finding)
    rest = and_more(len(found) - _LAST_FINDINGS, "finding")
    where = " above" if view.folder is None else f" above, and in {Path(view.folder, 'report.md')} and report.html"
    write.line(f"{f'{rest}; details' if rest else 'details'}{where}", style="dim")


def title(write: Writer, comparison: Comparison, view: View) -> None:
    """Write what was compared, and the verdict."""
    parts = ["consistency", comparison.case, *dtype_texts(comparison), counted(len(comparison.workers), "worker")]
    if len(comparison.load_paths) > 1:
        parts.append(counted(len(comparison.load_paths), "load path"))
    parts += profile_texts(comparison)
    parts += soak_texts(comparison)
    elapsed_s = comparison.elapsed_s if view.elapsed_s is None else view.elapsed_s
    if elapsed_s is not None:
        parts.append(f"{elapsed_s:.0f} s")
    if comparison.simulated:
        parts.append("SIMULATED DEVICES")
    if comparison.planted:
        parts.append("PLANTED FAULT")
    write.heading(parts, below=origin_lines(comparison))
    write.verdict(comparison.verdict, sentence(comparison))


def origin_lines(comparison: Comparison) -> list[str]:
    """Return when, where, with what and by which command the report was made, and where its captures are from."""
    sources = source_texts(comparison)
    shown = sources[:_MOST_SOURCES]
    rest = and_more(len(sources) - len(shown), "capture")
    texts = [" · ".join(origin_texts(comparison)), command_text(comparison.command), *shown, rest]
    return [text for text in texts if text]


def write_groups(write: Writer, comparison: Comparison, found: Groups | None = None) -> None:
    """Write a table per default load path: the workers of each architecture, and a cell per stage.

    Where the table does not fit, cells lose the layer of a mismatch, then stages are abbreviated, then each stage has a
    line of its own.
    """
    columns = stages(comparison)
    mains = {path: some for path, some in (found or all_groups(comparison)).items() if not is_alternative(path)}
    titles = {path: f"load path: {path}" if len(mains) > 1 else "" for path in mains}
    abbreviated = [
        _write_table(write, groups, columns, comparison.reference, title=titles[path]) for path, groups in mains.items()
    ]
    lines = [line.cells for groups in mains.values() for group in groups for line in group.lines]
    explained = [f"{mark} {meaning}" for _, mark, meaning in legend(lines)]
    explained += [f"{_short(name)} {name}" for name in columns if any(abbreviated) and _short(name) != name]
    write.items(explained, style="dim")
    write.console.print()


def _write_table(
    write: Writer, groups: Sequence[Group], columns: Sequence[str], reference: str | None, *, title: str
) -> bool:
    """Write the table of a load path; return whether its stages are abbreviated."""
    if title:
        write.line(title, style="bold")
    for short, places in ((False, True), (False, False), (True, False)):
        titles = [write.text(_short(name) if short else name, "bold") for name in columns]
        rows = _grid_rows(write, groups, columns, reference, places=places)
        if write.grid_fits(titles, rows):
            write.grid(titles, rows)
            break
    else:
        short = False
        _write_turned(write, groups, columns, reference)
    if title:
        write.console.print()
    return short


def _short(stage: str) -> str:
    return next((spec.short for spec in SPECS.values() if spec.stage == stage and spec.short), stage)


def _grid_rows(
    write: Writer, groups: Sequence[Group], columns: Sequence[str], reference: str | None, *, places: bool
) -> list[tuple[Text, list[Text]]]:
    """Return a heading per architecture, and a row per line; names that fill the row have a line of their own."""
    rows: list[tuple[Text, list[Text]]] = []
    for group in groups:
        rows.append((_heading(write, group), []))
        for line in group.lines:
            cells = [_cell(write, name, line, places=places) for name in columns]
            name = _workers(line, reference, write.console.width // 2)
            if name is None:
                name = f"these {len(line.workers)}"
                rows.append((write.text(f"   {'  '.join(_some_workers(line, reference))}"), []))
            rows.append((write.text(f"   {name}"), cells))
    return rows


def _write_turned(write: Writer, groups: Sequence[Group], columns: Sequence[str], reference: str | None) -> None:
    """Write a line per stage, with a column per line of the groups; a list per line where not even that fits."""
    lines = [line for group in groups for line in group.lines]
    names = [_workers(line, reference, write.console.width // 2) for line in lines]
    titles = [write.text((name or "").replace("  ", ", "), "bold") for name in names]
    rows = [(write.text(stage), [_cell(write, stage, line, places=False) for line in lines]) for stage in columns]
    side_by_side = all(names) and write.grid_fits(titles, rows)
    for group in groups:
        write.folded(_heading(write, group), indent=2)
        for line in group.lines:
            write.items(_some_workers(line, reference), indent=5)
            if side_by_side:
                continue
            width = max(map(len, columns)) + 2
            for stage in columns:
                cell = _cell(write, stage, line, places=True)
                write.folded(write.text(stage.ljust(width)).append_text(cell), indent=8)
    if side_by_side:
        write.grid(titles, rows)


def _heading(write: Writer, group: Group) -> Text:
    return write.text(f"{group.architecture}    {', '.join(group.models)}", "bold")


def _workers(line: Line, reference: str | None, room: int) -> str | None:
    """Name the workers of a line, the reference worker too; None where there is no room for all names."""
    if line.kinds > 1:
        return f"{len(line.workers)} others, {line.kinds} different results"
    text = "  ".join(_names(line, reference))
    return text if len(text) <= room or len(line.workers) == 1 else None


def _some_workers(line: Line, reference: str | None) -> list[str]:
    """Name as many workers of a line as a reader takes in, the reference worker before all."""
    if line.kinds > 1:
        return [f"{len(line.workers)} others, {line.kinds} different results"]
    names = sorted(_names(line, reference), key=lambda text: not text.endswith(_REFERENCE))
    shown = names if len(names) <= _MOST_NAMES else names[:_FEW_NAMES]
    return [*shown, *filter(None, [and_more(len(names) - len(shown))])]


def _names(line: Line, reference: str | None) -> list[str]:
    return [f"{name}{_REFERENCE}" if name == reference else name for name in line.workers]


def _cell(write: Writer, stage: str, line: Line, *, places: bool) -> Text:
    cell = cell_text(stage, line.cells.get(stage))
    text = (cell.place if places else "") or cell.text
    return write.text(f"{cell.mark} {text}".rstrip(), _STYLES.get(cell.kind, "dim"))


def _load_paths(write: Writer, comparison: Comparison) -> None:
    texts = list(alternative_path_texts(comparison))
    for kind, text in texts:
        write.line(text, style={"outside": "bold red", "skipped": "dim"}.get(kind, ""))
    if texts:
        write.console.print()


def _layers(write: Writer, comparison: Comparison, *, verbose: bool) -> None:
    """Write the tensors with a mismatch; all of them where `verbose` asks for it."""
    shown = [
        tensor for tensor in comparison.tensors if verbose or (tensor.is_wrong and tensor.stage != Stage.TRANSFER)
    ]  # the matrix shows those of copies
    if not shown:
        return
    limit = len(shown) if verbose else _MOST_TENSORS
    default = comparison.load_paths[0]
    write.table(
        ("stage", "layer", "tensor", "bitwise equal workers", "worst"),
        [
            (t.stage if t.load_path == default else f"{t.stage} ({t.load_path})", t.layer, t.tensor,
             class_text(t.classes), _worst(t))
            for t in shown[:limit]
        ],
        left_out=len(shown) - limit,
    )  # fmt: skip


def _worst(tensor: TensorComparison) -> str:
    row = max((row for row in tensor.outcomes), key=badness)
    parts = [f"{row.workers[0]}: {row.status}"]
    if row.word and row.status != "within":
        parts.append(row.word)
    if row.share is not None:
        parts.append(f"{row.share:.3g}× tolerance")
    if row.status in BAD and row.worst_index is not None:
        parts.append(f"at {list(row.worst_index)}")
    return ", ".join(parts)
