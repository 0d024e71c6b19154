"""The progress of a fleet: the nodes as its user sees them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from consistency.capture.wording import and_more
from consistency.cli.progress import SILENT_S
from consistency.extras.operations.fleet.following import NodeState, NodeWatcher, Progress
from consistency.report.console import make_console, plain_cells
from consistency.text import one_line

if TYPE_CHECKING:
    pass


_MOST_ROWS = 16
"""As many nodes have a line of their own; of more, the lost ones and a count of the others are printed."""


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
    """Lines for a pipe: every change of a small fleet; what is lost, and counts from time to time, of a large one."""

    def __init__(self, console: Console, count: int) -> None:
        self._console = console
        self._each = count <= _MOST_ROWS
        self._nodes: dict[str, Progress] = {}
        self._counted = time.monotonic()

    def __call__(self, node: str, progress: Progress) -> None:
        self._nodes[node] = progress
        if self._each or progress.state is NodeState.LOST:
            self._print(f"{node}: {progress}")
        done = all(one.state.is_final for one in self._nodes.values())
        if not self._each and (done or time.monotonic() - self._counted > SILENT_S):
            self._print(_counts(self._nodes))
            self._counted = time.monotonic()

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
        running = [(name, one) for name, one in self._nodes.items() if not one.state.is_final]
        # those that run come first: the others only wait
        running.sort(key=lambda pair: pair[1].state is NodeState.WAITING)
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, one in running[:_MOST_ROWS]:
            table.add_row(*plain_cells(name, one.state, one.text))
        more = and_more(len(running) - _MOST_ROWS, "node")
        self._live.update(Group(table, *([Text(more)] if more else []), Text(_counts(self._nodes))))


def _counts(nodes: dict[str, Progress]) -> str:
    counts = Counter(progress.state for progress in nodes.values())
    texts = [f"{counts[state]} {state}" for state in NodeState if counts[state]]
    return f"{len(nodes)} nodes: {', '.join(texts)}"
