"""The repeated blocks of a model."""

from __future__ import annotations

import torch


def blocks_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules of the outermost lists of modules, by name: decoder layers, stages, blocks."""
    found: dict[str, torch.nn.Module] = {}
    left = [("", model)]
    while left:
        prefix, module = left.pop(0)
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(child, torch.nn.ModuleList):
                found.update((f"{path}.{i}", block) for i, block in child.named_children() if not _holds_alone(block))
            else:
                left.append((path, child))
    return found


def _holds_alone(block: torch.nn.Module) -> bool:
    return isinstance(block, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.ParameterList)
