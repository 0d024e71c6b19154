"""What a worker's process is given: command line, threads, visible devices, kernel variables. All of it before exec."""

from __future__ import annotations

import os
from collections.abc import Mapping

from consistency.case.load_path import LoadPath
from consistency.devices.interpreter import python_path
from consistency.devices.spec import KERNEL_VARIABLES, DeviceInfo

# The variable by which each backend is told what to show; its entries are identities or numbers.
_VISIBILITY = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def torch_device(info: DeviceInfo, load_path: LoadPath) -> str:
    """Return the device as torch numbers it inside the worker."""
    if info.spec.is_cpu:
        return "cpu"
    if _isolates(info, load_path):
        return f"{info.spec.type}:0"
    return f"{info.spec.type}:{info.spec.index}"


def worker_environment(
    info: DeviceInfo, load_path: LoadPath, *, threads: int, change: Mapping[str, str | None] | None = None
) -> dict[str, str]:
    """Return the whole environment of a worker; `change` has the last word, None in it takes a variable away."""
    found = {name: value for name, value in os.environ.items() if name not in KERNEL_VARIABLES}
    found.update(python_path())
    found.update(
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
        HF_HUB_OFFLINE="1",  # models are folders by now, and nothing may try the network unasked
        PYTHONHASHSEED="0",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS=str(threads),
        MKL_NUM_THREADS=str(threads),
    )
    # cuBLAS reads this when a handle is made, before any code of the worker could set it
    found.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if info.spec.is_cpu:
        # PEFT asks for the accelerator by itself and would send the adapter through it
        found.update(dict.fromkeys(_VISIBILITY.values(), ""))
        found.pop("ZE_AFFINITY_MASK")  # an empty mask means all
    elif _isolates(info, load_path):
        found[_VISIBILITY[info.spec.type]] = _visible_id(info)
    variant = info.spec.numerical_variant()
    if variant is not None:
        found.update(variant.environment)
    for name, value in (change or {}).items():
        found.pop(name, None)
        if value is not None:
            found[name] = value
    return found


def _isolates(info: DeviceInfo, load_path: LoadPath) -> bool:
    return load_path is LoadPath.ISOLATED and info.spec.type in _VISIBILITY


def _visible_id(info: DeviceInfo, environment: Mapping[str, str] = os.environ) -> str:
    """Return what shows this device alone: its identity, or its place in what the user already lets us see."""
    if info.visible_id is not None:
        return info.visible_id
    index = info.spec.index or 0
    shown = [entry for entry in environment.get(_VISIBILITY[info.spec.type], "").split(",") if entry.strip()]
    return shown[index].strip() if index < len(shown) else str(index)
