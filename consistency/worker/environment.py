"""Describe a worker's process: versions, kernels and threads in effect."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch

from consistency.capture.names import DIGEST_FAULT
from consistency.devices.backends import CPU, backend_of, kernel_variables, recorded_variables
from consistency.devices.settings import HOST_SETTINGS
from consistency.numerics.kernels import device_digest, triton_digest, trust
from consistency.numerics.precision import Precision
from consistency.worker.precision import products_of

_VERSIONED = ("transformers", "peft", "safetensors", "accelerate", "numpy")
"""Packages whose versions are described, besides torch."""

_QUANTIZERS = ("bitsandbytes", "torchao")
"""Packages that hold quantized weights; transformers imports them where a base needs them."""

PRODUCTS = "products"
"""Key in a description of the precisions of products."""


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
    described: dict[str, Any] = {
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
    described |= {name: _version(name) for name in _VERSIONED}
    if device.type != CPU:
        described.update(_accelerator(device))
    return described | digest_kernel(device) | products(device)


def quantizers() -> dict[str, Any]:
    """Return the versions of the packages for quantized weights that this process has imported."""
    return {name: _version(name) for name in _QUANTIZERS if name in sys.modules}


def describe_host() -> dict[str, Any]:
    """Return the description of a worker on the CPU of this host; no device is opened."""
    return describe(torch.device(CPU))


def products(device: torch.device) -> dict[str, Any]:
    """Return the precisions of products by the settings in force, where they are less precise than their dtype."""
    permitted = products_of(device)
    precisions = {"matmul": permitted.matmul, "convolution": permitted.convolution}
    reduced: dict[str, Any] = {name: str(value) for name, value in precisions.items() if value is not Precision.FLOAT32}
    if permitted.partial_terms:
        reduced["sums stored in"] = ", ".join(sorted(permitted.partial_terms))
    return {PRODUCTS: reduced} if reduced else {}


def digest_kernel(device: torch.device) -> dict[str, str]:
    """Return the path of the digests on a CUDA device, and elsewhere the reason why they are computed on the host.

    Both as far as this process knows them. All paths give the same digests, so they are no part of `kernel_key`.
    """
    state = device_digest.state(device)
    if state in ("", device_digest.PROVEN):
        return {"digest_kernel": triton_digest.state(device)} if device.type == "cuda" else {}
    described = {"digest_kernel": state}
    fault = device_digest.fault(device)
    if fault:
        described[DIGEST_FAULT] = fault
    return described


def _accelerator(device: torch.device) -> dict[str, Any]:
    """Return the properties of an accelerator, as far as its backend has them."""
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
    """Return a text of what determines results besides the device's model: versions, kernels and settings.

    Libraries choose kernels by the number of multiprocessors, so it is part of it. On the host's processor they choose
    by its instruction set, and split sums by threads; an accelerator computes the same whatever the host has to spare.

    Parameters
    ----------
    kind : str
        Type of the device.
    """
    backend = backend_of(kind)
    computes_on_host = backend.computes_on_host
    host_facts = ("cpu_capability", "threads") if computes_on_host else ("hip",)
    facts = [environment.get(name) for name in ("torch", "cuda", "cudnn", "transformers", "peft", *host_facts)]
    variables = environment.get("variables", {})
    choosing = kernel_variables() | backend.pinned_environment.keys()
    facts += [f"{name}={variables[name]}" for name in sorted(choosing & variables.keys())]
    facts += [environment.get("device_name"), environment.get("multiprocessors")]
    setting_names = sorted(settings if computes_on_host else settings.keys() - HOST_SETTINGS)
    facts_text = " ".join(str(fact) for fact in facts)
    settings_text = " ".join(f"{name}={settings[name]}" for name in setting_names)
    return f"{facts_text} {settings_text}"
