"""What `consistency doctor` prints: copies, the other stages at a glance, the machine, and what to mend first."""

from __future__ import annotations

from rich.console import Console

from consistency.comparison.findings.advice import MOST_ADVICE, about, advise
from consistency.comparison.result import Comparison
from consistency.report.copy_matrix import worth_showing
from consistency.report.summary import groups, stages
from consistency.report.terminal import Writer, sentence, without_trailing_blanks


def print_doctor(comparison: Comparison, console: Console, *, elapsed_s: float, folder: str | None = None) -> None:
    """Print what was seen of this machine."""
    with without_trailing_blanks(console):
        write = Writer(console)
        write.title(comparison, elapsed_s)
        write.verdict(comparison.verdict, sentence(comparison))
        for load_path in comparison.load_paths:
            write.table(groups(comparison, load_path), stages(comparison), comparison.reference)
        for matrix in worth_showing(comparison.tensors):
            write.matrix(matrix)
        for host_facts in comparison.hosts:
            for text in about(host_facts):
                write.line(text)
            console.print()
        _mend(write, comparison)
        for finding in comparison.findings:
            if finding.severity == "note":
                write.line(f"note: {finding.message}")
        if folder is not None:
            write.line(f"report and captures: {folder}")


def _mend(write: Writer, comparison: Comparison) -> None:
    found = advise(comparison)
    if not found:
        write.line("nothing to mend", style="bold")
        return
    write.line("to mend first:", style="bold")
    for number, advice in enumerate(found[:MOST_ADVICE], start=1):
        write.line(f"{number:<3}{advice.what}", style="red" if advice.urgent else "yellow")
        if advice.mend is not None:
            write.line(advice.mend, indent=5)
    if len(found) > MOST_ADVICE:
        write.line(f"and {len(found) - MOST_ADVICE} more: --json has them all")
