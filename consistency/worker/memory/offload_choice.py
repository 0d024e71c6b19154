"""Choose whether the device holds the base, or the base stays on the host and streams through the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from consistency.capture.wording import size
from consistency.case.budget.placement import is_offloaded, needed_bytes
from consistency.case.budget.shape import read_shape
from consistency.case.case import Case
from consistency.worker.memory.host_memory import free_bytes

CONTEXT_BYTES = 1 << 29
"""Largest size of a CUDA context: each worker that sees all devices opens one on every one of them. Torch's developers
measured 0.27 GiB with kernels loaded when first used, and 0.62 GiB with all (pytorch/pytorch#86509)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The choice for one worker; `reason` is empty where there was nothing to choose."""

    offload: bool
    reason: str

    def __str__(self) -> str:
        chosen = "offload" if self.offload else "device"
        return f"{chosen}: {self.reason}" if self.reason else chosen


def choose(case: Case, device: torch.device) -> Placed:
    """Follow the case's `placement`; `auto` offloads a base that the device cannot hold with what the stages need."""
    if device.type == "cpu":  # the host holds it already
        return Placed(offload=False, reason="")
    if case.placement != "auto":
        return Placed(offload=case.placement == "offload", reason="as requested")
    shape, free_on_device = read_shape(case), _room(device)
    if free_on_device is None or not shape.loaded_bytes or needed_bytes(case, shape) <= free_on_device:
        return Placed(offload=False, reason="")
    reason = (
        f"the stages need {size(needed_bytes(case, shape))} with the base on the device, by estimate, "
        f"{size(shape.loaded_bytes)} of it for the base, and {size(free_on_device)} are free"
    )
    if is_offloaded(case, shape, free_on_device):
        return Placed(offload=True, reason=reason)
    return Placed(offload=False, reason=f"{reason}, but a quantized base is not offloaded")


def _room(device: torch.device) -> int | None:
    """Return a device's free memory, with what its allocator keeps for reuse, less the contexts of other workers."""
    module = torch.get_device_module(device.type)
    if hasattr(module, "empty_cache"):
        module.empty_cache()
    free = free_bytes(device)
    if free is None or getattr(module, "simulated", False):
        return free
    return max(0, free - CONTEXT_BYTES * (int(module.device_count()) - 1))
