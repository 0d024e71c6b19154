"""Describe a worker's process: versions, kernels and threads in effect."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
from typing import Any

import torch

from consistency.capture.names import DIGEST_FAULT
from consistency.devices.backends import CPU, backend_of, kernel_variables, recorded_variables
from consistency.devices.settings import HOST_SETTINGS
from consistency.numerics.kernels import device_digest, triton_digest, trust
from consistency.numerics.precision import Precision
from consistency.worker.precision import products_of

_VERSIONED = ("transformers", "peft", "safetensors", "accelerate", "numpy")

PRODUCTS = "products"
"""Key of the precisions of products."""


@functools.cache
def release(package: str) -> tuple[int, int]:
    """Return the first two numbers of an installed package's version."""
    major, minor = importlib.metadata.version(package).split(".")[:2]
    return int(major), int(minor)


@functools.cache
def _version(package: str) -> str | None:
    """Return an installed package's version, for which its metadata is parsed; None of one that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(device: torch.device) -> dict[str, Any]:
    """Return versions, kernel choices, threads and the variables that control them."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "compiled_kernel": trust.state(),
        "variables": {name: os.environ[name] for name in sorted(recorded_variables()) if name in os.environ},
    }
    found |= {name: _version(name) for name in _VERSIONED}
    if device.type != CPU:
        found.update(_accelerator(device))
    return found | digest_kernel(device) | products(device)


def describe_host() -> dict[str, Any]:
    """Return what a worker on the CPU of this host says of its process; no device is opened."""
    return describe(torch.device(CPU))


def products(device: torch.device) -> dict[str, Any]:
    """Return how products may be computed by the settings in force, where they are less precise than their dtype."""
    found = products_of(device)
    reduced = {"matmul": found.matmul, "convolution": found.convolution}
    table: dict[str, Any] = {name: str(value) for name, value in reduced.items() if value is not Precision.FLOAT32}
    if found.partial_terms:
        table["sums stored in"] = ", ".join(sorted(found.partial_terms))
    return {PRODUCTS: table} if table else {}


def digest_kernel(device: torch.device) -> dict[str, str]:
    """Return the path of the digests on a CUDA device, and elsewhere the reason why they are computed on the host.

    As far as this process knows it. All paths give the same digests, so it is not part of `kernel_key`.
    """
    on_device = device_digest.state(device)
    if on_device not in ("", device_digest.PROVEN):
        fault = device_digest.fault(device)
        return {"digest_kernel": on_device} | ({DIGEST_FAULT: fault} if fault else {})
    return {"digest_kernel": triton_digest.state(device)} if device.type == "cuda" else {}


def _accelerator(device: torch.device) -> dict[str, Any]:
    module = torch.get_device_module(device.type)
    if not hasattr(module, "get_device_properties"):
        return {}
    properties = module.get_device_properties(device.index or 0)
    return {
        "device_name": getattr(properties, "name", None),
        "multiprocessors": getattr(properties, "multi_processor_count", None),
        "device_uuid": str(properties.uuid) if hasattr(properties, "uuid") else None,
        "simulated": bool(getattr(module, "simulated", False)),
    }


def kernel_key(kind: str, environment: dict[str, Any], settings: dict[str, Any]) -> str:
    """Return what determines results besides the device's model: versions, kernels and settings.

    Libraries choose kernels by the number of multiprocessors, so it is part of it. On the host's processor they choose
    by its instruction set, and split sums by threads; an accelerator computes the same whatever the host has to spare.

    Parameters
    ----------
    kind : str
        Type of the device.
    """
    backend = backend_of(kind)
    on_host = backend.computes_on_host
    of_host = ("cpu_capability", "threads") if on_host else ("hip",)
    parts = [environment.get(k) for k in ("torch", "cuda", "cudnn", "transformers", "peft", *of_host)]
    variables = environment.get("variables", {})
    choosing = kernel_variables() | backend.pinned_environment.keys()
    parts += [f"{name}={variables[name]}" for name in sorted(choosing & variables.keys())]
    parts += [environment.get("device_name"), environment.get("multiprocessors")]
    in_key = sorted(settings if on_host else settings.keys() - HOST_SETTINGS)
    return " ".join(str(p) for p in parts) + " " + " ".join(f"{k}={settings[k]}" for k in in_key)
