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
_CAPABILITY = "ATEN_CPU_CAPABILITY"
_KEEPS = frozenset({"aten.lift_fresh.default"})
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
        from torch.utils._python_dispatch import TorchDispatchMode

        ran: list[str] = []

        class Watch(TorchDispatchMode):
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
    if found := sorted(set(ran) - _KEEPS):
        raise RuntimeError(f"operations ran while the libraries were imported: {', '.join(found)}")


def serve(channel: socket.socket) -> str | None:
    """Fork a worker for each request, and tell how each has ended; return its jobs in a worker, else None at the end.

    The end is that of the launcher, who kills the workers before it closes the channel. The kernel kills any other one
    when this process ends.
    """
    reports: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([channel], [], [], POLL_S if reports else None)
        for pid in list(reports):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _tell(reports.pop(pid), ENDED, os.waitstatus_to_exitcode(status))
        if not ready:
            continue
        message, (*files,), _, _ = socket.recv_fds(channel, _REQUEST_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return None
        stdin, log, report = files
        forked = _fork()
        if forked == 0:
            channel.close()
            for other in reports.values():
                os.close(other)
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


def _fork() -> int | None:
    """Return a new process, 0 in that process, or None where there is none that would be a worker like any other."""
    if len([*Path("/proc/self/task").iterdir()]) != 1:
        return None
    try:
        return os.fork()
    except OSError:
        return None


def _become_worker(request: ForkRequest, stdin: int, log: int) -> None:
    """Give this process what the launcher gives to one that it starts itself; end it if its kernels are others."""
    os.setsid()
    printed = os.pread(1, os.fstat(1).st_size, 0)  # while the libraries were imported: part of each worker's log
    for file, number in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(file, number)
    os.close(stdin)
    os.close(log)
    os.write(1, printed)
    os.environ.update(request.variables)
    wanted = os.environ.get(_CAPABILITY)
    import torch

    if wanted is not None and (found := torch.backends.cpu.get_cpu_capability()) != wanted.upper():
        sys.exit(f"torch has chosen its kernels before this worker was forked: {found}, not {wanted.upper()}")


def _tell(report: int, word: str, number: int) -> None:
    with suppress(BrokenPipeError):  # the launcher has given this worker up: it reads the end of its input
        os.write(report, f"{word} {number}\n".encode("ascii"))
    os.close(report)


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), models=sys.argv[3] == MODELS))
