"""Print the devices that `torch.accelerator` finds, as JSON; run in a process of its own."""

from __future__ import annotations

import json
import sys
from typing import Any


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
        model = str(getattr(properties, "name", accelerator.type))
        uuid = getattr(properties, "uuid", None)
        architecture = getattr(properties, "gcnArchName", None) or getattr(properties, "architecture", None)
        rows.append(
            {
                "type": accelerator.type,
                "index": index,
                "architecture": f"{accelerator.type} {architecture or model}",
                "model": model,
                "uuid": None if uuid is None else str(uuid),
                "memory_bytes": getattr(properties, "total_memory", None),
                "simulated": bool(getattr(module, "simulated", False)),
            }
        )
    return rows


if __name__ == "__main__":
    json.dump(describe(), sys.stdout)
