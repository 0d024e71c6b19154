"""Finding devices: the processor's own flags, and NVML by way of a stand-in where there is no GPU."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from consistency.case import standard
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.cli.main import main
from consistency.devices import discovery
from consistency.devices.discovery import accelerators, cpu_info, discover, select
from consistency.devices.spec import AutoChoice, parse_device
from consistency.errors import UsageError
from consistency.launch.plan import default_load_paths, why_not_shared
from consistency.workflows.planning import budget_of
from tests.devices.torch_properties import a770, mi300x


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches = (
        discovery._nvidia, discovery._probed, discovery._torch_build, discovery._cpuinfo, discovery._kernels,
    )  # fmt: skip
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

    def instance(device: dict[str, Any], number: int) -> dict[str, Any]:
        if number not in device["instances"]:
            raise pynvml.NVMLError(6)  # not found
        found: dict[str, Any] = device["instances"][number]
        return found

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
        "nvmlDeviceGetMemoryInfo": lambda d: types.SimpleNamespace(total=d.get("memory", 48) * 2**30),
        "nvmlDeviceGetComputeMode": lambda d: d.get("mode", 0),
        "nvmlDeviceGetMigMode": lambda d: (int("instances" in d), 0),
        "nvmlDeviceGetMaxMigDeviceCount": lambda _: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": instance,
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
    monkeypatch.setattr(discovery, "_kernels", lambda: ("sm_80",))
    main(["devices"])
    assert f"cuda:2: NVML does not report {unknown}: {reason}" in capsys.readouterr().out


def test_a_gpu_that_fell_off_the_bus_keeps_its_place_and_shows_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, *A6000)
    refuse(monkeypatch, "nvmlDeviceGetHandleByIndex", 15, of="1")
    found = accelerators()
    assert [info.uuid for info in found] == ["GPU-000", None, "GPU-222", "GPU-333"]
    assert (found[1].visible_id, found[1].model, found[1].unusable) == ("-1", "NVIDIA, GPU is lost", "GPU is lost")
    assert {info.visible_ids for info in found} == {()}, "what a process that sees all would number them is not known"
    assert found[2].alone == "what it would be numbered beside cuda:1, which is lost, is not known"


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
    assert {info.visible_ids for info in found} == {("GPU-000", "GPU-111", "GPU-222", "GPU-333")}
    assert {info.alone for info in found} == {""}
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
    assert select(["cpu", "auto"])[0].auto == select(["auto", "cpu"])[0].auto == cpu.auto
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


A100_MIG = {
    "capability": (8, 0), "uuid": "GPU-aaa", "name": "NVIDIA A100-SXM4-80GB", "bus": "0000:17:00.0", "memory": 80,
    "instances": {
        0: {"uuid": "MIG-0", "name": "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "memory": 40},
        3: {"uuid": "MIG-3", "name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "memory": 10},
    },
}  # fmt: skip


def test_instances_of_mig_are_devices_and_their_card_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, A100_MIG, A6000[1])
    found = accelerators()
    assert [(info.spec.name, info.uuid, info.visible_id, info.memory_bytes) for info in found] == [
        ("cuda:0", "MIG-0", "MIG-0", 40 << 30),
        ("cuda:1", "MIG-3", "MIG-3", 10 << 30),
        ("cuda:2", "GPU-111", "GPU-111", 48 << 30),
    ]
    assert (found[1].architecture, found[1].model) == ("Ampere sm_80", "NVIDIA A100-SXM4-80GB MIG 1g.10gb")
    assert (found[1].pci_bus_id, found[1].capability, found[1].driver) == ("0000:17:00.0", "8.0", "580.65")
    assert [info.unusable for info in found] == ["", "", ""]
    assert default_load_paths(found) == (LoadPath.ISOLATED,)
    assert why_not_shared(found) == "cuda:0, of which a process sees one: an instance of MIG"
    assert {info.visible_ids for info in found} == {()}


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("MIG-3,MIG-0", ["MIG-3", "MIG-0"]),
        ("0", ["MIG-0", "MIG-3"]),  # the card: all of its instances
        ("1", ["GPU-111"]),
        ("GPU-aaa,GPU-111", ["MIG-0", "MIG-3", "GPU-111"]),
        ("MIG-", []),
        ("GPU-", []),
    ],
)
def test_a_list_may_name_instances_or_their_card(
    monkeypatch: pytest.MonkeyPatch, visible: str, uuids: list[str]
) -> None:
    plug_in(monkeypatch, A100_MIG, A6000[1])
    monkeypatch.setattr(discovery, "_probed", lambda: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [info.uuid for info in accelerators()] == uuids


def test_a_card_whose_mig_has_no_instance_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, {**A100_MIG, "instances": {}}, A6000[1])
    card, other = accelerators()
    assert card.unusable.startswith("MIG mode is on, and this process sees no instance")
    assert other.unusable == ""


@pytest.mark.parametrize("mode", [1, 3])
def test_an_exclusive_device_is_not_shared_and_that_is_said(monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    plug_in(monkeypatch, *({**card, "mode": mode} for card in A6000))
    found = accelerators()
    assert {info.unusable for info in found} == {""}
    assert default_load_paths(found) == (LoadPath.ISOLATED,)
    case = budget_of(Case(name="x", base="", stages=(standard.OPERATORS,)), found).case
    reason = "cuda:0, whose compute mode lets one process use it at a time (nvidia-smi -c 0 ends that)"
    assert f"the load path shared ({reason})" in case.not_checked()
    assert budget_of(Case(name="x", base="", stages=(standard.OPERATORS,)), found[:1]).case.not_shared == ""
    asked = Case(name="x", base="", stages=(standard.OPERATORS,), load_paths=(LoadPath.SHARED,))
    with pytest.raises(UsageError, match="cannot see all devices") as caught:
        budget_of(asked, found)
    assert caught.value.got == reason


def test_a_prohibited_device_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plug_in(monkeypatch, A6000[0], {**A6000[1], "mode": 2})
    first, second = accelerators()
    assert (first.unusable, first.alone != "") == ("", True)
    assert second.unusable.startswith("its compute mode is prohibited")
    monkeypatch.setattr(discovery, "_kernels", lambda: ("sm_80",))
    main(["devices"])
    assert "cuda:1 cannot be used: its compute mode is prohibited" in capsys.readouterr().out


def test_under_wsl_the_list_has_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()
    monkeypatch.setattr(discovery, "_WSL", tmp_path / "dxg")
    plug_in(monkeypatch, *A6000[:2])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (found,) = accelerators()
    assert (found.visible_id, found.visible_ids, found.uuid) == ("1", ("1",), "GPU-111")


@pytest.mark.parametrize(("capability", "shares"), [((12, 1), True), ((8, 7), True), ((9, 0), False)])
def test_a_chip_without_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], shares: bool
) -> None:
    plug_in(monkeypatch, {**A6000[0], "capability": capability})
    (found,) = accelerators()
    assert (found.shares_memory, found.visible_id) == (shares, "0" if shares else "GPU-000")


def test_devices_that_torch_has_no_kernels_for_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plug_in(monkeypatch, A6000[0], {**A6000[1], "capability": (7, 0)})
    monkeypatch.setattr(discovery, "_from_probe", lambda *_: ["sm_75", "sm_80"])
    main(["devices"])
    shown = capsys.readouterr().out
    assert "cuda:1 cannot be used: this torch has kernels for sm_75, sm_80, the device is sm_70" in shown
    assert "cuda:0 cannot be used" not in shown
    main(["devices", "--json"])
    rows = {row["name"]: row["unusable"] for row in json.loads(capsys.readouterr().out)}
    assert (rows["cpu"], rows["cuda:0"], "sm_70" in rows["cuda:1"]) == ("", "", True)


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


@pytest.mark.slow
@pytest.mark.process
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


@pytest.mark.process
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
    monkeypatch.setattr(discovery, "_kernels", lambda: ("gfx942", "gfx90a"))
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
