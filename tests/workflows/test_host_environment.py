"""The environment block of an issue: the words of a report, the variables that a capture records, nothing private."""

from __future__ import annotations

import getpass
import platform
import sys
from pathlib import Path

import pytest

from consistency.comparison.result import WorkerSummary
from consistency.devices import discovery
from consistency.devices.host.facts import HostFacts
from consistency.devices.spec import AutoChoice, DeviceInfo, DeviceSpec
from consistency.report.documents import busy_host_texts, environment_texts
from consistency.worker.environment import describe_host
from consistency.workflows import host_environment
from consistency.workflows.host_environment import as_markdown, read_host_environment

CARD = DeviceInfo(
    spec=DeviceSpec(type="cuda", index=0), architecture="Hopper sm_90", model="H200", driver="580.65",
    uuid="GPU-286b97f2-4430-4470-b423-866d9bb70889", pci_bus_id="0000:3B:00.0", memory_bytes=2**37,
    unusable="its compute mode is prohibited",
)  # fmt: skip


def lines() -> list[str]:
    return as_markdown(read_host_environment()).splitlines()


def test_it_is_folded_code_for_an_issue() -> None:
    block = lines()
    assert block[:3] == ["<details><summary>Environment</summary>", "", "```text"]
    assert block[-2:] == ["```", "</details>"]


def test_it_has_every_line_of_a_reports_environment() -> None:
    info = discovery.cpu_info()
    worker = WorkerSummary(
        name="cpu", architecture=info.architecture, model=info.model, load_path="isolated", status="ok",
        environment=describe_host(),
    )  # fmt: skip
    assert [line for line in environment_texts([worker]) if line not in lines()] == []


def test_devices_are_those_that_were_found_without_what_identifies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_environment, "discover", lambda: (discovery.cpu_info(), CARD))
    block = lines()
    assert "cuda:0: H200 (Hopper sm_90)" in block
    assert "cuda:0 cannot be used: its compute mode is prohibited" in block
    assert "Nvidia driver version: 580.65" in block
    assert "286b97f2" not in "".join(block)


def test_why_there_is_no_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_environment, "auto_choice", lambda: AutoChoice(build="cuda", reason="NVML: no driver"))
    (line,) = (line for line in lines() if "finds no device" in line)
    assert line.endswith("NVML: no driver")


def test_nothing_private_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "grace")
    monkeypatch.setattr(platform, "node", lambda: "tesla-07.example.org")
    monkeypatch.setattr(platform, "platform", lambda: "Linux-6.1-tesla-07-x86_64")
    for name, value in {
        "HF_TOKEN": "hf_secret", "CUDA_VISIBLE_DEVICES": "GPU-286b97f2-4430-4470-b423-866d9bb70889",
        "XLA_PERSISTENT_CACHE_PATH": f"{Path.home()}/grace/cache", "OMP_NUM_THREADS": "3",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    text = "\n".join(lines())
    assert "OMP_NUM_THREADS=3" in text, "a variable that captures record"
    assert "CUDA_VISIBLE_DEVICES=GPU-<uuid-1>" in text
    assert "XLA_PERSISTENT_CACHE_PATH=<home>/" in text
    assert "OS: Linux-6.1-<host-1>-x86_64" in text
    for private in ("hf_secret", "HF_TOKEN", "286b97f2", "grace", "tesla-07", str(Path.home())):
        assert private not in text


def test_a_torch_that_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "consistency.worker.environment", None)
    block = lines()
    assert any(line.startswith("torch cannot be imported: ModuleNotFoundError") for line in block)
    assert any(line.startswith("PyTorch version: 2") for line in block)
    assert any(line.startswith("[pip3] peft==") for line in block)


def test_a_busy_host_is_said_once_and_a_quiet_one_not() -> None:
    quiet, busy = HostFacts(host="a"), HostFacts(host="b", is_busy=True)
    assert [*busy_host_texts([quiet])] == []
    (line,) = busy_host_texts([quiet, busy, busy])
    assert line.startswith("b: something else computed on more than half of the cores")
