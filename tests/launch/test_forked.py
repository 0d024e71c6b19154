"""Workers that are forked: they are what those started by exec are, and end as those do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from consistency.capture.folder import WorkerCapture
from consistency.capture.reader import read_capture
from consistency.capture.writer import CaptureWriter
from consistency.case import standard
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.devices.discovery import select
from consistency.devices.spec import DeviceInfo, parse_device
from consistency.errors import UsageError
from consistency.launch import forked
from consistency.launch.environment import worker_environment
from consistency.launch.forked import READ_LATE, ForkedProcess, Importer, Importers
from consistency.launch.local import LocalScheduler
from consistency.launch.plan import plan_waves
from consistency.launch.process import WorkerProcess
from consistency.launch.scheduler import CaseTask, Limits, capture_case
from tests.launch.made_assignments import assigned

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only there are workers forked")


class _NotStarted:
    """An importing process that is not started."""

    is_usable = True

    def __init__(self, *_: object, **__: object) -> None: ...

    def close(self) -> None: ...


def environment(name: str, *, threads: int = 1, pinned: bool = True, **change: str | None) -> dict[str, str]:
    info = DeviceInfo(spec=parse_device(name), architecture="a", model="m")
    return worker_environment(info, LoadPath.ISOLATED, threads=threads, pinned=pinned, change=change)


def shared(monkeypatch: pytest.MonkeyPatch, *environments: dict[str, str]) -> list[bool]:
    """Return which of the workers with these environments are forked."""
    monkeypatch.setattr(forked, "Importer", _NotStarted)
    importers = Importers(models=True, folder=Path())
    for one in environments:
        importers.expect(one)
    return [importers.one_for(parse_device("cpu"), one) is not None for one in environments]


@LINUX
def test_workers_share_an_importing_process_whose_environments_differ_in_what_is_read_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variants = [environment(name) for name in ("cpu", "cpu@avx2", "cpu@baseline")]
    assert shared(monkeypatch, *variants) == [True, True, True]
    assert shared(monkeypatch, variants[0]) == [False], "nothing is gained for one"
    for other in (
        environment("cpu@avx2", threads=2),
        environment("cpu@avx2", pinned=False),
        environment("cpu@avx2", MKL_NUM_THREADS="2"),
        environment("cpu@avx2", MALLOC_ARENA_MAX="1"),
        environment("cpu@avx2", NPY_DISABLE_CPU_FEATURES="AVX2"),
        environment("cpu@avx2", DNNL_MAX_CPU_ISA="AVX2"),
        environment("cpu@avx2", CUDA_VISIBLE_DEVICES=None),
    ):
        assert shared(monkeypatch, variants[0], other) == [False, False]
        assert shared(monkeypatch, variants[0], other, variants[2]) == [True, False, True]


def test_no_worker_is_forked_elsewhere_than_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert shared(monkeypatch, environment("cpu"), environment("cpu@baseline")) == [False, False]


def test_what_is_read_late_are_the_variables_of_kernel_variants() -> None:
    names = ("cpu@avx2", "cpu@baseline")
    assert {name for one in names for name in parse_device(one).numerical_variant().environment} == READ_LATE  # type: ignore[union-attr]


LOOK = """
import ctypes, faulthandler, gc, json, os, random, resource, signal, sys, tempfile, threading
from pathlib import Path

def make():
    import numpy, torch

    def status(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(line.split()[1:] for line in lines if line.startswith(field))

    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death))  # PR_GET_PDEATHSIG
    links = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            links[name] = os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass  # of the listing itself
    facts = {
        "files": links,
        "environment": dict(os.environ),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "death": death.value,
        "nice": os.nice(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "folder": os.getcwd(),
        "umask": status("Umask"),
        "signals": [status(field) for field in ("SigBlk", "SigIgn", "SigCgt")],
        "handlers": [str(signal.getsignal(n)).partition(" at 0x")[0] for n in sorted(signal.valid_signals())],
        "limits": [resource.getrlimit(n) for n in range(16)],
        "hash": hash("text"),
        "path": sys.path,
        "flags": str(sys.flags),
        "streams": [(s.encoding, s.errors, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "random": [random.random(), numpy.random.rand(), torch.rand(3).tolist()],
        "collector": [gc.isenabled(), gc.get_threshold()],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "faulthandler": faulthandler.is_enabled(),
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), torch.__config__.parallel_info()],
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "modules": sorted({"torch", "transformers", "peft"} & sys.modules.keys()),
        "unlike": [os.getpid(), next(tempfile._get_candidate_names()), os.urandom(4).hex()],
    }
    name = os.environ.get("ATEN_CPU_CAPABILITY", "native")
    Path(os.environ["LOOK"], name + ".json").write_text(json.dumps(facts))
    os._exit(7)  # an exception would be an error of the input, which ends the case for the other worker
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerProcess]:
    """List the processes that are started."""
    found: list[WorkerProcess] = []
    real = WorkerProcess.start

    def start(*args: Any, **options: Any) -> WorkerProcess:
        found.append(real(*args, **options))
        return found[-1]

    monkeypatch.setattr(WorkerProcess, "start", start)
    return found


def by_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Importers, "expect", lambda *_: None)


def captured(case: Case, target: Path) -> tuple[WorkerCapture, ...]:
    """Capture a case on two kernel variants."""
    waves = plan_waves(case, select(["cpu", "cpu@baseline"]))
    limits = Limits(stall_s=60, threads=1)
    capture_case(LocalScheduler(), CaseTask(case=case, waves=waves, target=target), limits, watch=lambda *_: None)
    return read_capture(target).workers


def looked(home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Run a base that looks at its process in two kernel variants; return what it saw, by variant."""
    home.mkdir()
    monkeypatch.setenv("LOOK", str(home))
    found = captured(Case(name="look", base="python:look:make", stages=(standard.BASE,)), home / "capture")
    assert [one.info.reason for one in found] == ["ended with exit status 7; last event: load base"] * 2
    seen = {path.stem: json.loads(path.read_text()) for path in home.glob("*.json")}
    for facts in seen.values():
        del facts["environment"]["LOOK"]
        facts["files"] = {
            number: re.sub(r"\[\d+\]", "", link).replace(str(home), "") for number, link in facts["files"].items()
        }
    return seen


@pytest.mark.slow
@LINUX
@pytest.mark.process
def test_a_forked_worker_is_what_one_started_by_exec_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[WorkerProcess]
) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forks = looked(tmp_path / "forked", monkeypatch)
    assert [type(one.process) for one in started] == [ForkedProcess, ForkedProcess]
    by_exec(monkeypatch)
    execs = looked(tmp_path / "exec", monkeypatch)
    assert [type(one.process) for one in started[2:]] == [subprocess.Popen, subprocess.Popen]
    unlike = [facts.pop("unlike") for facts in [*forks.values(), *execs.values()]]
    for of_one, of_other in zip(*unlike[:2], strict=True):
        assert of_one != of_other
    assert len(forks) == 2
    for name, facts in forks.items():
        assert facts == execs[name]
    assert forks["default"]["kernels"] == "DEFAULT"
    assert forks["native"]["death"] == signal.SIGKILL


RUN = """
import sys
from consistency.launch import forked
from consistency.cli.main import main

count = [0]
real = forked.Importer.fork

def fork(*args):
    count[0] += 1
    return real(*args)

forked.Importer.fork = fork
if sys.argv[1] == "exec":
    forked.Importers.expect = lambda *_: None
status = main(sys.argv[2:])
assert status == 0, status
assert count[0] == (3 if sys.argv[1] == "fork" else 0), count
"""
MEASURED = {"gb_per_s", "process_peak_bytes"}
"""Of the evidence: how fast and how large the process was."""


def recorded(target: Path) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for path in sorted(target.glob("workers/*/records.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            for name in MEASURED & record.get("evidence", {}).keys():
                del record["evidence"][name]
        found[path.parent.name] = records
    return found


@pytest.mark.slow
@LINUX
@pytest.mark.process
def test_numbers_are_bitwise_those_of_workers_started_by_exec(tmp_path: Path) -> None:
    names = [info.spec.name for info in select(["auto"])]
    devices = [name for name in ("cpu", "cpu@avx2", "cpu@baseline") if name in names]
    if len(devices) < 3:
        pytest.skip("this processor has fewer kernel variants")
    for how in ("fork", "exec"):
        command = [
            sys.executable, "-P", "-c", RUN, how, "capture", "--base", "builtin:llama", "--dtype", "bfloat16",
            "--devices", ",".join(devices), "--out", tmp_path / how,
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    forks, execs = recorded(tmp_path / "fork"), recorded(tmp_path / "exec")
    assert len(forks) == 3
    assert min(map(len, forks.values())) > 300
    assert forks == execs


FAILING = """
import os, sys
class Found:
    def find_spec(self, name, path=None, target=None):
        if name == "peft":
            {how}
sys.meta_path.insert(0, Found())
"""


@pytest.mark.slow
@LINUX
@pytest.mark.process
@pytest.mark.parametrize(
    "how",
    ["raise ImportError('broken here')", "os.abort()", "import torch; torch.mm(torch.empty(2, 2), torch.empty(2, 2))"],
    ids=["raises", "aborts", "computes"],
)
def test_libraries_that_cannot_be_imported_so_end_no_more_than_they_do_by_exec(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[WorkerProcess]
) -> None:
    """The words are those of workers started by exec, for such they are."""
    (tmp_path / "sitecustomize.py").write_text(FAILING.format(how=how))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    case = prepare_case(Options(base="builtin:llama", stages=(standard.BASE,)))

    def outcome(target: Path) -> list[tuple[object, ...]]:
        try:
            found = captured(case, target)
        except UsageError as error:
            return [(type(error), str(error))]
        return [(one.info.name, one.info.status, one.info.reason, len(one.records)) for one in found]

    found = outcome(tmp_path / "forked")
    kinds = [type(one.process) for one in started]
    assert kinds == [ForkedProcess, ForkedProcess, subprocess.Popen, subprocess.Popen]
    assert all(one.process.pid is None for one in started[:2])
    by_exec(monkeypatch)
    assert found == outcome(tmp_path / "exec")


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def is_gone(pid: int) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


SLEEP = """
import os, time
from pathlib import Path

def make():
    Path(os.environ["LOOK"], str(os.getpid())).touch()
    time.sleep(120)
"""


@pytest.fixture
def sleepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Importer, list[WorkerProcess], Path]]:
    """Start two workers that sleep while they load their base."""
    (tmp_path / "sleeper.py").write_text(SLEEP)
    home = tmp_path / "look"
    home.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LOOK", str(home))
    case = Case(name="sleeps", base="python:sleeper:make", stages=(standard.BASE,))
    importers = Importers(models=False, folder=tmp_path)
    plans = plan_waves(case, select(["cpu", "cpu@baseline"]))[0]
    found = []
    for plan in plans:
        importers.expect(worker_environment(plan.info, plan.load_path, threads=1))
    with closing(importers), CaptureWriter(tmp_path / "capture") as writer:
        for one in assigned(case, plans, writer):
            found.append(WorkerProcess.start([one], threads=1, importers=importers))
        (importer,) = importers._importers.values()
        yield importer, found, home
        for worker in found:
            worker.close()
    assert is_gone(importer.pid)
    assert all(is_gone(worker.process.pid) for worker in found if worker.process.pid is not None)


Sleepers = tuple[Importer, list[WorkerProcess], Path]


def wait_for_both(sleepers: Sleepers) -> None:
    _, found, home = sleepers
    until = time.monotonic() + 120
    while len(list(home.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert [one.process.poll() for one in found] == [None, None]
    assert {int(path.name) for path in home.iterdir()} == {one.process.pid for one in found}


@pytest.mark.slow
@LINUX
@pytest.mark.process
def test_a_worker_that_is_killed_is_waited_for_and_ends_no_other(sleepers: Sleepers) -> None:
    importer, (first, second), _ = sleepers
    wait_for_both(sleepers)
    assert first.process.pid is not None
    with pytest.raises(subprocess.TimeoutExpired):
        first.process.wait(0.01)
    os.kill(first.process.pid, signal.SIGSEGV)
    assert first.process.wait(20) == first.process.returncode == -signal.SIGSEGV
    assert not Path(f"/proc/{first.process.pid}").exists(), "a zombie"
    assert second.process.poll() is None
    assert children(importer.pid) == [second.process.pid]
    second.close()
    assert second.process.returncode == -signal.SIGKILL


@pytest.mark.slow
@LINUX
@pytest.mark.process
def test_workers_end_with_the_process_that_forked_them(sleepers: Sleepers) -> None:
    importer, found, _ = sleepers
    wait_for_both(sleepers)
    os.kill(importer.pid, signal.SIGKILL)
    assert [one.process.wait(20) for one in found] == [-signal.SIGKILL] * 2
    assert all(is_gone(one.process.pid) for one in found if one.process.pid is not None)


@LINUX
@pytest.mark.process
def test_workers_that_have_not_started_are_given_up(sleepers: Sleepers) -> None:
    importer, found, home = sleepers
    limits = Limits(stall_s=0.0)
    assert [list(one.ended(limits, lambda *_: None)) for one in found] == [[], []]
    assert all(one.over and one.assignments for one in found)
    assert not importer.is_usable
    assert not list(home.iterdir())
