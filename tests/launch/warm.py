"""Workers that are forked from a process which has imported the libraries once for many runs.

For tests of what workers do: they are processes with their own environment and kernels, and start in a tenth of a
second instead of four. That a worker is started by exec, and what it then is, is seen in test_forked.py and
test_local.py; a real accelerator's is never forked, because importing may initialise its driver. That of the software
accelerator is ours, and does nothing before its devices are made.

`python -P -m tests.launch.warm ADDRESS run …` is the command line with such workers; `pytest -p tests.launch.warm` is
pytest with them.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from consistency.case.load_path import LoadPath
from consistency.cli.main import main
from consistency.devices.spec import DeviceInfo, DeviceSpec, parse_device
from consistency.launch.environment import worker_environment
from consistency.launch.forked import READ_LATE, Importer, Importers
from consistency.worker import __main__ as worker
from consistency.worker import importer, lifeline

ADDRESS = "CONSISTENCY_TESTS_WARM"
"""Variable of the environment with the address, for the plugin of pytest."""

ROOT = Path(__file__).resolve().parents[2]
_MOST_BYTES = 1 << 20


class WarmImporter(Importer):
    """A fork of the process that has imported the libraries, in the place of a process that imports them."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        self.is_usable = True
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
        self._channel.connect(address)
        early = {name: value for name, value in environment.items() if name not in READ_LATE}
        self._channel.send(msgspec.json.encode((str(Path.cwd()), early)))
        self.pid = int(self._channel.recv(64))

    def close(self) -> None:
        self._channel.close()


@contextmanager
def forked_workers(address: str) -> Iterator[None]:
    """Have every worker forked from the process with this address, those of accelerators too."""
    made: list[WarmImporter] = []
    as_they_are = Importers.one_for, Importers.close

    def one_for(importers: Importers, device: DeviceSpec, environment: Mapping[str, str]) -> Importer:
        assert all(one.is_usable for one in made), "a worker was to be forked and did not start"
        found = WarmImporter(address, environment)
        made.append(found)
        return found

    def close(importers: Importers) -> None:
        while made:
            made.pop().close()

    Importers.one_for, Importers.close = one_for, close  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Importers.one_for, Importers.close = as_they_are  # type: ignore[method-assign]


def pytest_configure(config: Any) -> None:
    """Fork the workers of pytest's run; it is a plugin."""
    forking = forked_workers(os.environ[ADDRESS])
    forking.__enter__()
    config.add_cleanup(lambda: forking.__exit__(None, None, None))


class WarmProcess:
    """The process to fork from, until `close`."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")  # a socket's name has at most 107 characters
        self.address = str(Path(self._folder.name) / "socket")
        info = DeviceInfo(spec=parse_device("cpu"), architecture="", model="")
        given = worker_environment(info, LoadPath.ISOLATED, threads=1) | dict(environment)
        path = os.pathsep.join(filter(None, [str(ROOT), given.get("PYTHONPATH")]))
        command = [sys.executable, "-P", "-m", "tests.launch.warm", self.address]
        self._log = (folder / "warm.log").open("wb")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env={**given, "PYTHONPATH": path}
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"listening\n", (folder / "warm.log").read_text()

    def command(self, *arguments: object) -> list[str]:
        """Return the command line of the tool with workers that are forked from this process."""
        return [sys.executable, "-P", "-m", "tests.launch.warm", self.address, *map(str, arguments)]

    def environment(self) -> dict[str, str]:
        """Return the variables with which pytest has workers that are forked from this process."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        options = f"-p {__name__} -p no:hypothesispytest -p no:anyio"  # those two take long to import
        return {"PYTEST_ADDOPTS": options, ADDRESS: self.address, "PYTHONPATH": path}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()
        self._folder.cleanup()


@contextmanager
def warm_process(folder: Path, environment: Mapping[str, str]) -> Iterator[Callable[[], WarmProcess]]:
    """Yield what returns the process; it is started when it is first asked for."""
    made = functools.cache(lambda: WarmProcess(folder, environment))
    yield made
    if made.cache_info().currsize:
        made().close()


def serve(address: str) -> int:
    """Import the libraries; make a fork for each launcher that asks, which forks its workers."""
    lifeline.end_with(os.getppid())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    print("listening", flush=True)  # whoever asks waits until the libraries are imported
    importer.import_libraries(models=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while True:
        channel, _ = listener.accept()
        if os.fork():
            channel.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        return _serve_launcher(channel)


def _serve_launcher(channel: socket.socket) -> int:
    """Take the launcher's folder and environment, as a process that it starts has them, and fork its workers."""
    folder, environment = msgspec.json.decode(channel.recv(_MOST_BYTES), type=tuple[str, dict[str, str]])
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place not in sys.path]
    channel.send(str(os.getpid()).encode())
    with tempfile.TemporaryFile() as printed:
        for number in (1, 2):
            os.dup2(printed.fileno(), number)
    if double := sys.modules.get("software_accelerator"):
        double.make_devices()
    jobs = importer.serve(channel)
    if jobs is None:
        os._exit(0)
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))  # libgomp has read another number
    return worker.main(Path(jobs))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(serve(sys.argv[1]))
    with forked_workers(sys.argv[1]):
        sys.argv[:2] = ["consistency"]
        sys.exit(main())
