"""What a node reports of itself: its stage, a heartbeat, and how it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from consistency.capture.node_status import NodeStatus, read_status
from consistency.cli import node_report
from consistency.cli.node_report import NodeReport, reporting
from consistency.errors import CaptureError
from consistency.worker.protocol import Event, EventKind

STAGES = [("base", 0.5), ("merged", 0.25), ("forward", 0.25)]


def event(kind: EventKind, stage: str = "") -> Event:
    return Event(at=0.0, kind=kind, stage=stage)


def reported(path: Path) -> NodeStatus:
    found = read_status(str(path))
    assert found is not None
    return found


def test_stage_of_the_slowest_worker(tmp_path: Path) -> None:
    path = tmp_path / "n1.json"
    passed: list[str] = []
    report = NodeReport(str(path))
    watch = report.beside(lambda label, _: passed.append(label), {"case": {"cpu": STAGES, "npu:0": STAGES}})
    watch("cpu", event("stage", "base"))
    watch("npu:0", event("stage", "base"))
    watch("cpu", event("stage", "forward"))
    assert (reported(path).stage, reported(path).number, reported(path).of) == ("base", 1, 3)
    watch("npu:0", event("stage", "merged"))
    assert reported(path).place == "merged, 2 of 3"
    watch("npu:0", event("done"))
    assert reported(path).place == "forward, 3 of 3"
    assert passed == ["cpu", "npu:0", "cpu", "npu:0", "npu:0"]


def test_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_report, "BEAT_S", 0.01)
    path = tmp_path / "n1.json"
    with reporting(str(path)):
        while reported(path).beat < 5:
            assert reported(path).phase == "checking"
    assert reported(path).phase == "delivered"
    assert {"torch", "peft", "python", "consistency"} <= reported(path).software.keys()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CaptureError("cannot write", where="/disk", got="No space left"), "cannot write; where: /disk; got: No space"),
        (KeyboardInterrupt(), "it was told to stop"),
        (RuntimeError("a bug\nwith a second line"), "RuntimeError: a bug"),
    ],
)
def test_why_it_failed(tmp_path: Path, error: BaseException, reason: str) -> None:
    path = tmp_path / "n1.json"
    with pytest.raises(type(error)), reporting(str(path)):
        raise error
    assert reported(path).phase == "failed"
    assert reported(path).reason.startswith(reason)


def test_a_report_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    with reporting(str(tmp_path / "no" / "such" / "folder.json")) as report:
        assert report is not None
    with reporting(None) as report:
        assert report is None
