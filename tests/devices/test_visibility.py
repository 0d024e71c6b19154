"""Devices are hidden by the variables that their own runtime reads, in the way in which it reads them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from consistency.case.load_path import LoadPath
from consistency.devices import discovery, visibility
from consistency.devices.spec import DeviceInfo, parse_device
from consistency.launch.environment import torch_device, worker_environment

NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "is_rocm", lambda: True)


def environment_of(device: str, load_path: LoadPath = LoadPath.ISOLATED) -> Mapping[str, str]:
    info = DeviceInfo(spec=parse_device(device), architecture="a", model="m")
    found = worker_environment(info, load_path, threads=1)
    return {name: found[name] for name in NAMES if name in found}


def seen_by_hip(environment: Mapping[str, str], count: int) -> list[int]:
    """Return the devices that HIP shows, as ROCm's clr reads its variables (`Device::init`, rocdevice.cpp)."""
    ordinals = environment.get("HIP_VISIBLE_DEVICES") or environment.get("CUDA_VISIBLE_DEVICES") or ""
    shown: list[int] = []
    for text in ordinals.split(",") if ordinals else map(str, range(count)):
        if not text.isdigit() or int(text) >= count:
            break
        shown.append(int(text))
    return shown


@pytest.mark.usefixtures("rocm")
@pytest.mark.parametrize(
    ("user", "device"),
    [
        ({}, 1),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "3,2"}, 2),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "3,2"}, 2),
        ({"HIP_VISIBLE_DEVICES": "0,3", "CUDA_VISIBLE_DEVICES": "1,2"}, 3),
    ],
)
def test_an_isolated_worker_on_rocm_sees_its_device_alone(
    monkeypatch: pytest.MonkeyPatch, user: dict[str, str], device: int
) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "4,5,6,7")  # counted before, and left as it is
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    found = environment_of("cuda:1")
    assert seen_by_hip(found, 4) == [device]
    assert found["ROCR_VISIBLE_DEVICES"] == "4,5,6,7"
    assert environment_of("cuda:1", LoadPath.SHARED) == {**user, "ROCR_VISIBLE_DEVICES": "4,5,6,7"}


@pytest.mark.usefixtures("rocm")
@pytest.mark.parametrize("user", [{}, {"HIP_VISIBLE_DEVICES": "2,3"}, {"CUDA_VISIBLE_DEVICES": "1"}])
def test_a_worker_of_the_cpu_sees_no_device_of_rocm(monkeypatch: pytest.MonkeyPatch, user: dict[str, str]) -> None:
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    assert seen_by_hip(environment_of("cpu"), 4) == []


def test_cuda_is_hidden_by_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_torch_build", lambda: frozenset({"cuda"}))
    assert environment_of("cuda:1") == {"CUDA_VISIBLE_DEVICES": "1"}
    assert environment_of("cpu") == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("user", "first", "second"),
    [
        ("", "0", "1"),
        ("3,2", "2", "3"),  # Level Zero selects by the mask and keeps its own order
        ("1.0,0.1,0.0", "0.0,0.1", "1.0"),  # tiles of one device are one device
        ("1,0", "0", "1"),
        ("0.0,x", "0.0", "x"),
    ],
)
def test_an_isolated_worker_on_xpu_sees_its_device_alone(
    monkeypatch: pytest.MonkeyPatch, user: str, first: str, second: str
) -> None:
    if user:
        monkeypatch.setenv("ZE_AFFINITY_MASK", user)
    assert environment_of("xpu:0") == {"ZE_AFFINITY_MASK": first}
    assert environment_of("xpu:1") == {"ZE_AFFINITY_MASK": second}
    info = DeviceInfo(spec=parse_device("xpu:1"), architecture="a", model="m")
    assert torch_device(info, LoadPath.ISOLATED) == "xpu:0"
