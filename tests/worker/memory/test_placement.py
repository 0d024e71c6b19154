"""Other devices: what is read of them, what is believed of NVML, which call is told, and what is a fault."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from consistency.capture.records import TensorRecord
from consistency.stages.memory import worker as memory
from consistency.worker.memory import placement as module
from consistency.worker.memory.placement import (
    Call,
    Contexts,
    ContextSeen,
    Figures,
    Placement,
    _FirstCall,
    library_frames,
    listed_by_nvml,
)
from consistency.worker.recorder import Recorder
from tests.capture.whole import read_records

OWN, OTHER = torch.device("cuda:1"), torch.device("cuda:0")
PID = 4711


def fake_nvml(**processes: dict[int, int | None]) -> Any:
    """Make an NVML that lists these processes on devices by UUID; its errors are the real ones."""
    fake = SimpleNamespace(open=0)

    def add(number: int) -> None:
        fake.open += number

    def handle(uuid: str) -> str:
        if uuid not in processes:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def running(uuid: str) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes[uuid].items()]

    fake.nvmlInit, fake.nvmlShutdown = (lambda: add(1)), (lambda: add(-1))
    fake.nvmlDeviceGetHandleByUUID, fake.nvmlDeviceGetComputeRunningProcesses = handle, running
    return fake


@pytest.mark.parametrize(
    ("own", "other", "found"),
    [
        ({PID: 900}, {PID: 500}, (True, 500)),
        ({PID: 900}, {1: 500}, (False, None)),
        ({PID: 900}, {PID: None}, (True, None)),  # the driver of a display does not tell the size
        ({1: 900}, {1: 500}, (None, None)),  # a container: the numbers are another side's
        ({1: 900}, {PID: 500}, (None, None)),  # and one of them may be ours by chance
        ({}, {}, (None, None)),
    ],
)
def test_nvml_is_believed_where_it_lists_this_process_on_its_own_device(own: Any, other: Any, found: Any) -> None:
    nvml = fake_nvml(own=own, other=other)
    assert listed_by_nvml("other", own="own", pid=PID, nvml=nvml) == found
    assert nvml.open == 0


def test_a_device_that_nvml_does_not_know_is_no_failure() -> None:
    nvml = fake_nvml(own={PID: 1})
    assert listed_by_nvml("other", own="own", pid=PID, nvml=nvml) == (None, None)


@pytest.mark.parametrize(
    ("driver", "listed", "exists"),
    [
        (None, (None, None), None),
        (True, (None, None), True),
        (False, (None, None), False),
        (None, (True, 5), True),
        (False, (True, 5), True),  # a context beside the primary one
        (True, (False, None), True),
        (False, (False, None), False),
    ],
)
def test_a_context_is_one_that_the_driver_or_nvml_knows(
    monkeypatch: pytest.MonkeyPatch, driver: bool | None, listed: Any, exists: bool | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(module, "_has_primary_context", lambda _: driver)
    monkeypatch.setattr(module, "_uuid", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(module, "listed_by_nvml", lambda *_, **__: listed)
    found = Contexts(OWN).look(OTHER)
    assert found.exists is exists
    assert (found.reason is None) is (exists is not None)


def test_a_backend_that_is_not_in_use_has_no_context_and_is_not_asked() -> None:
    assert Contexts(OWN).look(OTHER).exists is False  # torch here has no CUDA at all, or has not initialized it
    assert Contexts(torch.device("xpu:1")).look(torch.device("xpu:0")).exists is None


def test_the_first_call_that_makes_a_tensor_elsewhere_is_noted() -> None:
    calls: dict[torch.device, Call] = {}
    meta = torch.device("meta")
    with _FirstCall(frozenset({meta}), calls):
        torch.ones(2) + 1
        assert not calls
        torch.empty(2, device="meta")
        torch.zeros(2, device="meta")
    assert calls[meta].operation == "aten.empty.memory_format"
    assert calls[meta].frames == ()


def test_frames_are_those_of_the_libraries_that_load() -> None:
    home = "/venv/lib/python3.11/site-packages"
    stack = [
        traceback.FrameSummary(f"{home}/{file}", line, name, line="")
        for file, line, name in [
            ("consistency/worker/session.py", 1, "run"), ("peft/peft_model.py", 540, "from_pretrained"),
            ("peft/peft_model.py", 1400, "load_adapter"), ("peft/utils/save_and_load.py", 700, "load_peft_weights"),
            ("safetensors/torch.py", 360, "load_file"), ("torch/_tensor.py", 1, "to"),
        ]
    ]  # fmt: skip
    assert library_frames(stack) == (
        "safetensors/torch.py:360 load_file",
        "peft/utils/save_and_load.py:700 load_peft_weights",
        "peft/peft_model.py:1400 load_adapter",
    )


class Counters:
    """An allocator whose counters a test sets."""

    figures_now = Figures(allocated=0, peak_allocated=0, reserved=0, peak_reserved=0)

    def __init__(self, kind: str) -> None:
        assert kind == "cuda"

    def figures(self, device: torch.device) -> Figures:
        assert device == OTHER
        return Counters.figures_now

    def reset_peak(self, device: torch.device) -> None:
        assert device == OTHER
        now = Counters.figures_now
        count(allocated=now.allocated, peak=now.allocated, reserved=now.reserved)


def count(*, allocated: int | None = 0, peak: int | None = 0, reserved: int | None = 0) -> None:
    Counters.figures_now = Figures(allocated=allocated, peak_allocated=peak, reserved=reserved, peak_reserved=reserved)


class NoContexts(Contexts):
    seen = ContextSeen(exists=False, seen_by="nobody")

    def look(self, device: torch.device) -> ContextSeen:
        assert device == OTHER
        return self.seen


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Placement:
    monkeypatch.setattr(module, "Allocator", Counters)
    monkeypatch.setattr(module, "other_devices", lambda _: (OTHER,))
    count()
    return Placement(OWN, contexts=NoContexts(OWN))


@pytest.fixture
def facts(tmp_path: Path) -> Any:
    """Record what is told of the other devices, and return it by counter."""
    number = itertools.count()

    def tell(found: Placement, passing_bytes: int = 1000) -> dict[str, TensorRecord]:
        folder = tmp_path / str(next(number))
        folder.mkdir()
        with Recorder(folder, folder) as record:
            memory.devices(record, found, passing_bytes=passing_bytes)
        return {r.tensor: r for r in read_records(folder / "records.jsonl")}

    return tell


def test_nvml_is_opened_once_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts its users: what is opened while it is open costs nothing."""
    users = SimpleNamespace(now=0, opened=0)

    def use(number: int) -> None:
        users.opened += users.now == 0 and number > 0
        users.now += number

    class Asking(Contexts):
        def look(self, device: torch.device) -> ContextSeen:
            assert device != OWN
            listed_by_nvml("other", own="own", pid=PID)
            return ContextSeen(exists=False, seen_by="NVML")

    fake = fake_nvml(own={PID: 1}, other={})
    for name in ("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses"):
        monkeypatch.setattr(pynvml, name, getattr(fake, name))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: use(1))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: use(-1))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(Counters, "figures", lambda *_: Counters.figures_now)
    monkeypatch.setattr(module, "Allocator", Counters)
    monkeypatch.setattr(module, "other_devices", lambda _: tuple(torch.device("cuda", n) for n in (0, 2, 3)))
    count()
    Placement(OWN, contexts=Asking(OWN)).look("load base")
    assert (users.opened, users.now) == (1, 0)


def test_a_device_that_nobody_touched_is_equal(found: Placement, facts: Any) -> None:
    found.look("import")
    told = facts(found)
    assert {name: (r.status, r.word, r.layer, r.rule) for name, r in told.items()} == dict.fromkeys(
        ("allocated", "reserved", "context"), ("equal", None, "cuda:0", "limit")
    )


def test_an_adapter_that_passes_through_is_within_and_the_step_is_told(found: Placement, facts: Any) -> None:
    found.look("load base")
    count(allocated=0, peak=400, reserved=2048)
    found.look("load adapter")
    found.look("merged")
    told = facts(found)
    assert {name: (r.status, r.word) for name, r in told.items()} == {
        "allocated": ("within", "touched"),
        "reserved": ("within", "touched"),
        "context": ("equal", None),
    }
    assert told["allocated"].limit_ratio == 0.4
    assert told["allocated"].evidence["first_step"] == "load adapter"
    assert told["allocated"].evidence["peak_bytes"] == 400


@pytest.mark.parametrize(("allocated", "peak"), [(1, 400), (0, 1001), (500, 5000)], ids=["stays", "too much", "both"])
def test_what_stays_or_is_more_than_an_adapter_is_outside(
    found: Placement, facts: Any, allocated: int, peak: int
) -> None:
    count(allocated=allocated, peak=peak, reserved=peak)
    found.look("load adapter")
    told = facts(found)
    assert {told[name].status for name in ("allocated", "reserved")} == {"outside"}
    assert told["allocated"].word == "touched"


def test_without_an_adapter_nothing_may_pass(found: Placement, facts: Any) -> None:
    count(peak=1)
    found.look("load base")
    assert facts(found, passing_bytes=0)["allocated"].status == "outside"


def test_a_context_alone_is_touched(found: Placement, facts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoContexts, "seen", ContextSeen(exists=True, seen_by="NVML", used_bytes=2 << 30))
    found.look("load adapter")
    told = facts(found)
    assert (told["context"].status, told["context"].word) == ("within", "touched")
    assert told["context"].evidence == {"seen_by": "NVML", "used_bytes": 2 << 30, "first_step": "load adapter"}
    assert told["allocated"].status == "equal"


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        (lambda found: found.look("transfer"), None),
        (Placement.start_again, "an earlier case of this process may have opened it"),
    ],
    ids=["a stage on purpose", "an earlier case"],
)
def test_what_was_taken_before_does_not_count(
    found: Placement,
    facts: Any,
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[[Placement], None],
    reason: str | None,
) -> None:
    """By a stage that copies to other devices, or by a case before it in a suite: none is blamed for another one."""
    monkeypatch.setattr(NoContexts, "seen", ContextSeen(exists=True, seen_by="the driver"))
    count(allocated=100, peak=5000, reserved=8000)
    begin(found)
    found.look("import")
    told = facts(found)
    statuses = {"allocated": "equal", "reserved": "equal", "context": "skipped"}
    assert {name: r.status for name, r in told.items()} == statuses
    assert reason is None or told["context"].reason == reason
    for stays, status in ((0, "within"), (30, "outside")):
        count(allocated=100 + stays, peak=160, reserved=8000)
        found.look("load adapter")
        later = facts(found)["allocated"]
        assert (later.status, later.evidence["first_step"]) == (status, "load adapter")
        assert (later.evidence["peak_bytes"], later.evidence["resident_bytes"]) == (60, stays)


@pytest.mark.parametrize("seen", [False, None])
def test_only_a_device_that_was_not_opened_before_can_be_blamed_for_a_context(
    found: Placement, facts: Any, monkeypatch: pytest.MonkeyPatch, seen: bool | None
) -> None:
    monkeypatch.setattr(NoContexts, "seen", ContextSeen(exists=seen, reason="nobody can tell"))
    found.start_again()
    monkeypatch.setattr(NoContexts, "seen", ContextSeen(exists=True, seen_by="the driver"))
    found.look("load adapter")
    status = facts(found)["context"].status
    assert status == ("within" if seen is False else "skipped")


def test_a_backend_without_counters_is_skipped_with_that_reason(found: Placement, facts: Any) -> None:
    Counters.figures_now = Figures()
    told = facts(found)
    assert told["allocated"].status == "skipped"
    assert "counts no peak" in (told["allocated"].reason or "")


def test_where_there_is_no_other_device_nothing_is_watched() -> None:
    alone = Placement(torch.device("cpu"))
    if alone.others:
        pytest.skip("this machine has an accelerator")
    with alone.watching():
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
