"""The report on two weight files in a terminal: the verdict, the causes, and a table of the tensors that differ."""

from __future__ import annotations

import dataclasses
import math

import msgspec
from rich.console import Console

from consistency.capture.wording import and_more, counted
from consistency.comparison.result import Comparison, Finding, Outcome, TensorComparison
from consistency.report.console import Writer, without_trailing_blanks
from consistency.report.documents import of_comparison
from consistency.report.formats import View
from consistency.report.terminal import write_head
from consistency.text import one_line

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
        facts = [comparison.dtype, counted(len(comparison.tensors), "tensor")]
        facts += [] if elapsed_s is None else [f"{elapsed_s:.2f} s"]
        document = dataclasses.replace(of_comparison(comparison, View()), facts=tuple(facts))
        write_head(write, document, title="consistency diff")
        findings = list(map(_in_lines, comparison.findings))
        write.findings(f for f in findings if f.severity != "note")
        shown = [t for t in comparison.tensors if verbose or t.is_wrong]
        if shown:
            limit = len(shown) if verbose else _MOST_TENSORS
            titles = ("tensor", "shape", "dtype", "", "differ", "largest", "ulp")
            write.table(titles, map(_cells, shown[:limit]), left_out=len(shown) - limit)
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


def _cells(tensor: TensorComparison) -> list[str]:
    row = tensor.outcomes[-1]
    cells = [f"{tensor.layer}.{tensor.tensor}", "×".join(map(str, tensor.shape)) or "scalar", tensor.dtype]
    cells.append(row.word or row.status)
    if row.status == "outside" and row.mismatched is not None:
        cells += [f"{row.mismatched} of {row.elements}", f"{float(row.max_abs or 0):.3g}"]
        cells.append("" if row.max_ulp is None else "across 0" if _has_other_sign(row) else str(row.max_ulp))
    return list(map(one_line, cells))
