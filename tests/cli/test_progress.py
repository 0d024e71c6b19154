"""What a run shows of its workers: plain lines for a pipe, one moving line per worker on a terminal."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
from rich.console import Console

from consistency.case.load_path import LoadPath
from consistency.cli.progress import progress
from consistency.devices.spec import DeviceInfo, parse_device
from consistency.launch.plan import WorkerPlan
from consistency.worker.protocol import Event, EventKind


def plan(device: str = "cpu", load_path: LoadPath = LoadPath.ISOLATED) -> WorkerPlan:
    info = DeviceInfo(spec=parse_device(device), architecture="x86-64", model="chip")
    return WorkerPlan(info=info, load_path=load_path)


def event(kind: EventKind, stage: str = "", layer: str = "", **fields: Any) -> Event:
    return Event(at=0.0, kind=kind, stage=stage, layer=layer, **fields)


def shown(*events: tuple[WorkerPlan, Event], terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None, legacy_windows=False)
    with progress(console) as watch:
        for worker, happened in events:
            watch(worker.label, happened)
    return file.getvalue()


def test_a_pipe_gets_a_line_per_stage() -> None:
    cpu, gpu = plan(), plan("cuda:1", LoadPath.SHARED)
    text = shown(
        (cpu, event("stage", "base")),
        (cpu, event("step", "base", "layers.0", done=1, total=2)),
        (gpu, event("stage", "adapter")),
        (cpu, event("wait", "merged", message="for the reference")),
        (gpu, event("done")),
        terminal=False,
    )
    assert text.splitlines() == ["cpu: base", "cuda:1 (shared): adapter", "cuda:1 (shared): done"]


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_shows_nothing(terminal: bool) -> None:
    file = io.StringIO()
    with progress(Console(file=file, force_terminal=terminal), quiet=True) as watch:
        watch("cpu", event("stage", "base"))
        watch("cpu", event("failed", message="killed"))
        watch.line("a line of the command")
    assert file.getvalue() == ""


def test_a_pipe_is_told_how_far_the_run_is() -> None:
    file = io.StringIO()
    stages = [("base", 0.25), ("merged", 0.75)]
    with progress(Console(file=file), expected={"case": {"cpu": stages}}) as watch:
        for happened in (event("stage", "base"), event("stage", "merged"), event("done")):
            watch("cpu", happened)
        watch.line("a line\x1b of the command")
    assert file.getvalue().splitlines() == [
        "cpu: base  (1 of 2)", "cpu: merged  (2 of 2, 25 % of the run)", "cpu: done", "a line\\x1b of the command"
    ]  # fmt: skip


def test_a_pipe_gets_no_line_per_stage_where_there_are_many_runs() -> None:
    file = io.StringIO()
    with progress(Console(file=file), stages=False) as watch:
        watch("", event("case", message="bit-flip", done=1, total=4))
        watch("cpu", event("stage", "base"))
        watch("cpu", event("done"))
    assert file.getvalue() == "case bit-flip (2 of 4)\n"


@pytest.mark.parametrize(
    ("block", "where"),
    [({}, "merged, layers.7 (2 of 4) for"), ({"block": 3, "blocks": 9}, "merged, layers.7 (2 of 4), block 3 of 9 for")],
)
def test_a_pipe_is_never_silent_for_long(monkeypatch: pytest.MonkeyPatch, block: dict[str, int], where: str) -> None:
    monkeypatch.setattr("consistency.cli.progress.SILENT_S", 0.05)
    file = io.StringIO()
    spoken = threading.Event()

    class Heard(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith(f"still running: cpu {where}"):
                spoken.set()
            return file.write(text)

    with progress(Console(file=Heard())) as watch:
        watch("cpu", event("stage", "merged"))
        watch("cpu", event("step", "merged", "layers.7", done=1, total=4, **block))
        assert spoken.wait(30), file.getvalue()
    assert not any(thread.name == "consistency-progress" for thread in threading.enumerate())


def test_a_pipe_gets_the_reason_of_a_lost_worker_and_no_report_of_an_error() -> None:
    """An error with details has a report of its own at the end; what killed a worker is in this event alone."""
    told = Event(at=0.0, kind="failed", stage="base", error={"error": "InputError", "message": "no such file"})
    text = shown((plan(), told), (plan(), event("failed", message="SIGKILL\x1b[2J")), terminal=False)
    assert text.splitlines() == ["cpu: SIGKILL\\x1b[2J"]


def test_of_several_cases_a_pipe_gets_a_line_per_case() -> None:
    text = shown(
        (plan(), event("case", message="lora-1\x1b")),
        (plan(), event("stage", "base")),
        (plan(), event("done")),
        (plan(), event("failed", message="SIGKILL")),
        (plan(), event("case", message="lora-2")),
        terminal=False,
    )
    assert text.splitlines() == ["cpu: case lora-1\\x1b", "cpu: SIGKILL", "cpu: case lora-2"]


def test_a_terminal_shows_the_whole_and_the_fault_of_a_drill() -> None:
    stages = {"case": {"cpu": [("base", 0.25), ("merged", 0.75)]}}
    file = io.StringIO()
    with progress(Console(file=file, force_terminal=True, width=120, color_system=None), expected=stages) as watch:
        watch("cpu", event("stage", "merged"))
    assert "2/2  merged" in file.getvalue()
    assert "25 %" in file.getvalue()
    text = shown((plan(), event("stage", "base")), terminal=True)
    assert "%" not in text
    file = io.StringIO()
    with progress(Console(file=file, force_terminal=True, width=120, color_system=None)) as watch:
        watch("", event("case", message="bit-flip", done=1, total=4))
    assert "bit-flip (2 of 4)  25 %" in file.getvalue()


def test_a_terminal_names_the_case_of_a_worker() -> None:
    text = shown((plan(), event("case", message="lora-1")), (plan(), event("stage", "merged")), terminal=True)
    assert "lora-1  merged" in text


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (event("stage", "merged"), "merged"),
        (event("step", "merged", "layers.7", done=1, total=4), "merged  layers.7"),
        (event("step", "gradient", "backward", total=1, block=3, blocks=9), "gradient  backward  block 3 of 9"),
        (event("wait", message="for the reference"), "for the reference"),
        (event("done"), "done"),
        (event("failed", message="was killed by SIGKILL"), "was killed by SIGKILL"),
        (event("failed"), "failed"),
        (event("step", "base", "[red]evil[/red]\x1b]0;title\x07"), "[red]evil[/red]\\x1b]0;title"),
    ],
)
def test_a_terminal_shows_where_a_worker_is(last: Event, expected: str) -> None:
    text = shown((plan(), event("stage", "base")), (plan(), last), terminal=True)
    line = [line for line in text.splitlines() if "cpu" in line][-1]
    assert expected in line
    assert "\x1b]0;" not in text


def test_a_terminal_has_one_line_per_worker_and_leaves_none() -> None:
    cpu, gpu = plan(), plan("cuda:0", LoadPath.SHARED)
    text = shown(
        (cpu, event("stage", "base")), (gpu, event("stage", "adapter")), (cpu, event("stage", "merged")), terminal=True
    )
    last = text.rsplit("cpu ", 1)[1]
    assert "merged" in last
    assert "cuda:0 (shared)" in last
    assert "adapter" in last
    assert last.count("\x1b[2K") >= 2, "both lines are erased at the end"
