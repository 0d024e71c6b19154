"""One entry makes a device type known everywhere: parsing, discovery, isolation and what a capture records."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from consistency.case.load_path import LoadPath
from consistency.devices import discovery
from consistency.devices.backend import Backend, Variant
from consistency.devices.backends import BACKENDS, backend_of, kernel_variables, recorded_variables, worker_variables
from consistency.devices.spec import DeviceInfo, DeviceSpec, parse_device
from consistency.errors import UsageError
from consistency.launch.environment import torch_device, worker_environment

TPU = Backend(
    type="tpu",
    visibility="TPU_VISIBLE",
    builds=("tpu_version",),
    environment={"TPU_NEEDS": "1"},
    recorded=("TPU_MODE",),
    variants=(Variant(name="fast", environment={"TPU_FAST": "yes"}, settings={"cudnn_enabled": False}),),
)


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "tpu", TPU)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    for cache in (discovery._nvidia, discovery._probed, discovery._packaged, discovery._torch_build):
        cache.cache_clear()


def build_torch_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, version: str) -> list[list[str]]:
    """Stand in for a torch of that `version.py`, and for a probe that finds two devices; return the probe's calls."""
    (tmp_path / "version.py").write_text(version)
    found = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    rows = [{"type": "tpu", "index": i, "architecture": "tpu v9", "model": "v9", "uuid": f"T{i}"} for i in range(2)]
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(rows))

    monkeypatch.setattr(subprocess, "run", run)
    for cache in (discovery._nvidia, discovery._probed, discovery._packaged, discovery._torch_build):
        cache.cache_clear()
    return calls


@pytest.mark.usefixtures("tpu")
def test_an_entry_makes_discovery_ask_for_its_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert build_torch_with(monkeypatch, tmp_path, "__version__ = '2'\ntpu_version: Optional[str] = '9'\n") == []
    assert [(i.spec.name, i.uuid, i.simulated) for i in discovery.accelerators()] == [
        ("tpu:0", "T0", False),
        ("tpu:1", "T1", False),
    ]
    assert [i.spec.name for i in discovery.select(["tpu:1@fast"])] == ["tpu:1@fast"]


def test_without_the_entry_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    calls = build_torch_with(monkeypatch, tmp_path, "__version__ = '2'\ntpu_version: Optional[str] = '9'\n")
    assert discovery.accelerators() == ()
    assert calls == []


@pytest.mark.usefixtures("tpu")
def test_an_entry_confines_a_worker_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_VISIBLE", "4,6")
    monkeypatch.setenv("TPU_FAST", "no")
    info = DeviceInfo(spec=parse_device("tpu:1"), architecture="tpu v9", model="v9")
    alone = worker_environment(info, LoadPath.ISOLATED, threads=1)
    assert (alone["TPU_VISIBLE"], alone["TPU_NEEDS"], "TPU_FAST" in alone) == ("6", "1", False)
    assert torch_device(info, LoadPath.ISOLATED) == "tpu:0"
    assert worker_environment(info, LoadPath.SHARED, threads=1)["TPU_VISIBLE"] == "4,6"
    assert torch_device(info, LoadPath.SHARED) == "tpu:1"
    fast = DeviceInfo(spec=parse_device("tpu:1@fast"), architecture="tpu v9", model="v9")
    assert worker_environment(fast, LoadPath.ISOLATED, threads=1)["TPU_FAST"] == "yes"
    cpu = DeviceInfo(spec=parse_device("cpu"), architecture="a", model="m")
    assert worker_environment(cpu, LoadPath.ISOLATED, threads=1)["TPU_VISIBLE"] == ""


@pytest.mark.usefixtures("tpu")
def test_an_entry_has_its_variables_recorded() -> None:
    assert "TPU_FAST" in kernel_variables()
    assert worker_variables()["TPU_NEEDS"] == "1"
    assert {"TPU_VISIBLE", "TPU_NEEDS", "TPU_MODE", "TPU_FAST"} <= recorded_variables()


def test_variants_are_those_of_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="unknown variant of tpu: fast"):
        parse_device("tpu:0@fast")
    monkeypatch.setitem(BACKENDS, "tpu", TPU)
    assert parse_device("tpu@fast").numerical_variant() == TPU.variants[0]


def test_a_type_without_an_entry_is_not_confined_and_keeps_its_number() -> None:
    assert backend_of("fpga") == Backend(type="fpga")
    assert parse_device("fpga:2") == DeviceSpec(type="fpga", index=2)
    info = DeviceInfo(spec=parse_device("fpga:2"), architecture="a", model="m")
    assert torch_device(info, LoadPath.ISOLATED) == "fpga:2"
    assert worker_environment(info, LoadPath.ISOLATED, threads=1) == worker_environment(
        info, LoadPath.SHARED, threads=1
    )


def test_an_empty_mask_hides_devices_only_where_it_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    found = worker_environment(
        DeviceInfo(spec=parse_device("cpu"), architecture="a", model="m"), LoadPath.ISOLATED, threads=1
    )
    assert found["CUDA_VISIBLE_DEVICES"] == found["ASCEND_RT_VISIBLE_DEVICES"] == ""
    assert "ZE_AFFINITY_MASK" not in found


# --- a package of its own, such as torch_xla ------------------------------------------------------------------------

PACKED = Backend(type="tpu", package="torch_tpu", asked_by="TPU_RUNS_ON", interface="tests.devices.no_such_module")


def test_a_package_is_asked_for_its_devices_where_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setitem(BACKENDS, "tpu", PACKED)
    calls = build_torch_with(monkeypatch, tmp_path, "__version__ = '2'\n")
    assert discovery.accelerators() == ()
    assert calls == []
    with pytest.raises(UsageError, match="no device tpu:0") as caught:
        discovery.select(["tpu:0"])
    assert caught.value.hint == "set TPU_RUNS_ON, which chooses what tpu runs on"
    monkeypatch.setenv("TPU_RUNS_ON", "TPU")
    assert [info.spec.name for info in discovery.accelerators()] == ["tpu:0", "tpu:1"]
    assert [call[-2:] for call in calls] == [["consistency.devices.probe", "tpu"]]


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(BACKENDS, "tpu", PACKED)
    build_torch_with(monkeypatch, tmp_path, "__version__ = '2'\n")
    torch_itself = importlib.util.find_spec("torch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: torch_itself if name == "torch" else None)
    with pytest.raises(UsageError, match="no device tpu:0") as caught:
        discovery.select(["tpu:0"])
    assert caught.value.hint == "install torch_tpu for tpu"
