"""Import the libraries once, and fork a worker of the CPU for each request of the launcher.

`python -m consistency.worker.importer CHANNEL PARENT LIBRARIES FOLDER`: the socket of the requests, the launcher's
process, `torch` or `models`, and where the workers write, for people who list processes.

A fork is a worker like any other only if nothing was decided before. ATen, MKL and oneDNN choose their kernels when
they run their first operation, and OpenMP its threads; so this process runs no operation and starts no thread. Where a
library does so while it is imported, this process forks none, and the launcher starts its workers anew.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from consistency.capture.json_codec import decode_json
from consistency.worker import __main__ as worker
from consistency.worker import lifeline
from consistency.worker.protocol import ENDED, STARTED, ForkRequest
from consistency.worker.uncollected import uncollected

MODELS = "models"
"""The third argument where transformers and PEFT are to be imported too."""

POLL_S = 0.02
"""Seconds between two looks whether a worker has ended."""

_REQUEST_BYTES = 1 << 16
"""Largest size of a request."""

_CAPABILITY = "ATEN_CPU_CAPABILITY"
_COMPUTE_NOTHING = frozenset({"aten.lift_fresh.default"})
"""Operations that compute nothing: `torch.tensor` ends with this one, which returns its argument. torch._dynamo makes
two constants so when it is imported."""


def main(channel: socket.socket, parent_pid: int, *, models: bool) -> int:
    """Import, then serve; return a worker's exit status in each of the workers."""
    lifeline.end_with(parent_pid)
    import_libraries(models=models)
    jobs = serve(channel)
    if jobs is None:
        os._exit(0)  # the launcher is gone; an interpreter takes a while to take apart what it has imported
    return worker.main(Path(jobs))


def import_libraries(*, models: bool) -> None:
    """Import all that runs a job.

    Raises
    ------
    RuntimeError
        An operation ran meanwhile. What `import torch` itself does is not watched here: a worker looks at its kernels.
    """
    with uncollected():
        from consistency.numerics.dispatch_mode import DispatchMode

        ran: list[str] = []

        class Watch(DispatchMode):
            def __init__(self) -> None:
                super().__init__()  # type: ignore[no-untyped-call]

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                ran.append(str(func))
                return func(*args, **(kwargs or {}))

        with Watch():
            worker.session()
            if models:
                from consistency.worker.session import import_models

                import_models()
    computing = sorted(set(ran) - _COMPUTE_NOTHING)
    if computing:
        raise RuntimeError(f"operations ran while the libraries were imported: {', '.join(computing)}")


def serve(channel: socket.socket) -> str | None:
    """Fork a worker for each request, and report how each has ended.

    This returns in each worker too, with the file of its jobs; in this process it returns None when the launcher has
    closed the channel. The launcher kills the workers before that; the kernel kills any that is left when this process
    ends.
    """
    reports: dict[int, int] = {}  # by a worker's process, the file in which its end is reported
    while True:
        ready, _, _ = select.select([channel], [], [], POLL_S if reports else None)
        _report_ended(reports)
        if not ready:
            continue
        message, (*files,), _, _ = socket.recv_fds(channel, _REQUEST_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return None
        stdin, log, report = files
        forked = _fork()
        if forked == 0:
            # this is the worker: it keeps nothing of the requests, and nothing of other workers
            channel.close()
            for other_report in reports.values():
                os.close(other_report)
            request = decode_json(message, ForkRequest)
            _become_worker(request, stdin, log)
            _tell(report, STARTED, os.getpid())
            return request.jobs
        os.close(stdin)
        os.close(log)
        if forked is None:
            os.close(report)  # the launcher reads that no worker was started
        else:
            reports[forked] = report


def _report_ended(reports: dict[int, int]) -> None:
    """Report the exit status of each worker that has ended, and remove it from `reports`."""
    for pid in list(reports):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _tell(reports.pop(pid), ENDED, os.waitstatus_to_exitcode(status))


def _fork() -> int | None:
    """Return the id of a new process, and 0 in that process; None where it would be no worker like any other.

    A process with more than one thread is not forked: only the thread that forks goes on in the new one.
    """
    if len([*Path("/proc/self/task").iterdir()]) != 1:
        return None
    try:
        return os.fork()
    except OSError:
        return None


def _become_worker(request: ForkRequest, stdin: int, log: int) -> None:
    """Give this process what the launcher gives to a worker that it starts itself: a session, input, log, variables.

    It ends here if torch has chosen other kernels than the variables ask for.
    """
    os.setsid()
    printed = os.pread(1, os.fstat(1).st_size, 0)  # while the libraries were imported: part of each worker's log
    for file, number in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(file, number)
    os.close(stdin)
    os.close(log)
    os.write(1, printed)
    os.environ.update(request.variables)
    requested = os.environ.get(_CAPABILITY)
    import torch

    if requested is None:
        return
    capability = torch.backends.cpu.get_cpu_capability()
    if capability != requested.upper():
        sys.exit(f"torch has chosen its kernels before this worker was forked: {capability}, not {requested.upper()}")


def _tell(report: int, word: str, number: int) -> None:
    """Write a word and a number to the launcher, and close the file."""
    with suppress(BrokenPipeError):  # the launcher has given this worker up: it reads the end of its input
        os.write(report, f"{word} {number}\n".encode("ascii"))
    os.close(report)


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), models=sys.argv[3] == MODELS))
