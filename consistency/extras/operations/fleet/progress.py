"""The progress of a fleet: the nodes as its user sees them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from consistency.capture.wording import and_more
from consistency.cli.progress import SILENT_S
from consistency.extras.operations.fleet.following import NodeState, NodeWatcher, Progress
from consistency.report.console import make_console, plain_cells
from consistency.text import one_line

_MOST_ROWS = 16
"""Nodes that have a line of their own; of more nodes, the lost ones and a count of the others are printed."""


@contextmanager
def fleet_progress(count: int, console: Console | None = None) -> Iterator[NodeWatcher]:
    """Yield a watcher of nodes: a table that moves on a terminal, elsewhere a line for what changes."""
    console = console or make_console(sys.stderr)
    if console.is_terminal:
        with Live(console=console, transient=True, refresh_per_second=4) as live:
            yield _Table(live)
    else:
        yield _Lines(console, count)


class _Lines:
    """Lines for a pipe: every change of a small fleet; lost nodes, and counts from time to time, of a large one."""

    def __init__(self, console: Console, count: int) -> None:
        self._console = console
        self._is_small = count <= _MOST_ROWS
        self._nodes: dict[str, Progress] = {}
        self._counted_at = time.monotonic()

    def __call__(self, node: str, progress: Progress) -> None:
        self._nodes[node] = progress
        if self._is_small or progress.state is NodeState.LOST:
            self._print(f"{node}: {progress}")
        is_done = all(progress.state.is_final for progress in self._nodes.values())
        if not self._is_small and (is_done or time.monotonic() - self._counted_at > SILENT_S):
            self._print(_counts(self._nodes))
            self._counted_at = time.monotonic()

    def _print(self, text: str) -> None:
        self._console.print(one_line(text), soft_wrap=True)


class _Table:
    """A table for a terminal: the nodes that are not done, and counts of all."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._nodes: dict[str, Progress] = {}

    def __call__(self, node: str, progress: Progress) -> None:
        self._nodes[node] = progress
        if progress.state is NodeState.LOST:
            self._live.console.print(one_line(f"{node}: {progress}"), soft_wrap=True)
        unfinished = [(name, progress) for name, progress in self._nodes.items() if not progress.state.is_final]
        # running nodes come first: the others only wait
        unfinished.sort(key=lambda row: row[1].state is NodeState.WAITING)
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, row_progress in unfinished[:_MOST_ROWS]:
            table.add_row(*plain_cells(name, row_progress.state, row_progress.text))
        lines: list[Table | Text] = [table]
        left_out = and_more(len(unfinished) - _MOST_ROWS, "node")
        if left_out:
            lines.append(Text(left_out))
        self._live.update(Group(*lines, Text(_counts(self._nodes))))


def _counts(nodes: dict[str, Progress]) -> str:
    """Return how many nodes there are so far, and how many are in each state."""
    counts = Counter(progress.state for progress in nodes.values())
    texts = [f"{counts[state]} {state}" for state in NodeState if counts[state]]
    return f"{len(nodes)} nodes: {', '.join(texts)}"
