"""What torch reports of AMD's and Intel's devices, in the vendors' terms."""

from __future__ import annotations

from typing import Any

import pytest

from consistency.devices.vendors import (
    Vendor,
    amd_architecture,
    described,
    intel_architecture,
    intel_version,
    vendor_of,
)
from tests.devices.torch_properties import Uuid, a770, h100, mi300x


@pytest.mark.parametrize(
    ("kind", "properties", "expected"),
    [
        pytest.param(
            "cuda",
            mi300x(),
            {
                "architecture": "CDNA 3 gfx942", "model": "AMD Instinct MI300X", "capability": "gfx942:sramecc+:xnack-",
                "uuid": "GPU-e044801689257fb4", "pci_bus_id": "0000:05:00.0", "memory_bytes": 196592 << 20,
            },
            id="AMD, as ROCm knows it",
        ),
        pytest.param(
            "cuda",
            h100(),
            {
                "architecture": "Hopper sm_90", "model": "NVIDIA H100 80GB HBM3", "capability": "9.0",
                "uuid": "GPU-5d3f3a10-8a0f-0a4b-9d6e-3c5f6e7a8b9c", "pci_bus_id": "0000:1b:00.0",
                "memory_bytes": 81079 << 20,
            },
            id="NVIDIA, as NVML does, which does not answer in a container or on a Jetson",
        ),
        pytest.param(
            "xpu",
            a770(),
            {
                "architecture": "Xe-HPG 12.55.8", "model": "Intel(R) Arc(TM) A770 Graphics", "capability": "12.55.8",
                "uuid": "8680a056-0800-0000-0300-000000000000", "pci_bus_id": "0000:03:00.0",
                "memory_bytes": 16225243136, "driver": "23.35.27191.42",
            },
            id="Intel, whose PCI bus id is in its UUID",
        ),
    ],
)  # fmt: skip
def test_a_gpu_is_described_in_its_vendors_terms(kind: str, properties: Any, expected: dict[str, object]) -> None:
    assert described(kind, properties) == {**expected, "not_reported": {}, "asked": "torch"}


def test_an_instance_of_mig_has_no_uuid_that_is_certain() -> None:
    found = described("cuda", h100(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb"))
    assert (found["uuid"], found["architecture"]) == (None, "Hopper sm_90")
    assert found["not_reported"] == {"UUID": "not among the properties of the device"}


def test_a_gpu_without_memory_of_its_own_says_so() -> None:
    assert described("cuda", h100(is_integrated=1))["shares_memory"] is True
    assert "shares_memory" not in described("cuda", h100())


def test_a_property_that_torch_lacks_is_left_out_and_said() -> None:
    older = mi300x(name="")
    del older.pci_bus_id, older.uuid
    found = described("cuda", older)
    assert (found["uuid"], found["pci_bus_id"], found["model"]) == (None, None, "CDNA 3 gfx942")
    assert set(found["not_reported"]) == {"UUID", "PCI bus id"}
    older = a770(architecture=0x9900000000000000)  # what SYCL does not know
    del older.uuid, older.total_memory
    found = described("xpu", older)
    assert found["architecture"] == "xpu Intel(R) Arc(TM) A770 Graphics"
    assert set(found["not_reported"]) == {"UUID", "PCI bus id", "memory", "architecture"}


def test_a_uuid_of_another_form_stays_as_it_is() -> None:
    random = "b8e8c9a4-3f0e-4a3c-9c1d-000000000001"
    assert described("cuda", mi300x(uuid=Uuid(random)))["uuid"] == random
    found = described("xpu", a770(uuid=Uuid(random)))
    assert (found["uuid"], found["pci_bus_id"]) == (random, None)


@pytest.mark.parametrize(
    ("gcn", "name"),
    [
        ("gfx90a:sramecc+:xnack-", "CDNA 2 gfx90a"),
        ("gfx950:sramecc+:xnack-", "CDNA 4 gfx950"),
        ("gfx1100", "RDNA 3 gfx1100"),
        ("gfx1201", "RDNA 4 gfx1201"),
        ("gfx9999", "AMD gfx9999"),
    ],
)
def test_amd_architectures_have_names(gcn: str, name: str) -> None:
    assert amd_architecture(gcn) == name


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0x000000030F000700, "Xe-HPC 12.60.7"),  # intel_gpu_pvc
        (0x000000030E000500, "Xe-HPG 12.56.5"),  # intel_gpu_acm_g11
        (0x0000000500400400, "Xe2-HPG 20.1.4"),  # intel_gpu_bmg_g21
        (0x0000000F00000000, "Intel 60.0.0"),
    ],
)
def test_intel_architectures_have_names(number: int, name: str) -> None:
    version = intel_version(number)
    assert version is not None
    assert intel_architecture(version) == name


@pytest.mark.parametrize(
    ("kind", "capability", "vendor"),
    [
        ("cuda", "9.0", Vendor.NVIDIA),
        ("cuda", "gfx942", Vendor.AMD),
        ("xpu", None, Vendor.INTEL),
        ("npu", None, Vendor.OTHER),
        ("gaudi_3", "3", Vendor.OTHER),
    ],
)
def test_only_known_vendors_are_named(kind: str, capability: str | None, vendor: Vendor) -> None:
    assert vendor_of(kind, capability) is vendor
