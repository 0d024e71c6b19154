"""The progress of a run: one line per worker, with stage and layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from consistency.launch.engine import Watcher
from consistency.report.console import make_console
from consistency.report.text import clean
from consistency.worker.protocol import Event


@contextmanager
def progress(console: Console | None = None) -> Iterator[Watcher]:
    """Yield a watcher: moving lines on a terminal, one plain line per stage elsewhere."""
    console = console or make_console(sys.stderr)
    if not console.is_terminal:
        yield _plain(console)
        return
    with Progress(
        TextColumn("{task.fields[label]}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bars:
        yield _moving(bars)


def _plain(console: Console) -> Watcher:
    """Print a line per stage, or, of several cases, a line per case."""
    of_several: set[str] = set()

    def watch(label: str, event: Event) -> None:
        if event.kind == "failed" and not event.error:
            console.print(f"{label}: {clean(event.message)}", soft_wrap=True)
        elif event.kind in ("stage", "done") and label not in of_several:
            console.print(f"{label}: {event.stage or 'done'}", soft_wrap=True)
        elif event.kind == "case":
            of_several.add(label)
            console.print(f"{label}: case {clean(event.message)}", soft_wrap=True)

    return watch


def _moving(bars: Progress) -> Watcher:
    tasks: dict[str, TaskID] = {}
    cases: dict[str, str] = {}

    def watch(label: str, event: Event) -> None:
        if label not in tasks:
            tasks[label] = bars.add_task("", total=None, label=label)
        task, of = tasks[label], cases.get(label, "")
        match event.kind:
            case "case":
                cases[label] = f"{clean(event.message)}  "
                bars.update(task, description=cases[label], completed=0, total=None)
            case "stage":
                bars.update(task, description=f"{of}{event.stage}", completed=0, total=None)
            case "step":
                text = of + clean(f"{event.stage}  {event.layer}")
                bars.update(task, description=text, completed=event.done, total=event.total or None)
            case "wait":
                bars.update(task, description=f"{of}waits {event.message}")
            case "done":
                bars.update(task, description=f"{of}done", completed=1, total=1)
            case "failed":
                bars.update(task, description=of + clean(event.message or "failed"))

    return watch
