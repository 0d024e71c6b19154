"""Find the devices of this machine without creating a context on any of them.

The CPU is read from the operating system, NVIDIA GPUs from NVML. Other accelerators are asked for by way of
`torch.accelerator` in a process of its own, and only where the installed torch can have one: a backend may open its
devices when it counts them, and such a context must not live in the process that starts the workers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from consistency.devices.spec import DeviceInfo, DeviceSpec, cpu_variants, nvidia_architecture, parse_device
from consistency.errors import UsageError

PROBE_TIMEOUT_S = 120.0  # importing torch on a cold network disk takes most of a minute


def discover() -> tuple[DeviceInfo, ...]:
    """Return the CPU, its kernel variants, and every visible accelerator of this machine."""
    return (cpu_info(), *_variants(), *accelerators())


def select(names: Sequence[str]) -> tuple[DeviceInfo, ...]:
    """Turn parsed device names, `auto` among them, into devices of this machine.

    `auto` is the CPU and every accelerator, and, where there is no accelerator, the CPU's kernel variants.

    Raises
    ------
    UsageError
        A device or variant that this machine does not have.
    """
    chosen: dict[str, DeviceInfo] = {}
    for name in names:
        found = _auto() if name == "auto" else (_find(parse_device(name)),)
        chosen.update((info.spec.name, info) for info in found)
    return tuple(chosen.values())


def cpu_info(spec: DeviceSpec | None = None) -> DeviceInfo:
    """Describe this machine's CPU, as the kernel variant that `spec` asks for."""
    spec = spec or DeviceSpec(type="cpu")
    flags, model = _cpuinfo()
    variants = {v.name: v for v in cpu_variants(flags)}
    if spec.variant is not None and spec.variant not in variants:
        raise UsageError(
            f"this processor cannot run {spec.name}",
            got=f"{model}, with " + (", ".join(variants) or "no variant known here"),
            where="--devices",
        )
    machine = platform.machine().replace("AMD64", "x86_64").replace("x86_64", "x86-64")
    if spec.variant is not None:
        level = variants[spec.variant].architecture
    else:
        level = variants[list(variants)[-1]].architecture if variants else None
    return DeviceInfo(spec=spec, architecture=f"{machine} {level}" if level else machine, model=model)


def accelerators() -> tuple[DeviceInfo, ...]:
    """Return every visible accelerator, in the order in which torch numbers them in a worker."""
    return _nvidia() or _probed()


def _auto() -> tuple[DeviceInfo, ...]:
    found = accelerators()
    if found:
        return (cpu_info(), *found)
    native = cpu_info()
    return (native, *(v for v in _variants() if v.architecture != native.architecture))


def _variants() -> tuple[DeviceInfo, ...]:
    flags, _ = _cpuinfo()
    return tuple(cpu_info(DeviceSpec(type="cpu", variant=v.name)) for v in cpu_variants(flags))


def _find(spec: DeviceSpec) -> DeviceInfo:
    if spec.is_cpu:
        return cpu_info(spec)
    found = accelerators()
    for info in found:
        if (info.spec.type, info.spec.index) == (spec.type, spec.index):
            return dataclasses.replace(info, spec=spec)
    raise UsageError(
        f"this machine has no device {spec.name}",
        got=", ".join(["cpu", *(i.spec.name for i in found)]),
        where="--devices",
        hint="`consistency devices` lists what is here" + _torch_hint(),
    )


@functools.cache
def _cpuinfo() -> tuple[frozenset[str], str]:
    flags: frozenset[str] = frozenset()
    fields: dict[str, str] = {}
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        key = key.strip().lower()
        if key in ("flags", "features") and not flags:
            flags = frozenset(value.split())
        elif key not in fields:
            fields[key] = value.strip()
    model = fields.get("model name") or platform.processor() or platform.machine()
    # A hypervisor may hide the product name ("AMD EPYC"): family, model and stepping still tell chips apart.
    if "cpu family" in fields:
        model += f" (family {fields['cpu family']} model {fields.get('model', '?')})"
    return flags, model


@functools.cache
def _nvidia() -> tuple[DeviceInfo, ...]:
    """Ask NVML, which reads the driver and creates no CUDA context."""
    if not _torch_build().get("cuda"):
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        found = [_nvml_device(pynvml, i, driver) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    return _visible(found)


def _nvml_device(nvml: ModuleType, index: int, driver: str) -> DeviceInfo:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return DeviceInfo(
        spec=DeviceSpec(type="cuda", index=index),
        architecture=nvidia_architecture((int(capability[0]), int(capability[1]))),
        model=nvml.nvmlDeviceGetName(handle),
        uuid=uuid,
        pci_bus_id=nvml.nvmlDeviceGetPciInfo(handle).busId,
        driver=driver,
        capability=f"{capability[0]}.{capability[1]}",
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        visible_id=uuid,
    )


def _visible(found: Sequence[DeviceInfo]) -> tuple[DeviceInfo, ...]:
    """Apply the user's own `CUDA_VISIBLE_DEVICES`: `cuda:0` is the first device it names.

    Numbers in it are read in PCI order, which is what `CUDA_DEVICE_ORDER=PCI_BUS_ID` in every worker makes them.
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(found)
    chosen: list[DeviceInfo] = []
    for entry in (e.strip() for e in wanted.split(",")):
        match = [
            info
            for i, info in enumerate(found)
            if (entry.isdigit() and int(entry) == i) or (entry and info.uuid and info.uuid.startswith(entry))
        ]
        if len(match) != 1:  # CUDA itself stops at the first entry that it cannot resolve
            break
        chosen.append(match[0])
    return tuple(dataclasses.replace(info, spec=DeviceSpec(type="cuda", index=i)) for i, info in enumerate(chosen))


@functools.cache
def _probed() -> tuple[DeviceInfo, ...]:
    """Ask `torch.accelerator` in a process of its own, where the installed torch can have an accelerator at all."""
    build = _torch_build()
    plugged_in = bool(importlib.metadata.entry_points(group="torch.backends"))
    if not (any(build.values()) or plugged_in or sys.platform == "darwin"):
        return ()
    from consistency.devices.interpreter import python_command, python_path

    try:
        done = subprocess.run(
            [*python_command(), "consistency.devices.probe"],
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            env={**os.environ, **python_path(), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            check=True,
        )
        rows = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError):
        return ()
    return tuple(
        DeviceInfo(
            spec=DeviceSpec(type=row["type"], index=row["index"]),
            # in its very name, for that stands in every table, class and report
            architecture=row["architecture"] + (" (simulated)" if row.get("simulated") else ""),
            model=row["model"],
            uuid=row.get("uuid"),
            pci_bus_id=row.get("pci_bus_id"),
            capability=row.get("capability"),
            memory_bytes=row.get("memory_bytes"),
            simulated=bool(row.get("simulated")),
        )
        for row in rows
    )


@functools.cache
def _torch_build() -> dict[str, str | None]:
    """Read which accelerators the installed torch was built for, from its `version.py`, without importing it."""
    spec = importlib.util.find_spec("torch")
    found: dict[str, str | None] = {"cuda": None, "hip": None, "xpu": None}
    if spec is None or spec.origin is None:
        return found
    try:
        source = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return found
    for name, value in re.findall(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", source, flags=re.MULTILINE):
        found[name] = value
    return found


def _torch_hint() -> str:
    build = _torch_build()
    return "" if any(build.values()) else "; the installed torch is a CPU build"
