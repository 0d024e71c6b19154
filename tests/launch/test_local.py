"""Workers that take several cases in turn: what ends one of them ends no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from consistency.capture.node_group import NodeGroup
from consistency.capture.reader import read_capture
from consistency.capture.writer import CaptureWriter
from consistency.case import standard
from consistency.case.case import Case
from consistency.devices.discovery import select
from consistency.devices.spec import DeviceInfo, parse_device
from consistency.errors import InputError
from consistency.launch.assignment import Assignment
from consistency.launch.local import LocalScheduler, _Run
from consistency.launch.open_case import remove_scratch
from consistency.launch.plan import plan_waves
from consistency.launch.process import WorkerProcess
from consistency.launch.scheduler import Captured, CaseTask, Limits, Task
from consistency.worker.protocol import Event
from tests.launch.made_assignments import assigned


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """List the cases of each process that is started."""
    found: list[list[str]] = []
    real = WorkerProcess.start

    def start(assignments: deque[Any], *args: Any, **options: Any) -> WorkerProcess:
        found.append([one.case.name for one in assignments])
        return real(assignments, *args, **options)

    monkeypatch.setattr(WorkerProcess, "start", start)
    return found


def captured(home: Path, *cases: Case, seen: list[str]) -> Iterator[Captured]:
    devices = select(["cpu"])
    tasks = [CaseTask(case=case, waves=plan_waves(case, devices), target=home / case.name) for case in cases]

    def watch(_: str, event: Event) -> None:
        if event.kind == "case" or (event.kind == "failed" and not event.error):
            seen.append(event.message if event.kind == "case" else event.kind)

    return LocalScheduler().capture(Task(cases=tasks, limits=Limits(stall_s=60)), watch=watch)


@pytest.mark.slow
@pytest.mark.process
def test_a_case_that_ends_the_process_costs_that_case_alone(tmp_path: Path, started: list[list[str]]) -> None:
    first = Case(name="first", base="", stages=(standard.TRANSFER,))
    unusable = Case(name="no-such-function", base="python:os:no_such_function", stages=(standard.BASE,))
    aborting = Case(name="aborts", base="python:os:abort", stages=(standard.BASE,))
    cases = (first, unusable, aborting, msgspec.structs.replace(first, name="last"))
    seen: list[str] = []
    found = {one.task.case.name: one for one in captured(tmp_path, *cases, seen=seen)}
    assert list(found) == [case.name for case in cases]
    # an error of the input leaves the process as it is; an abort takes the cases that are left to a new one
    assert started == [[case.name for case in cases], ["last"]]
    assert isinstance(found["no-such-function"].error, InputError)
    assert not (tmp_path / "no-such-function").exists()
    workers = [read_capture(path).workers[0] for one in found.values() for path in one.captures]
    before, aborts, after = workers
    assert [worker.info.status for worker in workers] == ["ok", "lost", "ok"]
    assert "SIGABRT" in str(aborts.info.reason)
    assert "load base" in str(aborts.info.reason)
    assert "_from_factory" in str(aborts.info.stack)
    assert [r.key for r in before.records] == [r.key for r in after.records]
    # what a case prints is its own: the log of a lost worker is kept
    assert not list((tmp_path / "last").rglob("log.txt"))
    assert list((tmp_path / "aborts").rglob("log.txt"))
    assert seen == ["first", "no-such-function", "failed", "aborts", "failed", "last"]


def test_a_scratch_folder_is_removed_while_others_remove_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of torch.distributed removes its own file, late: between the listing of a folder and its removal."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    for name in ("store", "other"):
        (folder / name).touch()
    real, others = os.unlink, [folder / "store", folder / "other"]

    def unlink(path: Any, *args: Any, **options: Any) -> None:
        if others:
            others.pop().unlink()
        real(path, *args, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    remove_scratch(folder)
    assert not folder.exists()


STOPPED = """
import os, signal, sys, threading, time, types
from pathlib import Path
from consistency.worker.__main__ import _move_to

folder = Path(sys.argv[1])
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
_move_to(types.SimpleNamespace(folder=str(folder), device="cpu"), is_first=True)
(folder / "began").touch()
os.kill(os.getpid(), signal.SIGSTOP)
(folder / "went-on").touch()
"""


@pytest.mark.process
def test_a_worker_that_is_stopped_writes_its_stack_and_does_not_go_on(tmp_path: Path) -> None:
    """It is continued so that it can write; what it did then would be counted or not, as it happened."""
    process = subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path)], start_new_session=True)
    os.waitpid(process.pid, os.WUNTRACED)
    assert (tmp_path / "began").exists()
    case = Case(name="one", base="", stages=(standard.TRANSFER,))
    (plan,) = plan_waves(case, select(["cpu"]))[0]
    with CaptureWriter(tmp_path / "capture") as writer:
        (one,) = assigned(case, [plan], writer)
        (tmp_path / "stack.txt").rename(one.folder / "stack.txt")
        WorkerProcess(assignments=deque([one]), process=process)._end_with_stack(one)
        assert process.returncode == -signal.SIGUSR1
        assert "Current thread" in str(one.stack())
    assert not (tmp_path / "went-on").exists()


@pytest.mark.parametrize(
    ("at_once", "waves"),
    [
        (None, [["cpu", "cpu@avx2", "cpu@baseline"]]),
        (2, [["cpu", "cpu@avx2"], ["cpu@baseline"]]),
        (1, [["cpu"], ["cpu@avx2"], ["cpu@baseline"]]),
    ],
)
def test_no_more_workers_than_fit_are_started_and_the_reference_comes_first(
    at_once: int | None, waves: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []

    def wave(_run: _Run, queues: Sequence[Sequence[Assignment]], _threads: Any) -> Iterator[Captured]:
        started.append([queue[0].plan.name for queue in queues])
        yield from ()

    monkeypatch.setattr(_Run, "_run_wave", wave)
    names = ("cpu@avx2", "cpu", "cpu@baseline")
    devices = [DeviceInfo(spec=parse_device(name), architecture="a", model="m") for name in names]
    case = Case(name="x", base="base", adapter="adapter")
    task = CaseTask(case=case, waves=plan_waves(case, devices), target=tmp_path / "capture")
    list(LocalScheduler().capture(Task(cases=(task,), limits=Limits(at_once=at_once)), watch=lambda *_: None))
    assert started == waves


@pytest.mark.parametrize(
    ("limits", "expected", "threads"),
    [
        (Limits(cases_at_once=2), [[0, 2], [1]], 2),
        (Limits(cases_at_once=8), [[0], [1], [2]], 1),  # three cases, so three lanes of four threads
        (Limits(), [[0, 1, 2]], 4),
        (Limits(cases_at_once=2, together=NodeGroup(node="a", nodes=("a", "b"), folder="shared")), [[0, 1, 2]], 4),
    ],
)
def test_lanes_share_the_threads_and_a_group_of_nodes_has_one(
    limits: Limits, expected: list[list[int]], threads: int
) -> None:
    run: Any = SimpleNamespace(_limits=limits, _threads=lambda _: {"cpu.isolated": 4})
    queue: Any = [SimpleNamespace(open_case=SimpleNamespace(number=number)) for number in range(3)]
    queues, shared = _Run._split_into_lanes(run, [queue])
    assert [[one.open_case.number for one in lane] for lane in queues] == expected
    assert shared == {"cpu.isolated": threads}
