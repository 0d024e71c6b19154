"""Devices of NVIDIA, AMD and Intel as torch reports them, the latter two after outputs that users have published.

MI300X: https://github.com/pytorch/ao/pull/2853, the output of `torch.cuda.get_device_properties(0)`. Arc A770: driver
and UUID as in https://github.com/oobabooga/textgen/issues/3761 (`clinfo`, which has the same UUID), its number in SYCL
from `sycl/ext/oneapi/experimental/device_architecture.def`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Uuid:
    """As torch has it: text, and 16 numbers in newer versions."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    @property
    def bytes(self) -> list[int]:
        return list(bytes.fromhex(self._text.replace("-", "")))


def mi300x(**changed: Any) -> SimpleNamespace:
    """Return the properties of an MI300X."""
    found: dict[str, Any] = {
        "name": "AMD Instinct MI300X", "major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-",
        "total_memory": 196592 << 20, "multi_processor_count": 304,
        "uuid": Uuid("65303434-3830-3136-3839-323537666234"), "pci_bus_id": 5, "pci_device_id": 0, "pci_domain_id": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**found, **changed})


def a770(**changed: Any) -> SimpleNamespace:
    """Return the properties of an Arc A770."""
    found: dict[str, Any] = {
        "name": "Intel(R) Arc(TM) A770 Graphics", "total_memory": 16225243136, "driver_version": "23.35.27191.42",
        "device_id": 0x56A0, "architecture": 0x000000030DC00800, "uuid": Uuid("8680a056-0800-0000-0300-000000000000"),
    }  # fmt: skip
    return SimpleNamespace(**{**found, **changed})


def h100(**changed: Any) -> SimpleNamespace:
    """Return the properties of an H100, by the fields that torch 2.13 has (`torch/csrc/cuda/Module.cpp`)."""
    found: dict[str, Any] = {
        "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "total_memory": 81079 << 20, "is_integrated": 0,
        "multi_processor_count": 132, "uuid": Uuid("5d3f3a10-8a0f-0a4b-9d6e-3c5f6e7a8b9c"),
        "pci_bus_id": 0x1B, "pci_device_id": 0, "pci_domain_id": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**found, **changed})
