"""What a person reads of two weight files: the verdict, the causes, and a table of the tensors that differ."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from consistency.capture.wording import counted
from consistency.comparison.result import BAD, Comparison, Finding, TensorComparison
from consistency.report.terminal import Writer, without_trailing_blanks
from consistency.report.text import one_line

_MOST_TENSORS = 20


def print_diff(
    comparison: Comparison,
    console: Console,
    *,
    elapsed_s: float | None = None,
    verbose: bool = False,
    folder: str | None = None,
) -> None:
    """Print the comparison of two weight files."""
    with without_trailing_blanks(console):
        write = Writer(console)
        count = len(comparison.tensors)
        parts = [
            one_line(f"consistency diff · {comparison.case}"),
            comparison.dtype,
            counted(count, "tensor"),
        ]
        if elapsed_s is not None:
            parts.append(f"{elapsed_s:.2f} s")
        write.heading(parts)
        write.verdict(comparison.verdict, sentence(comparison))
        for number, finding in enumerate((f for f in comparison.findings if f.severity == "error"), start=1):
            write.finding(number, _in_lines(finding))
        _table(write, console, [t for t in comparison.tensors if verbose or _is_bad(t)], verbose=verbose)
        for finding in comparison.findings:
            if finding.severity == "note":
                write.line(f"note: {_in_lines(finding).message}")
        if folder is not None:
            write.line(f"report: {folder}")


def sentence(comparison: Comparison) -> str:
    """Say the verdict in one sentence."""
    bad = sum(_is_bad(tensor) for tensor in comparison.tensors)
    count = len(comparison.tensors)
    if not bad:
        text = f"{'the tensor has' if count == 1 else f'all {count} tensors have'} the same bytes in both"
        return text if comparison.verdict == "consistent" else f"{text}, and the settings beside them differ"
    return f"{bad} of {count} tensors {'is' if bad == 1 else 'are'} not the same in both"


def _in_lines(finding: Finding) -> Finding:
    detail = tuple(map(one_line, finding.detail))
    return msgspec.structs.replace(finding, message=one_line(finding.message), detail=detail)


def _is_bad(tensor: TensorComparison) -> bool:
    return any(row.status in BAD for row in tensor.rows)


def _table(write: Writer, console: Console, shown: list[TensorComparison], *, verbose: bool) -> None:
    if not shown:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("tensor", "shape", "dtype", "", "differ", "largest", "ulp"):
        table.add_column(title, header_style="bold", overflow="fold")
    limit = len(shown) if verbose else _MOST_TENSORS
    for tensor in shown[:limit]:
        row = tensor.rows[0]
        measured = row.status == "outside" and row.mismatched is not None
        cells = (
            f"{tensor.layer}.{tensor.tensor}",
            "×".join(map(str, tensor.shape)) or "scalar",
            tensor.dtype,
            row.diagnosis or row.status,
            f"{row.mismatched} of {row.elements}" if measured else "",
            f"{float(row.max_abs or 0):.3g}" if measured else "",
            "" if not measured or row.max_ulp is None else str(row.max_ulp),
        )
        table.add_row(*(write.text(one_line(cell)) for cell in cells))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    if len(shown) > limit:
        write.line(f"and {len(shown) - limit} more: -v shows all")
    console.print()
