"""Whether a device holds the base: by estimate before a worker starts, and in the worker by what is free then."""

from __future__ import annotations

from consistency.case.budget.estimate import PlannedWorker, estimate_worker
from consistency.case.budget.shape import Shape
from consistency.case.case import Case
from consistency.devices.spec import DeviceSpec

WORKING_MARGIN = 1.25
"""On what the stages need besides the model, whose bytes are known: an estimate may be 25 % too low."""

_ANY = PlannedWorker(label="", spec=DeviceSpec(type="accelerator"))


def needed_bytes(case: Case, shape: Shape) -> int:
    """Return the memory of a device that holds the base."""
    peak = estimate_worker(case, shape, _ANY).device_bytes or 0
    known = shape.loaded_bytes + (shape.adapter_bytes if case.adapter is not None else 0)
    return known + int(WORKING_MARGIN * max(0, peak - known))


def is_offloaded(case: Case, shape: Shape, free_bytes: int | None) -> bool:
    """Follow the case's `placement`; `auto` offloads what the device cannot hold, but no quantized base."""
    if case.placement != "auto":
        return case.placement == "offload"
    if free_bytes is None or shape.quantized or not shape.loaded_bytes:  # of a factory's model nothing is known
        return False
    return needed_bytes(case, shape) > free_bytes
