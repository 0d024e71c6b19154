"""Workers of the CPU that are forked from one process, which has imported the libraries for all of them.

Importing torch, transformers and PEFT takes most of a small case's time. Workers share such a process only if their
whole environments are equal but for `READ_LATE`: a variable that is read when a program starts or a library is loaded
cannot be changed in a fork. Everything else is started by exec: workers of accelerators, a worker that is alone with
its environment, those on any other system than Linux, and all of them where the libraries cannot be imported so.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from consistency.capture.json_codec import encode_json
from consistency.devices.interpreter import python_command
from consistency.devices.spec import DeviceSpec
from consistency.worker.protocol import ENDED, STARTED, ForkRequest

READ_LATE = frozenset({"ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"})
"""Variables that torch, MKL and oneDNN read when each runs its first operation, and not when it is loaded."""


class Importer:
    """A process that imports the libraries and forks workers.

    Attributes
    ----------
    pid : int
        The parent of its workers.
    is_usable : bool
        Whether every worker that it was asked for so far has started.
    """

    def __init__(self, environment: Mapping[str, str], *, models: bool, folder: Path) -> None:
        self.is_usable = True
        libraries = "models" if models else "torch"
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as printed:
            self._process = subprocess.Popen(
                [
                    *python_command(),
                    "consistency.worker.importer",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    libraries,
                    str(folder),
                ],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in environment.items() if name not in READ_LATE},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to the parent alone
            )
        self.pid = self._process.pid

    def fork(self, jobs: Path, log: IO[bytes], environment: Mapping[str, str]) -> ForkedProcess:
        """Ask for a worker; it starts when the libraries are imported.

        Parameters
        ----------
        jobs : Path
            File with the jobs of the worker.
        log : file
            Takes what the worker prints.
        environment : mapping
            The worker's whole environment, of which the importer sets the variables in `READ_LATE`.
        """
        variables = {name: environment[name] for name in sorted(READ_LATE & environment.keys())}
        request = encode_json(ForkRequest(jobs=str(jobs), variables=variables))
        worker_stdin, our_stdin = os.pipe()
        our_report, worker_report = os.pipe()
        with suppress(OSError):  # the importer has ended: so has the report
            socket.send_fds(self._channel, [request], [worker_stdin, log.fileno(), worker_report])
        # the worker has its own copies: the end of its reports shows only when no other copy is open
        os.close(worker_stdin)
        os.close(worker_report)
        return ForkedProcess(self, stdin=our_stdin, report=our_report)

    def close(self) -> None:
        """End the process; the kernel kills a worker that it has left."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


class ForkedProcess:
    """A process that another one forks and waits for, with the part of `subprocess.Popen` that the launcher uses.

    Attributes
    ----------
    pid : int or None
        None until the process has started.
    stdin : file
        Held open: the worker ends when this closes.
    returncode : int or None
        As of a Popen. A process that has not started has one when it never will.
    """

    def __init__(self, importer: Importer, *, stdin: int, report: int) -> None:
        self.pid: int | None = None
        self.returncode: int | None = None
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb", buffering=0)
        self._importer = importer
        self._report = os.fdopen(report, "rb", buffering=0)

    def poll(self) -> int | None:
        """Return the exit status, None while there is none."""
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raise a TimeoutExpired where there is none after so many seconds."""
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"fork of {self._importer.pid}", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended or not started."""
        if self.poll() is None and self.pid is not None:
            os.kill(self.pid, number)

    def give_up(self) -> None:
        """Ask for no other worker where this one has not started."""
        self._importer.is_usable = False

    def close(self) -> None:
        """Close the files of the process: a worker that starts later reads the end of its input, and ends."""
        self.stdin.close()
        self._report.close()

    def _status(self, timeout: float | None) -> int | None:
        """Read reports until the process has ended or the time is up; return its exit status, None while it runs.

        A timeout of None is for ever.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            remaining_ms = None if until is None else max(0.0, until - time.monotonic()) * 1000
            ready = select.poll()  # select() takes no file above 1023, which a caller of the Python interface may have
            ready.register(self._report, select.POLLIN)
            if not ready.poll(remaining_ms):
                return None
            lines = self._report.read(4096).decode("ascii").splitlines()
            for line in lines:
                word, _, number = line.partition(" ")
                if word == STARTED:
                    self.pid = int(number)
                elif word == ENDED:
                    self.returncode = int(number)
            # nothing to read is the end of the reports
            if not lines and self.returncode is None:
                self._note_lost()
        return self.returncode

    def _note_lost(self) -> None:
        """Note that nobody will report on this process: the one that forked it has ended, and it ends with that."""
        self.returncode = -signal.SIGKILL
        if self.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class Importers:
    """The importing processes of one or more captures: one for each environment of at least two workers of the CPU.

    Captures may be made in several threads, each of which has to last until `close`: the kernel ends a process with the
    thread that started it (`lifeline`).
    """

    def __init__(self, *, models: bool, folder: Path) -> None:
        self._models = models
        self._folder = folder
        self._workers: Counter[frozenset[tuple[str, str]]] = Counter()
        self._importers: dict[frozenset[tuple[str, str]], Importer] = {}
        self._lock = threading.Lock()

    def expect(self, environment: Mapping[str, str]) -> None:
        """Note that a worker of the CPU will be started with this environment."""
        if sys.platform == "linux":
            with self._lock:
                self._workers[_read_early(environment)] += 1

    def one_for(self, device: DeviceSpec, environment: Mapping[str, str]) -> Importer | None:
        """Return the process to fork a device's worker from; None where it is to be started by exec."""
        key = _read_early(environment)
        with self._lock:
            if not device.is_cpu or self._workers[key] < 2:
                return None
            if key not in self._importers:
                self._importers[key] = Importer(environment, models=self._models, folder=self._folder)
            importer = self._importers[key]
        # one that has failed to start a worker is asked for no other
        return importer if importer.is_usable else None

    def close(self) -> None:
        """End all importing processes."""
        for importer in self._importers.values():
            importer.close()


def _read_early(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return the variables that a fork cannot change."""
    return frozenset((name, value) for name, value in environment.items() if name not in READ_LATE)
