"""A worker whose device is another one, or of which torch computes nothing, says so before it checks anything."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consistency.case.case import Case
from consistency.errors import UnusableDeviceError
from consistency.worker.device_check import require_device
from consistency.worker.protocol import Job
from tests.devices.torch_properties import Uuid, mi300x
from tests.worker.made_jobs import job_of

H100 = "12345678-9abc-def0-1234-56789abcdef0"


def job(device: str = "cuda:0", **fields: Any) -> Job:
    return job_of(Case(name="x", base="b"), name="cuda:1", device=device, makes_reference=False, **fields)


def properties(major: int = 9, minor: int = 0, **fields: Any) -> Any:
    return SimpleNamespace(name="NVIDIA chip", major=major, minor=minor, total_memory=1, uuid=Uuid(H100), **fields)


@pytest.fixture
def plugged_in(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for `torch.cuda` with one H100; `failure` is what a kernel raises there."""
    module: SimpleNamespace = SimpleNamespace(
        get_device_properties=lambda _: module.properties, get_arch_list=lambda: ["sm_80", "sm_90"],
        properties=properties(), failure=None,
    )  # fmt: skip

    def ones(*_: object, **__: object) -> torch.Tensor:
        if module.failure is not None:
            raise module.failure
        return torch.full((2,), 1.0)

    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch, "ones", ones)
    return module


NO_IMAGE = RuntimeError("CUDA error: no kernel image is available for execution on the device")


@pytest.mark.usefixtures("plugged_in")
@pytest.mark.parametrize("uuid", [f"GPU-{H100}", f"GPU-{H100.upper()}", None, "MIG-0f0f"])
def test_the_planned_device_is_taken(uuid: str | None) -> None:
    require_device(job(uuid=uuid))


@pytest.mark.usefixtures("plugged_in")
def test_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-87654321")
    with pytest.raises(UnusableDeviceError) as caught:
        require_device(job(uuid="GPU-87654321-9abc-def0-1234-56789abcdef0"))
    assert caught.value.what == (
        f"cuda:1 is another device than was listed: GPU-{H100}, not GPU-87654321-9abc-def0-1234-56789abcdef0 "
        "(CUDA_VISIBLE_DEVICES=GPU-87654321)"
    )


@pytest.mark.parametrize(
    ("planned", "here", "same"),
    [
        ("00000000:1B:00.0", 0x1B, True),  # a virtual GPU may have a UUID by NVML and another by CUDA
        ("00000000:1C:00.0", 0x1B, False),
        (None, 0x1B, False),
        ("00000000:1B:00.0", None, False),
    ],
)
def test_a_device_in_the_place_that_was_planned_is_that_device(
    plugged_in: SimpleNamespace, planned: str | None, here: int | None, same: bool
) -> None:
    plugged_in.properties = properties(pci_domain_id=0, pci_bus_id=here, pci_device_id=0)
    other = job(uuid="GPU-87654321-9abc-def0-1234-56789abcdef0", pci_bus_id=planned)
    with contextlib.nullcontext() if same else pytest.raises(UnusableDeviceError, match="another device"):
        require_device(other)


def test_amd_has_one_form_of_a_uuid_in_the_list_and_here(plugged_in: SimpleNamespace) -> None:
    plugged_in.properties = mi300x()
    plugged_in.get_arch_list = lambda: ["gfx942"]
    require_device(job(uuid="GPU-e044801689257fb4"))
    with pytest.raises(UnusableDeviceError, match="another device"):
        require_device(job(uuid="GPU-e044801689257fb5"))


def test_a_device_that_torch_cannot_open(plugged_in: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")

    def refuse(_: object) -> None:
        raise AssertionError("Invalid device id")

    plugged_in.get_device_properties = refuse
    with pytest.raises(UnusableDeviceError) as caught:
        require_device(job())
    assert caught.value.what == (
        "torch cannot open cuda:1: AssertionError: Invalid device id (CUDA_VISIBLE_DEVICES=GPU-1)"
    )


def test_a_device_without_kernels(plugged_in: SimpleNamespace) -> None:
    plugged_in.properties, plugged_in.failure = properties(7, 0), NO_IMAGE
    with pytest.raises(UnusableDeviceError) as caught:
        require_device(job())
    assert caught.value.what == (
        "cuda:1 (NVIDIA chip) cannot be used: this torch has kernels for sm_80, sm_90, the device is sm_70: "
        "install a build with sm_70"
    )


def test_a_kernel_that_runs_is_believed_before_the_list(plugged_in: SimpleNamespace) -> None:
    plugged_in.properties = properties(7, 0)
    require_device(job())


def test_a_device_with_kernels_is_not_asked_to_run_one(plugged_in: SimpleNamespace) -> None:
    plugged_in.failure = NO_IMAGE
    require_device(job())


def test_what_was_found_before_the_worker_started() -> None:
    with pytest.raises(UnusableDeviceError, match="cuda:1 cannot be used: GPU is lost"):
        require_device(job(unusable="GPU is lost"))
    require_device(job("cpu"))
