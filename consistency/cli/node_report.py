"""Report the progress of one node of a fleet: the file that `consistency capture --progress` writes."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

import msgspec

from consistency.capture import origin
from consistency.capture.node_status import BEAT_S, NodeStatus, write_status
from consistency.capture.version import __version__
from consistency.cli.progress import Eta, Expected
from consistency.errors import CaptureError, ConsistencyError, first_line
from consistency.text import one_line

if TYPE_CHECKING:
    from consistency.devices.spec import DeviceInfo
    from consistency.launch.scheduler import Watcher
    from consistency.worker.protocol import Event


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

        def watch_and_report(label: str, event: Event) -> None:
            watch(label, event)
            self._outlook.take(label, event)
            if event.kind in ("done", "failed"):
                self._stages.pop(label, None)
            elif event.kind == "stage":
                self._stages[label] = event.stage
            else:
                return
            self._report_stage()

        return watch_and_report

    def _report_stage(self) -> None:
        """Write the stage of the worker that is furthest behind."""
        places = {label: self._outlook.place(label) or (0, 0) for label in self._stages}
        if places:
            slowest = min(places, key=lambda label: places[label])
            number, count = places[slowest]
            self.set(phase="running", stage=self._stages[slowest], number=number, of=count)

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
            outcome = {"phase": "delivered"}
        except KeyboardInterrupt:
            outcome = {"phase": "failed", "reason": "it was told to stop (by a signal, or Ctrl-C)"}
            raise
        except ConsistencyError as error:
            details = {name: text for name, text in error.parts.items() if text and name not in ("what", "hint")}
            sentences = [error.what, *(f"{name}: {text}" for name, text in details.items())]
            outcome = {"phase": "failed", "reason": one_line("; ".join(sentences))}
            raise
        except BaseException as error:
            outcome = {"phase": "failed", "reason": one_line(first_line(error))}
            raise
        finally:
            # the last status must not be followed by another beat
            over.set()
            thread.join()
            self.set(**outcome)


@contextmanager
def reporting(target: str | None) -> Iterator[NodeReport | None]:
    """Report to a file or URL while the work goes on; yield None where `target` is None."""
    with nullcontext() if target is None else NodeReport(target).beating() as report:
        yield report


def _software() -> dict[str, str]:
    """Return the versions that decide the numbers, by name, without importing anything."""
    versions = {"consistency": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
