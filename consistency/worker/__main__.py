"""The worker's process: run cases on one device, write records; `python -m consistency.worker JOBS`.

The file has a list of jobs, one per case; each is done in its own folder. Every failure is caught here and written as
an event, so that the parent can report it; nothing is printed. This package imports nothing of the parent's side but
the protocol that both share.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from consistency.capture.json_codec import decode_json
from consistency.errors import CaptureError, ConsistencyError, UnusableDeviceError, UsageError
from consistency.worker import lifeline
from consistency.worker.device_error import DeviceError, Trouble, ends_the_worker
from consistency.worker.heartbeat import Heartbeat
from consistency.worker.protocol import CANNOT_WRITE, DEVICE_FAILED, OUT_OF_MEMORY, EventLog, Job
from consistency.worker.uncollected import uncollected

if TYPE_CHECKING:
    from consistency.worker.model.kept_base import BaseKeeper


def main(path: Path) -> int:
    """Do the jobs; return 0 when done, 2 for invalid input, 3 for any other failure, 4 when that cannot be written.

    After invalid input the next job is done. After any other failure nobody knows whether this process still works: it
    ends, and the parent starts another one for the remaining jobs.
    """
    jobs = decode_json(path.read_bytes(), list[Job])
    lifeline.hold(jobs[0].parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the parent decides what ends
    status, bases = 0, _Bases(jobs)
    for number, job in enumerate(jobs):
        try:
            events = _move_to(job, is_first=number == 0)
        except OSError:
            return CANNOT_WRITE
        with events, Heartbeat(events):
            status, goes_on = _do(job, events, bases)
        if not goes_on:
            break
    return status


def _move_to(job: Job, *, is_first: bool) -> EventLog:
    """Send events, stacks and all that is printed to the worker's folder of a case."""
    folder = Path(job.folder)
    stack = (folder / "stack.txt").open("w", encoding="utf-8")
    faulthandler.enable(file=stack, all_threads=True)
    if hasattr(faulthandler, "register"):
        # and then end, as the signal does by itself: the launcher sends it to a worker that it gives up
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True, chain=True)
    if not is_first:  # the parent has opened the first one
        sys.stdout.flush()
        with (folder / "log.txt").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    return EventLog(folder / "events.jsonl", is_on_cpu=job.device == "cpu")


class _Bases:
    """The keeper of bases, made after torch was imported by the first job."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs

    @functools.cached_property
    def keeper(self) -> BaseKeeper:
        from consistency.worker.model.kept_base import BaseKeeper

        return BaseKeeper(self._jobs)


@functools.cache
def session() -> Callable[[Job, EventLog, BaseKeeper], bool]:
    """Import torch, and what runs a job."""
    with uncollected():
        from consistency.worker.session import run

    return run


def _do(job: Job, events: EventLog, bases: _Bases) -> tuple[int, bool]:
    """Do one job; return the exit status, and whether this process can take another."""
    try:
        if not session.cache_info().currsize:  # else they were imported before: by a case, or for all workers
            events.stage("import")
        run = session()
        is_usable = run(job, events, bases.keeper)
        events.done()
        return 0, is_usable
    except BaseException as error:  # nothing may pass here: the parent reports the error
        # these errors state their cause: the device need not be asked
        is_explained = isinstance(error, (UsageError, CaptureError, UnusableDeviceError))
        device_error = None if is_explained else ends_the_worker(error, job.device)
        try:
            events.failed({**_described(error, device_error), "trace": traceback.format_exc(limit=40)})
        except OSError:
            return CANNOT_WRITE, False
        is_invalid_input = isinstance(error, ConsistencyError) and not isinstance(error, UnusableDeviceError)
        if device_error is None and is_invalid_input:
            return 2, not isinstance(error, CaptureError)
        return 3, False


def _described(error: BaseException, lost: DeviceError | None) -> dict[str, str | None]:
    """Return the fields of an error in an event; `lost` is the device's, where that ended the worker."""
    if lost is not None:
        kind = OUT_OF_MEMORY if lost.trouble is Trouble.MEMORY else DEVICE_FAILED
        return {"kind": kind, "what": lost.words, "hint": lost.meaning}
    if isinstance(error, ConsistencyError):
        return {"kind": type(error).__name__, **error.parts}
    return {"kind": type(error).__name__, "what": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
