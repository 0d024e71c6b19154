"""Finding devices: the processor's own flags, and NVML by way of a stand-in where there is no GPU."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from consistency.cli.main import main
from consistency.devices import discovery
from consistency.devices.discovery import accelerators, cpu_info, discover, select
from consistency.devices.spec import AutoChoice, parse_device
from consistency.errors import UsageError
from tests.devices.amd_and_intel import a770, mi300x


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches = (discovery._nvidia, discovery._probed, discovery._torch_build, discovery._cpuinfo)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


def plug_in(monkeypatch: pytest.MonkeyPatch, *devices: dict[str, Any]) -> None:
    """Stand in for NVML and for a torch that was built with CUDA: no GPU is at hand in a test."""
    import pynvml

    functions: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.65",
        "nvmlDeviceGetCount": lambda: len(devices),
        "nvmlDeviceGetHandleByIndex": lambda i: devices[i],
        "nvmlDeviceGetCudaComputeCapability": lambda d: d["capability"],
        "nvmlDeviceGetUUID": lambda d: d["uuid"],
        "nvmlDeviceGetName": lambda d: d["name"],
        "nvmlDeviceGetPciInfo": lambda d: types.SimpleNamespace(busId=d["bus"]),
        "nvmlDeviceGetMemoryInfo": lambda _: types.SimpleNamespace(total=48 * 2**30),
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)
    monkeypatch.setattr(discovery, "_torch_build", lambda: frozenset({"cuda"}))


A6000 = [
    {"capability": (8, 6), "uuid": f"GPU-{i}{i}{i}", "name": "NVIDIA RTX A6000", "bus": f"0000:{i}1:00.0"}
    for i in range(4)
]


def refuse(monkeypatch: pytest.MonkeyPatch, function: str, error: int, *, of: str | None = None) -> None:
    """Let NVML answer a question with an error, of one device or of all."""
    import pynvml

    real = getattr(pynvml, function)

    def refused(*arguments: Any) -> Any:
        if of is None or of in str(arguments):
            raise pynvml.NVMLError(error)
        return real(*arguments)

    monkeypatch.setattr(pynvml, function, refused)


@pytest.mark.parametrize(
    ("function", "fact", "unknown"),
    [
        ("nvmlDeviceGetMemoryInfo", "memory_bytes", "memory"),
        ("nvmlDeviceGetPciInfo", "pci_bus_id", "PCI bus id"),
        ("nvmlDeviceGetUUID", "uuid", "UUID"),
        ("nvmlDeviceGetCudaComputeCapability", "capability", "compute capability"),
    ],
)
@pytest.mark.parametrize(("error", "reason"), [(3, "Not Supported"), (4, "Insufficient Permissions")])
def test_an_answer_that_nvml_refuses_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    function: str,
    fact: str,
    unknown: str,
    error: int,
    reason: str,
) -> None:
    plug_in(monkeypatch, *A6000)
    refuse(monkeypatch, function, error)
    found = accelerators()
    assert [(info.spec.name, getattr(info, fact), info.not_reported) for info in found] == [
        (f"cuda:{i}", None, {unknown: reason}) for i in range(4)
    ]
    main(["devices"])
    assert f"cuda:2: NVML does not report {unknown}: {reason}" in capsys.readouterr().out


def test_a_gpu_that_fell_off_the_bus_keeps_its_place_and_shows_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, *A6000)
    refuse(monkeypatch, "nvmlDeviceGetHandleByIndex", 15, of="1")
    found = accelerators()
    assert [info.uuid for info in found] == ["GPU-000", None, "GPU-222", "GPU-333"]
    assert (found[1].visible_id, found[1].model) == ("-1", "NVIDIA, GPU is lost")


def test_nvml_that_cannot_count_leaves_the_devices_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, *A6000)
    refuse(monkeypatch, "nvmlDeviceGetCount", 999)
    monkeypatch.setattr(discovery, "_probed", lambda: ())
    assert accelerators() == ()


def test_cpu_is_always_first() -> None:
    assert discover()[0].spec.name == "cpu"
    assert cpu_info().architecture
    assert cpu_info().model


def test_auto_without_accelerator_is_the_cpu_and_its_other_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "accelerators", lambda: ())
    flags = frozenset(["sse4_1", "avx2", "fma", "avx512f", "avx512dq", "avx512bw", "avx512vl"])
    monkeypatch.setattr(discovery, "_cpuinfo", lambda: (flags, "chip"))
    assert [i.spec.name for i in select(["auto"])] == ["cpu", "cpu@baseline", "cpu@avx2"]
    assert len({i.architecture for i in select(["auto"])}) == 3
    monkeypatch.setattr(discovery, "_cpuinfo", lambda: (frozenset({"sse4_1", "avx2", "fma"}), "chip"))
    assert [i.spec.name for i in select(["auto"])] == ["cpu", "cpu@baseline"]
    monkeypatch.setattr(discovery, "_cpuinfo", lambda: (frozenset({"asimd"}), "chip"))
    assert [i.spec.name for i in select(["auto"])] == ["cpu"]


def test_variant_that_the_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_cpuinfo", lambda: (frozenset({"sse4_1"}), "old chip"))
    with pytest.raises(UsageError, match="cannot run cpu@avx2") as caught:
        select(["cpu@avx2"])
    assert "old chip" in (caught.value.got or "")


def test_gpus_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, *A6000)
    found = accelerators()
    assert [i.spec.name for i in found] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert found[1].architecture == "Ampere sm_86"
    assert found[1].model == "NVIDIA RTX A6000"
    assert found[1].uuid == found[1].visible_id == "GPU-111"
    assert (found[1].pci_bus_id, found[1].driver, found[1].capability) == ("0000:11:00.0", "580.65", "8.6")
    assert [i.spec.name for i in select(["auto"])] == ["cpu", "cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert select(["cuda:1@tf32"])[0].uuid == "GPU-111"


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("2,0", ["GPU-222", "GPU-000"]),
        ("GPU-333", ["GPU-333"]),
        ("GPU-1", ["GPU-111"]),
        ("1,9,0", ["GPU-111"]),  # CUDA stops at the first entry that it cannot resolve
        ("", []),
        ("-1", []),
    ],
)
def test_ordinals_follow_what_the_user_made_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str, uuids: list[str]
) -> None:
    plug_in(monkeypatch, *A6000)
    monkeypatch.setattr(discovery, "_probed", lambda: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = accelerators()
    assert [i.uuid for i in found] == uuids
    assert [i.spec.index for i in found] == list(range(len(uuids)))


def without_driver(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Stand in for a torch that was built with CUDA, on a machine where NVML does not start."""
    plug_in(monkeypatch)
    refuse(monkeypatch, "nvmlInit", error)
    monkeypatch.setattr(discovery, "_probed", lambda: ())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (9, "Driver Not Loaded"),
        (12, "NVML Shared Library Not Found"),
        (18, "RM has detected an NVML/RM version mismatch."),
    ],
)
def test_a_torch_for_cuda_without_a_device_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: int, reason: str
) -> None:
    without_driver(monkeypatch, error)
    cpu = select(["auto"])[0]
    assert cpu.auto == AutoChoice(build="cuda", reason=f"NVML: {reason}")
    assert select(["cpu"])[0].auto is None, "who names the CPU wants no GPU"
    with pytest.raises(UsageError, match="no device cuda:0") as caught:
        select(["cuda:0"])
    assert reason in (caught.value.hint or "")
    main(["devices"])
    assert f"torch is built for CUDA and finds no device: NVML: {reason}" in capsys.readouterr().out


def test_a_list_that_shows_no_device_is_part_of_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, *A6000)
    monkeypatch.setattr(discovery, "_probed", lambda: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-gone,GPU-111")
    found = select(["auto"])[0].auto
    assert found is not None
    assert found.reason == "torch lists none; CUDA_VISIBLE_DEVICES=GPU-gone,GPU-111 is set"


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_who_hides_every_device_has_lost_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    without_driver(monkeypatch, 9)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert select(["auto"])[0].auto == AutoChoice(masks={"CUDA_VISIBLE_DEVICES": value})


def test_a_torch_for_the_cpu_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch, 9)
    monkeypatch.setattr(discovery, "_torch_build", frozenset)
    assert select(["auto"])[0].auto == AutoChoice()


def test_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, *A6000[:1])
    with pytest.raises(UsageError, match="no device cuda:1") as caught:
        select(["cuda:1"])
    assert caught.value.got == "cpu, cuda:0"


def test_torch_built_for_the_cpu_alone_has_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, *A6000)
    monkeypatch.setattr(discovery, "_torch_build", frozenset)
    monkeypatch.setattr(discovery, "_probed", lambda: ())
    assert accelerators() == ()


def test_probe_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine it finds nothing; that it ran and was understood is what is seen."""
    import subprocess

    calls: list[list[str]] = []
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        calls.append(command)
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(discovery, "_nvidia", lambda: ())
    monkeypatch.setattr(discovery, "_torch_build", lambda: frozenset({"xpu"}))
    found = accelerators()
    assert calls
    assert calls[0][-1] == "consistency.devices.probe"
    assert all(not info.spec.is_cpu for info in found)
    assert parse_device("xpu:0").index == 0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit('loading\\nRuntimeError: no driver')", "ended with 1: RuntimeError: no driver"),
        ("import os; os._exit(3)", "ended with 3: "),
        ("print('hello')", "wrote no JSON"),
        ("import time; time.sleep(60)", "did not end in 0.5 s"),
    ],
)
def test_a_probe_that_fails_is_no_machine_without_devices(
    code: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "python_command", lambda: [sys.executable, "-c", code])
    monkeypatch.setattr(discovery, "PROBE_TIMEOUT_S", 0.5 if "sleep" in code else 60.0)
    monkeypatch.setattr(discovery, "_nvidia", lambda: ())
    monkeypatch.setattr(discovery, "_torch_build", lambda: frozenset({"xpu"}))
    for asked in (("auto",), ("xpu:0",)):
        with pytest.raises(UsageError, match="torch cannot list the devices of this machine") as raised:
            select(asked)
        assert reason in str(raised.value)
    assert [info.spec.name for info in select(("cpu",))] == ["cpu"]


def test_simulated_device_says_so_in_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    row = {"type": "npu", "index": 0, "architecture": "npu A", "model": "chip"}
    rows = [{**row, "simulated": True}, {**row, "index": 1, "simulated": False}]
    done = subprocess.CompletedProcess([], 0, stdout=json.dumps(rows))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(discovery, "_torch_build", lambda: frozenset({"xpu"}))
    double, real = accelerators()
    assert (double.architecture, double.simulated) == ("npu A (simulated)", True)
    assert (real.architecture, real.simulated) == ("npu A", False)


def double_torch(monkeypatch: pytest.MonkeyPatch, kind: str, *properties: Any) -> None:
    """Stand in for a torch that has these devices: the probe runs in this process, on properties of its own."""
    import subprocess

    import torch

    from consistency.devices import probe

    module = types.SimpleNamespace(get_device_properties=lambda index: properties[index])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(discovery, "_torch_build", lambda: frozenset({"hip" if kind == "cuda" else kind}))
    answer = subprocess.CompletedProcess([], 0, stdout=json.dumps(probe.describe()))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)


def test_gpus_of_amd_by_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    other = mi300x(gcnArchName="gfx90a:sramecc+:xnack-", name="AMD Instinct MI210", pci_bus_id=0xC9)
    del other.uuid
    double_torch(monkeypatch, "cuda", mi300x(), other)
    found = select(["auto"])[1:]
    assert [(info.spec.name, info.architecture, info.pci_bus_id) for info in found] == [
        ("cuda:0", "CDNA 3 gfx942", "0000:05:00.0"),
        ("cuda:1", "CDNA 2 gfx90a", "0000:c9:00.0"),
    ]
    assert (found[0].uuid, found[0].visible_id, found[0].memory_bytes) == ("GPU-e044801689257fb4", None, 196592 << 20)
    main(["devices"])
    shown = capsys.readouterr().out
    assert "cuda:1: torch does not report UUID: not among the properties of the device" in shown
    assert "NVML" not in shown


def test_gpus_of_intel_by_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    double_torch(monkeypatch, "xpu", a770())
    (found,) = select(["xpu"])
    assert (found.architecture, found.pci_bus_id, found.driver) == ("Xe-HPG 12.55.8", "0000:03:00.0", "23.35.27191.42")
    main(["devices", "--json"])
    assert json.loads(capsys.readouterr().out)[-1]["not_reported"] == {}
