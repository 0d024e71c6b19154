"""Decide whether a device holds the base: by estimate before a worker starts, by its free memory in the worker."""

from __future__ import annotations

from consistency.case.budget.estimate import PlannedWorker, estimate_worker
from consistency.case.budget.shape import Shape
from consistency.case.case import Case
from consistency.devices.spec import DeviceSpec

WORKING_MARGIN = 1.25
"""Factor on what the stages need besides the model, whose bytes are known: an estimate may be 25 % too low."""

# Any accelerator: what a device must hold does not depend on which one it is.
_ANY = PlannedWorker(label="", spec=DeviceSpec(type="accelerator"))


def needed_bytes(case: Case, shape: Shape) -> int:
    """Return the memory that a device needs to hold the base and run the stages."""
    peak = estimate_worker(case, shape, _ANY).device_bytes or 0
    model_bytes = shape.loaded_bytes
    if case.adapter is not None:
        model_bytes += shape.adapter_bytes
    return model_bytes + int(WORKING_MARGIN * max(0, peak - model_bytes))


def is_offloaded(case: Case, shape: Shape, free_bytes: int | None) -> bool:
    """Report whether the base stays on the host, by the case's `placement`.

    `auto` offloads what the device cannot hold, but no quantized base, whose kernels need it on the device.
    """
    if case.placement != "auto":
        return case.placement == "offload"
    if free_bytes is None or shape.quantized or not shape.loaded_bytes:  # the size of a factory's model is not known
        return False
    return needed_bytes(case, shape) > free_bytes
