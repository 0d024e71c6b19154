"""The progress of a fleet: the nodes as its user sees them, and what `consistency capture --progress` writes of one."""

from __future__ import annotations

import platform
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from consistency.capture import origin
from consistency.capture.node_status import BEAT_S, NodeStatus, write_status
from consistency.capture.version import __version__
from consistency.capture.wording import and_more
from consistency.cli.progress import SILENT_S, Eta, Expected
from consistency.errors import CaptureError, ConsistencyError, first_line
from consistency.report.console import make_console, plain_cells
from consistency.text import one_line
from consistency.workflows.fleet.following import NodeState, NodeWatcher, Progress

if TYPE_CHECKING:
    from consistency.devices.spec import DeviceInfo
    from consistency.launch.engine import Watcher
    from consistency.worker.protocol import Event


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


_LIBRARIES = ("torch", "transformers", "peft", "safetensors", "accelerate", "numpy")


class NodeReport:
    """The status of this node, rewritten with every change and every few seconds."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._status = NodeStatus(phase="checking", host=origin.host(), software=_software())
        self._outlook = Eta()
        self._stages: dict[str, str] = {}

    def devices(self, devices: Sequence[DeviceInfo]) -> None:
        """Report the devices of this host."""
        from consistency.case.requirements import count_accelerators

        self.set(accelerators=count_accelerators(devices))

    def set(self, **changes: Any) -> None:
        """Change the status, and write it."""
        with self._lock:
            self._status = msgspec.structs.replace(self._status, **changes, beat=self._status.beat + 1)
            with suppress(CaptureError):  # a capture without a report of its progress is still a capture
                write_status(self._target, self._status)

    def beside(self, watch: Watcher, expected: Expected) -> Watcher:
        """Return a watcher that passes events on, and reports the stage that is furthest behind."""
        self._outlook = Eta(expected)

        def both(label: str, event: Event) -> None:
            watch(label, event)
            self._outlook.take(label, event)
            if event.kind in ("done", "failed"):
                self._stages.pop(label, None)
            elif event.kind == "stage":
                self._stages[label] = event.stage
            else:
                return
            self._report_stage()

        return both

    def _report_stage(self) -> None:
        places = {label: self._outlook.place(label) or (0, 0) for label in self._stages}
        if places:
            last = min(places, key=lambda label: places[label])
            self.set(phase="running", stage=self._stages[last], number=places[last][0], of=places[last][1])

    @contextmanager
    def beating(self) -> Iterator[NodeReport]:
        """Write the status until the work is over, and then how it ended."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT_S):
                self.set()

        self.set()
        thread = threading.Thread(target=beat, name="consistency-heartbeat", daemon=True)
        thread.start()
        try:
            yield self
            last = {"phase": "delivered"}
        except KeyboardInterrupt:
            last = {"phase": "failed", "reason": "it was told to stop (by a signal, or Ctrl-C)"}
            raise
        except ConsistencyError as error:
            parts = [f"{name}: {part}" for name, part in error.parts.items() if part and name not in ("what", "hint")]
            last = {"phase": "failed", "reason": one_line("; ".join([error.what, *parts]))}
            raise
        except BaseException as error:
            last = {"phase": "failed", "reason": one_line(first_line(error))}
            raise
        finally:
            over.set()
            thread.join()
            self.set(**last)


@contextmanager
def reporting(target: str | None) -> Iterator[NodeReport | None]:
    """Report to a file or URL while the work goes on, if there is one."""
    with nullcontext() if target is None else NodeReport(target).beating() as report:
        yield report


def _software() -> dict[str, str]:
    """Return the versions that decide the numbers, without importing anything."""
    found = {"consistency": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
