"""One class and one row in a table bring captures from elsewhere into a run, and its caller does not change."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import pytest

from consistency.capture.records import TensorRecord
from consistency.case.case import Case
from consistency.devices.spec import DeviceInfo, parse_device
from consistency.errors import InputError
from consistency.launch.local import LocalScheduler
from consistency.launch.scheduler import LOCAL, SCHEDULERS, Captured, Limits, Task, Watcher, make_scheduler
from consistency.worker.protocol import Event
from consistency.workflows import pipeline
from tests.conftest import MakeCapture


class CountingScheduler:
    """Start nothing: count the tasks, and deliver what the test says."""

    tasks: ClassVar[list[tuple[Task, bool]]] = []
    delivers: ClassVar[dict[str, Any]] = {}

    def capture(self, task: Task, *, watch: Watcher, replace: bool = False) -> Generator[Captured]:
        self.tasks.append((task, replace))
        watch("node-a", Event(at=0.0, kind="stage", stage="base"))
        for one in task.cases:
            yield Captured(task=one, **self.delivers)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[CountingScheduler]:
    monkeypatch.setitem(SCHEDULERS, "counting", f"{__name__}:CountingScheduler")
    monkeypatch.setattr(CountingScheduler, "tasks", [])
    return CountingScheduler


def plan(*names: str) -> pipeline.Plan:
    devices = tuple(DeviceInfo(spec=parse_device(name), architecture="a", model="m") for name in names)
    case = Case(name="x", base="base", adapter="adapter")
    return pipeline.Plan(
        case=case, devices=devices, limits=Limits(stall_s=7), faults={"cuda:1": "killed"}, scheduler="counting"
    )


def record(digest: str) -> list[TensorRecord]:
    return [
        TensorRecord(
            rule="bitwise",
            status="equal",
            stage="base",
            layer="l",
            tensor="weight",
            digest=digest,
            reference="file",
            reference_digest=digest,
        )
    ]


def test_the_local_scheduler_is_the_default() -> None:
    assert isinstance(make_scheduler(LOCAL), LocalScheduler)
    assert pipeline.Plan(case=Case(name="x", base="b"), devices=(), limits=Limits()).scheduler == LOCAL


@pytest.mark.process
def test_a_scheduler_gets_the_planned_workers_and_their_limits(
    counting: type[CountingScheduler], make_capture: MakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_capture("only", {"cpu": record("aa")})
    monkeypatch.setattr(counting, "delivers", {"captures": (made,)})
    seen: list[tuple[str, str]] = []
    planned = plan("cpu", "cuda:0", "cuda:1")
    report = pipeline.run(planned, None, watch=lambda name, event: seen.append((name, event.stage)))
    assert report.exit_status == 0
    assert seen == [("node-a", "base")]
    ((task, replace),) = counting.tasks
    (one,) = task.cases
    assert (one.target.name, replace) == ("captures", False)
    assert [[w.label for w in wave] for wave in one.waves] == [
        ["cpu", "cuda:0", "cuda:1"],
        ["cuda:0 (shared)", "cuda:1 (shared)"],
    ]
    assert (task.limits.stall_s, one.faults) == (7, {"cuda:1": "killed"})


@pytest.mark.process
def test_captures_of_several_hosts_are_compared_and_a_lost_one_is_named(
    counting: type[CountingScheduler], make_capture: MakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = tuple(make_capture(name, {"cpu": record("aa")}) for name in ("node-a", "node-b"))
    lost = ("node-c: drained before it delivered a capture",)
    monkeypatch.setattr(counting, "delivers", {"captures": hosts, "lost": lost})
    report = pipeline.run(plan("cpu"), None, watch=lambda *_: None)
    assert sorted(worker.name for worker in report.comparison.workers) == ["node-a:cpu", "node-b:cpu"]
    assert report.exit_status == 3
    assert any("node-c: drained" in finding.message for finding in report.comparison.findings)


@pytest.mark.process
def test_what_no_host_can_use_is_raised_and_the_scheduler_is_closed(
    counting: type[CountingScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "delivers", {"error": InputError("no such adapter")})
    with pytest.raises(InputError, match="no such adapter"):
        pipeline.run(plan("cpu"), None, watch=lambda *_: None)
