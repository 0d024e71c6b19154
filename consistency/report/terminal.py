"""The report that a person reads in a terminal: the verdict, what to do about it, and a table at a glance."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from consistency.capture.wording import and_more, counted
from consistency.case.load_path import is_alternative
from consistency.case.stages import Stage
from consistency.comparison.result import BAD, Comparison, TensorComparison
from consistency.report.console import Writer, make_console, stripped
from consistency.report.copy_matrix import write_matrices
from consistency.report.formats import View
from consistency.report.sentences import (
    alternative_path_texts,
    cell_text,
    command_text,
    divergence_texts,
    legend,
    origin_texts,
    profile_texts,
    sentence,
    soak_texts,
    source_texts,
)
from consistency.report.summary import Groups, Line, all_groups, badness, class_text, stages

_MOST_SOURCES = 8
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


def _write(write: Writer, comparison: Comparison, view: View) -> None:
    title(write, comparison, view)
    write.findings(comparison.findings, most=None if view.verbose else _MOST_FINDINGS)
    write_groups(write, comparison, view.groups)
    write_matrices(write, comparison.tensors)
    _load_paths(write, comparison)
    texts = list(divergence_texts(comparison))
    for text in texts:
        write.line(text)
    if texts:
        write.console.print()
    _layers(write, comparison, verbose=view.verbose)
    write.notes(comparison.findings)
    if comparison.not_looked_at:
        write.line(f"not checked (level {comparison.level}): {', '.join(comparison.not_looked_at)}")
    if view.folder is not None:
        write.line(f"report and captures: {view.folder}")


def title(write: Writer, comparison: Comparison, view: View) -> None:
    """Write what was compared, and the verdict."""
    parts = ["consistency", comparison.case, comparison.dtype, counted(len(comparison.workers), "worker")]
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
    """Write a table per default load path: the workers of each architecture, and a cell per stage."""
    columns = stages(comparison)
    mains = {path: some for path, some in (found or all_groups(comparison)).items() if not is_alternative(path)}
    for load_path, groups in mains.items():
        if len(mains) > 1:
            write.line(f"load path: {load_path}", style="bold")
        rows: list[tuple[Text, list[Text]]] = []
        for group in groups:
            rows.append((write.text(f"{group.architecture}    {', '.join(group.models)}", "bold"), []))
            for line in group.lines:
                names = write.text(f"   {_workers(line, comparison.reference, write.console.width // 2)}")
                rows.append((names, [_cell(write, name, line) for name in columns]))
        write.grid([write.text(name, "bold") for name in columns], rows)
        explained = legend(line.cells for group in groups for line in group.lines)
        write.line("   ".join(f"{mark} {meaning}" for _, mark, meaning in explained), style="dim")
        write.console.print()


def _workers(line: Line, reference: str | None, room: int) -> str:
    """Name the workers of a line, as many as there is room for, the reference worker before all."""
    if line.kinds > 1:
        return f"{len(line.workers)} others, {line.kinds} different results"
    texts = [f"{name} (reference)" if name == reference else name for name in line.workers]
    if len("  ".join(texts)) <= room:
        return "  ".join(texts)
    texts.sort(key=lambda text: not text.endswith(" (reference)"))
    shown = 1
    while len("  ".join(texts[: shown + 1])) <= room - len("  and 1000 more"):
        shown += 1
    return "  ".join(filter(None, [*texts[:shown], and_more(len(texts) - shown)]))


def _cell(write: Writer, stage: str, line: Line) -> Text:
    cell = cell_text(stage, line.cells.get(stage))
    return write.text(f"{cell.mark} {cell.place or cell.text}".rstrip(), _STYLES.get(cell.kind, "dim"))


def _load_paths(write: Writer, comparison: Comparison) -> None:
    texts = list(alternative_path_texts(comparison))
    for kind, text in texts:
        write.line(text, style={"outside": "bold red", "skipped": "dim"}.get(kind, ""))
    if texts:
        write.console.print()


def _layers(write: Writer, comparison: Comparison, *, verbose: bool) -> None:
    """Write the tensors with a mismatch; all of them where `verbose` asks for it."""
    shown = [
        tensor
        for tensor in comparison.tensors
        if verbose or (any(row.status in BAD for row in tensor.rows) and tensor.stage != Stage.TRANSFER)
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
    row = max(tensor.rows, key=badness)
    parts = [f"{row.worker}: {row.status}"]
    if row.diagnosis and row.status != "within":
        parts.append(row.diagnosis)
    if row.bound_ratio is not None:
        parts.append(f"{float(row.bound_ratio):.3g}× tolerance")
    if row.status in BAD and row.worst_index is not None:
        parts.append(f"at {list(row.worst_index)}")
    return ", ".join(parts)
