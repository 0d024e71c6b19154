"""Check that a worker's device is the one that was planned, and that torch has kernels for it.

CUDA may skip a GPU that NVML counts, so that a number, and a list of visible devices, mean another card: its results
would be reported under the name of its neighbour.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from consistency.devices.host.pci import address
from consistency.devices.kernels import missing_kernels
from consistency.devices.vendors import described
from consistency.devices.visibility import visibility_of
from consistency.errors import UnusableDeviceError, first_line
from consistency.worker.device_error import computes, is_out_of_memory
from consistency.worker.protocol import Job


def require_device(job: Job) -> None:
    """Raise an error where this process cannot check the device of its job.

    Raises
    ------
    UnusableDeviceError
        It was found unusable before, torch cannot open it, it is another one, or torch has no kernels for it.
    """
    device = torch.device(job.device)
    if job.unusable:
        raise UnusableDeviceError(f"{job.name} cannot be used: {job.unusable}")
    if device.type == "cpu":
        return
    module = torch.get_device_module(device.type)
    if not hasattr(module, "get_device_properties"):
        return
    try:
        properties = module.get_device_properties(device.index or 0)
    except (RuntimeError, AssertionError) as error:  # torch asserts that there is such an index
        if is_out_of_memory(error):
            raise
        raise UnusableDeviceError(f"torch cannot open {job.name}: {first_line(error)}{_mask(device.type)}") from error
    facts = described(device.type, properties)
    if _is_another(job, facts):
        raise UnusableDeviceError(
            f"{job.name} is another device than was listed: {facts['uuid']}, not {job.uuid}{_mask(device.type)}",
            hint="a device before it may have fallen off the bus: see the kernel's log, and run again",
        )
    missing = missing_kernels(facts.get("capability"), _architectures(module))
    if missing is not None and not computes(device):  # the list of architectures is no proof that none runs
        raise UnusableDeviceError(f"{job.name} ({properties.name}) cannot be used: {missing}")


def _is_another(job: Job, facts: Mapping[str, Any]) -> bool:
    """Report whether both the UUID and, as far as it is known, the place on the PCI bus are those of another device.

    A virtual or an integrated GPU may have one UUID by NVML and another by CUDA: its place says that it is the same.

    Parameters
    ----------
    facts : mapping of str to any
        The device as torch describes it.
    """
    uuid, pci_bus_id = facts.get("uuid"), facts.get("pci_bus_id")
    if not uuid or not job.uuid or job.uuid.startswith("MIG-") or _bare(uuid) == _bare(job.uuid):
        return False
    return pci_bus_id is None or job.pci_bus_id is None or address(pci_bus_id) != address(job.pci_bus_id)


def _architectures(module: Any) -> list[str]:
    """Return the architectures that torch was built for; empty where the backend has no such list."""
    return list(module.get_arch_list()) if hasattr(module, "get_arch_list") else []


def _mask(kind: str) -> str:
    """Return the variable that limits the devices that this process sees, for an error; empty where none is set."""
    mask = visibility_of(kind)
    if mask is None:
        return ""
    visible = os.environ.get(mask.variable)
    return "" if visible is None else f" ({mask.variable}={visible})"


def _bare(uuid: str) -> str:
    """Return a UUID as torch has it: NVML and ROCm's tools write `GPU-` before it."""
    return uuid.removeprefix("GPU-").lower()
