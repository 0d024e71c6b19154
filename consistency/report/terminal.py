"""The report that a person reads in a terminal: the verdict, what to do about it, and a table at a glance."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from consistency.capture.wording import counted, some
from consistency.case.load_path import is_alternative
from consistency.case.stages import Stage
from consistency.comparison.findings.transfers import Matrix
from consistency.comparison.result import BAD, Comparison, Finding, Row, TensorComparison, Verdict
from consistency.report.copy_matrix import draw, legend, worth_showing
from consistency.report.summary import (
    AlternativePath,
    Cell,
    Group,
    Line,
    alternative_paths,
    class_text,
    divergences,
    groups,
    stages,
    worst_ratio,
)
from consistency.report.text import clean

PIPE_WIDTH = 140  # a pipe has no width: wide enough for names of layers, narrow enough for an issue tracker
_MOST_TENSORS = 20
_MOST_FINDINGS = 20
_MOST_LOAD_PATHS = 4  # names of roads that fit a line
_STYLES = {"consistent": "bold green", "inconsistent": "bold red", "incomplete": "bold yellow"}


def make_console(file: TextIO | None = None) -> Console:
    """Return a console: colours on a terminal, plain text elsewhere."""
    file = file or sys.stdout
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, PIPE_WIDTH)
    return console


def print_report(
    comparison: Comparison,
    console: Console,
    *,
    elapsed_s: float | None = None,
    verbose: bool = False,
    folder: str | None = None,
) -> None:
    """Print a comparison."""
    with without_trailing_blanks(console):
        _print_report(comparison, console, elapsed_s=elapsed_s, verbose=verbose, folder=folder)


def _print_report(
    comparison: Comparison, console: Console, *, elapsed_s: float | None, verbose: bool, folder: str | None
) -> None:
    write = Writer(console)
    write.title(comparison, elapsed_s)
    write.verdict(comparison.verdict, sentence(comparison))
    errors = [f for f in comparison.findings if f.severity != "note"]
    shown = errors if verbose else errors[:_MOST_FINDINGS]
    for number, finding in enumerate(shown, start=1):
        write.finding(number, finding)
    if len(errors) > len(shown):
        write.line(f"and {counted(len(errors) - len(shown), 'more finding')}: -v shows all")
    mains = [load_path for load_path in comparison.load_paths if not is_alternative(load_path)]
    for load_path in mains:
        if len(mains) > 1:
            write.line(f"road: {load_path}", style="bold")
        write.table(groups(comparison, load_path), stages(comparison), comparison.reference)
    for matrix in worth_showing(comparison.tensors):
        write.matrix(matrix)
    write.alternative_paths(alternative_paths(comparison))
    write.first_bits(comparison)
    write.layers(comparison, verbose=verbose)
    for finding in comparison.findings:
        if finding.severity == "note":
            write.line(f"note: {finding.message}")
    if comparison.not_looked_at:
        write.line(f"not looked at (level {comparison.level}): {', '.join(comparison.not_looked_at)}")
    if folder is not None:
        write.line(f"report and captures: {folder}")


@contextmanager
def without_trailing_blanks(console: Console) -> Iterator[None]:
    """Leave off what rich pads lines with, where the output is a file that people compare and paste."""
    if console.is_terminal:
        yield
        return
    with console.capture() as captured:
        yield
    encoding = console.encoding or "ascii"  # rich cuts with an ellipsis, which not every encoding has
    text = captured.get().encode(encoding, "replace").decode(encoding)
    console.file.write("".join(f"{line.rstrip()}\n" for line in text.splitlines()))


class Writer:
    """The parts of the report, each on one console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        encoding = (console.encoding or "ascii").lower()
        plain = not encoding.startswith("utf")
        self._marks = {"=": "=", "✗": "x", "≤": "<=", "–": "-"} if plain else {c: c for c in "=✗≤–"}
        self._dot = "-" if plain else "·"
        self._encoding = encoding if plain else None

    def line(self, text: str, *, indent: int = 2, style: str = "") -> None:
        self._console.print(Padding(self.text(text, style), (0, 0, 0, indent), expand=False))

    def title(self, comparison: Comparison, elapsed_s: float | None) -> None:
        parts = ["consistency", comparison.case, comparison.dtype, counted(len(comparison.workers), "worker")]
        if len(comparison.load_paths) > 1:
            parts.append(counted(len(comparison.load_paths), "road"))
        if elapsed_s is not None:
            parts.append(f"{elapsed_s:.0f} s")
        if comparison.simulated:
            parts.append("SIMULATED DEVICES")
        self.heading(parts)

    def heading(self, parts: Sequence[str]) -> None:
        self._console.print(self.text(f" {self._dot} ".join(parts), "bold"))
        self._console.print()

    def verdict(self, verdict: Verdict, said: str) -> None:
        text = self.text(verdict.upper(), _STYLES[verdict])
        text.append(f"   {self._fit(clean(said))}", style="default")
        self._console.print(Padding(text, (0, 0, 1, 2), expand=False))

    def finding(self, number: int, finding: Finding) -> None:
        style = "red" if finding.severity == "error" else "yellow"
        label = "" if finding.severity == "error" else "warning: "
        self.line(f"{number:<3}{label}{finding.message}", style=style)
        for text in finding.detail:
            self.line(text, indent=5)
        if finding.next:
            self.line(f"next: {finding.next}", indent=5)
        self._console.print()

    def table(self, found: list[Group], columns: list[str], reference: str | None) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 4, 0, 0))
        table.add_column("", no_wrap=True)
        for name in columns:
            table.add_column(name, header_style="bold", no_wrap=True)
        for group in found:
            table.add_row(self.text(f"{group.architecture}    {', '.join(group.models)}", "bold"))
            for line in group.lines:
                names = self._workers(line, reference)
                table.add_row(self.text(f"   {names}"), *(self._cell(name, line.cells.get(name)) for name in columns))
        self._console.print(Padding(table, (0, 0, 0, 2), expand=False))
        marks = self._marks
        self.line(
            f"{marks['=']} equal bits   {marks['≤']} within the bound, largest share of it   "
            f"{marks['✗']} not what it should be   {marks['–']} not looked at",
            style="dim",
        )
        self._console.print()

    def matrix(self, matrix: Matrix) -> None:
        """Print what copies between devices deliver."""
        self._console.print(Padding(draw(matrix, self.text, self._marks), (0, 0, 0, 2), expand=False))
        for text in legend(matrix):
            self.line(text, style="dim")
        self._console.print()

    def first_bits(self, comparison: Comparison) -> None:
        for found, workers in divergences(comparison.first_other_bits):
            where = f" (road {found.load_path})" if found.load_path != comparison.load_paths[0] else ""
            self.line(
                f"{some(workers)}{where}: other bits than {comparison.reference} from {found.stage}, "
                f"{found.layer}.{found.tensor} on ({found.status})"
            )
        if comparison.first_other_bits:
            self._console.print()

    def alternative_paths(self, found: Sequence[AlternativePath]) -> None:
        """Print in one line the side roads on which all is equal, and those apart on which something is not."""
        equal = [side.load_path for side in found if not side.bad and not side.skipped]
        if equal:
            count = f"{len(equal)} more, all equal" if len(equal) > 1 else "1 more, equal"
            self.line(f"roads: {count}" + (f" ({', '.join(equal)})" if len(equal) <= _MOST_LOAD_PATHS else ""))
        for side in found:
            if side.bad:
                self.line(
                    f"road {side.load_path}: {self._marks['✗']} {side.bad}/{side.total} on {some(side.workers)}",
                    style="bold red",
                )
            elif side.skipped:
                self.line(f"road {side.load_path}: skipped", style="dim")
        if found:
            self._console.print()

    def layers(self, comparison: Comparison, *, verbose: bool) -> None:
        """Print the tensors that are not what they should be; all of them where `verbose` says so."""
        bad = [t for t in comparison.tensors if verbose or any(row.status in BAD for row in t.rows)]
        shown = [t for t in bad if verbose or t.stage != Stage.TRANSFER]  # the matrix shows these
        if not shown:
            return
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for title in ("stage", "layer", "tensor", "agree to the bit", "worst"):
            table.add_column(title, header_style="bold", overflow="fold")
        limit = len(shown) if verbose else _MOST_TENSORS
        for tensor in shown[:limit]:
            stage = (
                tensor.stage if tensor.load_path == comparison.load_paths[0] else f"{tensor.stage} ({tensor.load_path})"
            )
            cells = (stage, tensor.layer, tensor.tensor, class_text(tensor.classes), self._worst(tensor))
            table.add_row(*(self.text(cell) for cell in cells))
        self._console.print(Padding(table, (0, 0, 0, 2), expand=False))
        if len(shown) > limit:
            self.line(f"and {len(shown) - limit} more: -v shows all")
        self._console.print()

    def _workers(self, line: Line, reference: str | None) -> str:
        """Name the workers of a line, as many as leave room for its cells, the reference worker before all."""
        if line.kinds > 1:
            return f"{len(line.workers)} others, of {line.kinds} kinds of bits"
        texts = [f"{name} (reference)" if name == reference else name for name in line.workers]
        room = self._console.width // 2
        if len("  ".join(texts)) <= room:
            return "  ".join(texts)
        texts.sort(key=lambda text: not text.endswith(" (reference)"))
        shown = 1
        while len("  ".join(texts[: shown + 1])) <= room - len("  … and 1000 more"):
            shown += 1
        return "  ".join([*texts[:shown], f"… and {len(texts) - shown} more"])

    def _cell(self, stage: str, cell: Cell | None) -> Text:
        marks = self._marks
        if cell is None:
            return self.text(marks["–"], "dim")
        if cell.bad:
            text = f"{marks['✗']} {cell.bad}/{cell.total}"
            if stage == "forward" and cell.first_bad:
                text = f"{marks['✗']} from {cell.first_bad}"
            return self.text(text, "bold red")
        if "blocked" in cell.counts:
            return self.text(f"blocked {cell.counts['blocked']}/{cell.total}", "yellow")
        if "within" in cell.counts and cell.worst_ratio is not None:
            return self.text(f"{marks['≤']} {cell.worst_ratio:.2f}", "green")
        if "equal" in cell.counts:
            return self.text(marks["="], "green")
        return self.text(f"{marks['–']} skipped", "dim")

    def _worst(self, tensor: TensorComparison) -> str:
        row = max(tensor.rows, key=_badness)
        parts = [f"{row.worker}: {row.status}"]
        if row.diagnosis and row.status != "within":
            parts.append(row.diagnosis)
        if row.bound_ratio is not None:
            what = "tolerance given" if tensor.rule == "user" else "bound"
            parts.append(f"{float(row.bound_ratio):.3g} of the {what}")
        if row.status in BAD and row.worst_index is not None:
            parts.append(f"at {list(row.worst_index)}")
        return ", ".join(parts)

    def text(self, text: str, style: str = "") -> Text:
        return Text(self._fit(clean(text)), style=style)

    def _fit(self, text: str) -> str:
        if self._encoding is None:
            return text
        return (
            text.replace("·", "-")
            .replace("×", "x")
            .replace("–", "-")
            .replace("…", "...")
            .replace("→", "->")
            .encode(self._encoding, "replace")
            .decode(self._encoding)
        )


def sentence(comparison: Comparison) -> str:
    """Say the verdict in one sentence, and which devices of it are none."""
    simulated = list(dict.fromkeys(w.name for w in comparison.workers if w.simulated))
    told = f"; simulated: {some(simulated)}" if simulated else ""
    return _verdict_sentence(comparison) + told


def _the_same(comparison: Comparison) -> str:
    """Say what is the same everywhere, of that which was looked at."""
    seen = {tensor.stage for tensor in comparison.tensors}
    match Stage.BASE in seen, Stage.ADAPTER in seen:
        case True, True:
            return "base and adapter are the same numbers"
        case True, False:
            return "the base is the same"
        case False, True:
            return "the adapter is the same"
        case _:
            return "nothing that was looked at is wrong"


def _verdict_sentence(comparison: Comparison) -> str:
    workers = counted(len({w.name for w in comparison.workers}), "worker")
    lost = [w.name for w in comparison.workers if w.status != "ok"]
    errors = [f for f in comparison.findings if f.severity == "error"]
    if comparison.verdict == "consistent":
        accepted = sum(finding.accepted is not None for finding in comparison.findings)
        if accepted:
            return f"nothing new on {workers}: the baseline accepts {counted(accepted, 'finding')}"
        ratio = worst_ratio(comparison)
        text = f"{_the_same(comparison)} on {workers}"
        limit = (
            "its bound, or of the tolerance given" if any(t.rule == "user" for t in comparison.tensors) else "its bound"
        )
        return text if ratio is None else f"{text}; what was computed stays within {ratio:.2f} of {limit}"
    if comparison.verdict == "incomplete":
        what = f"{some(lost)} did not finish" if lost else "part of what was asked for could not be looked at"
        others = sum(f.kind not in ("lost-worker", "failed-worker") for f in errors)
        return what + (f"; beside that there is {counted(others, 'finding')}" if others else "")
    first = errors[0].message
    return first if len(errors) == 1 else f"{first} (and {counted(len(errors) - 1, 'other finding')})"


def _badness(row: Row) -> tuple[int, float]:
    order = ("equal", "within", "skipped", "blocked", "unexpected", "missing", "outside")
    ratio = 0.0 if row.bound_ratio is None else float(row.bound_ratio)
    return (order.index(row.status), float("inf") if ratio != ratio else ratio)
