"""Print the devices that torch finds, as JSON; run in a process of its own.

Without an argument it prints the devices of `torch.accelerator`; with the name of a type, the devices of a plugged-in
backend that `torch.accelerator` does not list; with `kernels`, the architectures that torch was built for.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from consistency.devices.interface import register
from consistency.devices.kernels import KERNELS
from consistency.devices.vendors import described


def describe(kind: str | None = None) -> list[dict[str, Any]]:
    """Return one row per accelerator: type, index, architecture, model, and identity where the backend reports it.

    None stands for the type of `torch.accelerator`.
    """
    import torch

    if kind is None:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or not torch.accelerator.is_available():
            return []
        kind, count = accelerator.type, torch.accelerator.device_count()
    else:
        register(kind)
        count = torch.get_device_module(kind).device_count()
    module = torch.get_device_module(kind)
    rows = []
    for index in range(count):
        properties = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        rows.append(
            {
                "type": kind,
                "index": index,
                **described(kind, properties),
                "simulated": bool(getattr(module, "simulated", False)),
            }
        )
    return rows


def kernels() -> list[str]:
    """Return the architectures that torch has kernels for, of CUDA or ROCm."""
    import torch

    return list(torch.cuda.get_arch_list())


if __name__ == "__main__":
    result = kernels() if sys.argv[1:] == [KERNELS] else describe(*sys.argv[1:])
    json.dump(result, sys.stdout)
