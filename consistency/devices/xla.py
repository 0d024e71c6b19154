"""XLA's devices by the functions that torch's own backends have in common: torch has no module `torch.xla`.

XLA is lazy: an operation is noted, and a graph of them is compiled and run when somebody needs a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """The properties of a device that XLA reports; `name` is the kind of its hardware, such as `CPU` or `TPU`."""

    name: str


def is_available() -> bool:
    """Report whether XLA has any device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Report that the devices are in use, always: this module is imported only to use them."""
    return True


def device_count() -> int:
    """Return how many devices this process can use."""
    return int(xr.addressable_device_count())


def get_device_properties(device: torch.device | int) -> Properties:
    """Return the properties of a device; they are the same for all devices of one machine."""
    index = device if isinstance(device, int) else device.index or 0
    return Properties(name=xm.xla_device_hw(f"xla:{index}"))


def settle(device: torch.device) -> None:
    """Compile and run the operations that were noted for a device, for all tensors that are alive.

    Otherwise each value that is read has a graph of its own, with all that it depends on: each activation would be
    compiled and computed from the model's inputs on.
    """
    torch_xla._XLAC._xla_step_marker(str(device), [], wait=False)


def synchronize(device: torch.device | int | None = None) -> None:
    """Compile and run the operations that were noted for a device, or for all of them, and wait until it is idle."""
    index = device.index if isinstance(device, torch.device) else device
    indices = range(device_count()) if index is None else (index,)
    names = [f"xla:{i}" for i in indices]
    for name in names:
        # what `torch_xla.sync` does, which takes no device
        torch_xla._XLAC._xla_step_marker(name, [], wait=True)
    xm.wait_device_ops(xm.xla_real_devices(names))
