"""Whether the device holds the base, or the host does and the base is brought to the device layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from consistency.capture.wording import size
from consistency.case.case import Case
from consistency.case.checkpoint import read_json
from consistency.case.model_size import model_size
from consistency.worker.memory.host_memory import free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What was chosen for one worker; `reason` is empty where there was nothing to choose."""

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
    needed, free = model_size(case), _room(device)
    if needed is None or free is None or needed.whole <= free:
        return Placed(offload=False, reason="")
    adapter = ", the adapter" if case.adapter is not None else ""
    reason = (
        f"the base{adapter} and the work on them take {size(needed.whole)} ({size(needed.base)} of it the base), "
        f"and the device has {size(free)} free"
    )
    if read_json(Path(case.base) / "config.json").get("quantization_config"):
        return Placed(offload=False, reason=f"{reason}, but a quantized base is not offloaded")
    return Placed(offload=True, reason=reason)


def _room(device: torch.device) -> int | None:
    """Return a device's free memory, with what its allocator keeps for reuse."""
    module = torch.get_device_module(device.type)
    if hasattr(module, "empty_cache"):
        module.empty_cache()
    return free_bytes(device)
