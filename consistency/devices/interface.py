"""Register out-of-tree backends, such as torch_xla, with torch."""

from __future__ import annotations

import importlib

from consistency.devices.backends import backend_of


def register(kind: str) -> None:
    """Register the module that the backend table names for a type of device with torch; most types need none."""
    name = backend_of(kind).interface
    if name is None:
        return
    import torch

    if not hasattr(torch, kind):
        torch._register_device_module(kind, importlib.import_module(name))
