"""The report of `consistency doctor`: copies, the other stages at a glance, the machine, and what to fix first."""

from __future__ import annotations

from rich.console import Console

from consistency.capture.wording import and_more, some
from consistency.comparison.findings.host import MOST_ADVICE, about, advise
from consistency.comparison.result import Comparison
from consistency.devices.seen import FIRST_STEPS, unseen
from consistency.report.console import Writer, without_trailing_blanks
from consistency.report.copy_matrix import write_matrices
from consistency.report.documents import of_comparison
from consistency.report.findings import is_command
from consistency.report.formats import View
from consistency.report.terminal import write_head, write_tables


def print_doctor(comparison: Comparison, console: Console, *, elapsed_s: float, folder: str | None = None) -> None:
    """Print the state of this machine."""
    with without_trailing_blanks(console):
        write = Writer(console)
        document = of_comparison(comparison, View(elapsed_s=elapsed_s))
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
