"""Print the devices that `torch.accelerator` finds, as JSON; run in a process of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

from consistency.devices.vendors import described


def describe() -> list[dict[str, Any]]:
    """Return one row per accelerator: type, index, architecture, model, and identity where the backend reports it."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return []
    module = torch.get_device_module(accelerator.type)
    rows = []
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        rows.append(
            {
                "type": accelerator.type,
                "index": index,
                **described(accelerator.type, properties),
                "simulated": bool(getattr(module, "simulated", False)),
            }
        )
    return rows


if __name__ == "__main__":
    json.dump(describe(), sys.stdout)
