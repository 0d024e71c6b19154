"""Find the devices of this host without creating a context on any of them.

The CPU is read from the operating system, NVIDIA GPUs from NVML. Other accelerators are listed by `torch.accelerator`
in a separate process, and only where the installed torch can have one: a backend may open its devices when it counts
them, and such a context must not live in the process that starts the workers.
"""

from __future__ import annotations

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
from typing import Any

from msgspec.structs import replace

from consistency.devices.backends import BACKENDS, CPU, Variant, backend_of, mask_variables, worker_variables
from consistency.devices.host import nvml
from consistency.devices.host.pci import read_text
from consistency.devices.interpreter import python_command, python_path
from consistency.devices.spec import AutoChoice, DeviceInfo, DeviceSpec, parse_device
from consistency.devices.vendors import PLATFORMS
from consistency.errors import UsageError, meant

PROBE_TIMEOUT_S = 120.0  # importing torch on a cold network disk takes most of a minute


def discover() -> tuple[DeviceInfo, ...]:
    """Return the CPU, its kernel variants, and every visible accelerator of this host."""
    return (cpu_info(), *_variants(), *accelerators())


def select(names: Sequence[str]) -> tuple[DeviceInfo, ...]:
    """Turn parsed device names into devices of this host; raise a `UsageError` for one that it does not have.

    `auto` is the CPU and every accelerator, and, where there is no accelerator, the CPU's kernel variants.
    """
    chosen: dict[str, DeviceInfo] = {}
    for name in names:
        found = _auto() if name == "auto" else (_find(parse_device(name)),)
        chosen.update((info.spec.name, info) for info in found)
    return tuple(chosen.values())


def cpu_info(spec: DeviceSpec | None = None) -> DeviceInfo:
    """Describe this host's CPU, as the kernel variant that `spec` asks for."""
    spec = spec or DeviceSpec(type=CPU)
    flags, model = _cpuinfo()
    variants = {v.name: v for v in cpu_variants(flags)}
    if spec.variant is not None and spec.variant not in variants:
        raise UsageError(
            f"this processor cannot run {spec.name}",
            got=f"{model}, with " + (", ".join(variants) or "no variant known here"),
            where="--devices",
        )
    machine = platform.machine().replace("AMD64", "x86_64").replace("x86_64", "x86-64")
    name = spec.variant or next(reversed(variants), None)
    level = None if name is None else variants[name].architecture
    return DeviceInfo(spec=spec, architecture=f"{machine} {level}" if level else machine, model=model)


def cpu_variants(flags: frozenset[str]) -> tuple[Variant, ...]:
    """Return the kernel variants that a CPU with these `/proc/cpuinfo` flags can run."""
    return tuple(variant for variant in backend_of(CPU).variants if variant.needs <= flags)


def cpu_flags() -> frozenset[str]:
    """Return the features of this host's CPU as `/proc/cpuinfo` names them."""
    return _cpuinfo()[0]


def accelerators() -> tuple[DeviceInfo, ...]:
    """Return every visible accelerator, in the order in which torch numbers them in a worker."""
    return (*(_nvidia() or _probed()), *(info for kind in _plugged_in() for info in _packaged(kind)))


def _auto() -> tuple[DeviceInfo, ...]:
    found, native = accelerators(), cpu_info()
    others = found or tuple(v for v in _variants() if v.architecture != native.architecture)
    return (replace(native, auto=auto_choice()), *others)


def auto_choice() -> AutoChoice:
    """Return what `auto` finds of accelerators: where torch is built for some and has none, the reason.

    A machine whose driver is gone looks like one without GPUs, and only its user knows which it is.
    """
    masks = {name: os.environ[name] for name in sorted(mask_variables()) if name in os.environ}
    build = next((name for name in PLATFORMS if name in _torch_build()), None)
    if build is None or accelerators() or _hides_all(build):
        return AutoChoice(masks=masks)
    shown = "".join(f"; {name}={value} is set" for name, value in masks.items())
    return AutoChoice(masks=masks, build=build, reason=_why_none(build) + shown)


def _hides_all(build: str) -> bool:
    """Return whether the user hides every device of a platform on purpose; a list that shows none may be a mistake."""
    names = {"cuda": ("CUDA_VISIBLE_DEVICES",), "hip": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}.get(build, ())
    # to HIP an empty list is none; Slurm sets NoDevFiles for a job without GPUs
    hiding = ("-1", "NoDevFiles") if build == "hip" else ("-1", "NoDevFiles", "")
    return any(os.environ[name].strip() in hiding for name in names if name in os.environ)


def _why_none(build: str) -> str:
    refused = nvml.refusal() if build == "cuda" else None
    return "torch lists none" if refused is None else f"NVML: {refused}"


def _variants() -> tuple[DeviceInfo, ...]:
    return tuple(cpu_info(DeviceSpec(type=CPU, variant=v.name)) for v in cpu_variants(cpu_flags()))


def _find(spec: DeviceSpec) -> DeviceInfo:
    if spec.is_cpu:
        return cpu_info(spec)
    found = accelerators()
    for info in found:
        if (info.spec.type, info.spec.index) == (spec.type, spec.index):
            return replace(info, spec=spec)
    names = [CPU, *(info.spec.name for info in found)]
    none = auto_choice()
    build = "" if _torch_build() else "; the installed torch is a CPU build"
    build += (
        f"; torch is built for {PLATFORMS[none.build].name} and finds no device: {none.reason}" if none.build else ""
    )
    listed = "`consistency devices` lists the devices of this machine"
    raise UsageError(
        f"this machine has no device {spec.name}",
        got=", ".join(names),
        where="--devices",
        hint=_not_asked(spec) or (_meant_device(spec, names) or listed) + build,
    )


def _not_asked(spec: DeviceSpec) -> str | None:
    """Return what a type of device still needs before torch can have it."""
    backend = backend_of(spec.type)
    if backend.package is None or backend.asked_by is None:
        return None
    if not _has(backend.package):
        return f"install {backend.package} for {spec.type}"
    if not os.environ.get(backend.asked_by):
        return f"set {backend.asked_by}, which chooses what {spec.type} runs on"
    return None


_OTHER_NAMES = {
    "gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "amd": "cuda", "metal": "mps", "apple": "mps",
    "intel": "xpu", "ascend": "npu", "tpu": "xla",
}  # fmt: skip
"""What a type of device is also called, by its name in torch; ROCm's are `cuda` there."""


def _meant_device(spec: DeviceSpec, found: Sequence[str]) -> str | None:
    """Return a hint at the device that was meant by a name of another kind."""
    bare = spec.type.rstrip("0123456789")
    name = DeviceSpec(type=_OTHER_NAMES.get(bare, bare), index=spec.index).name
    return f"did you mean {name}?" if name in found else meant(spec.name, found)


@functools.cache
def _cpuinfo() -> tuple[frozenset[str], str]:
    flags: frozenset[str] = frozenset()
    fields: dict[str, str] = {}
    text = read_text(Path("/proc/cpuinfo")) or ""
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
    kind = next(backend.type for backend in BACKENDS.values() if backend.by_nvml)
    if kind not in _torch_build():  # built for ROCm or without CUDA
        return ()
    with nvml.library() as library:
        if library is None:
            return ()
        driver, (count, _) = nvml.driver(library), nvml.answer(library, "nvmlDeviceGetCount")
        return _visible([_nvml_device(library, kind, i, driver) for i in range(count or 0)])


def _nvml_device(library: Any, kind: str, index: int, driver: str | None) -> DeviceInfo:
    """Describe a GPU by what NVML reports of it: boards and virtual machines refuse one or another question."""
    unknown: dict[str, str] = {}

    def ask(what: str, function: str, *arguments: Any) -> Any:
        found, reason = nvml.answer(library, function, *arguments)
        if reason is not None:
            unknown[what] = reason
        return found

    handle = ask("handle", "nvmlDeviceGetHandleByIndex", index)
    if handle is None:  # a device that fell off the bus keeps its place; its worker is lost, and says why
        name = f"NVIDIA, {unknown['handle']}"
        return DeviceInfo(
            spec=DeviceSpec(type=kind, index=index), architecture=name, model=name, driver=driver, visible_id="-1",
            not_reported=unknown,
        )  # fmt: skip
    capability = ask("compute capability", "nvmlDeviceGetCudaComputeCapability", handle)
    uuid = ask("UUID", "nvmlDeviceGetUUID", handle)
    place = ask("PCI bus id", "nvmlDeviceGetPciInfo", handle)
    memory = ask("memory", "nvmlDeviceGetMemoryInfo", handle)
    return DeviceInfo(
        spec=DeviceSpec(type=kind, index=index),
        architecture="NVIDIA" if capability is None else nvidia_architecture((int(capability[0]), int(capability[1]))),
        model=ask("name", "nvmlDeviceGetName", handle) or "NVIDIA",
        uuid=uuid,
        pci_bus_id=None if place is None else place.busId,
        driver=driver,
        capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        memory_bytes=None if memory is None else int(memory.total),
        visible_id=uuid,
        not_reported=unknown,
    )


# NVIDIA's architecture names by compute capability: CUDA C++ programming guide, "Compute Capabilities".
_NVIDIA = {
    (5, 0): "Maxwell", (5, 2): "Maxwell", (5, 3): "Maxwell",
    (6, 0): "Pascal", (6, 1): "Pascal", (6, 2): "Pascal",
    (7, 0): "Volta", (7, 2): "Volta", (7, 5): "Turing",
    (8, 0): "Ampere", (8, 6): "Ampere", (8, 7): "Ampere", (8, 9): "Ada Lovelace",
    (9, 0): "Hopper",
    (10, 0): "Blackwell", (10, 3): "Blackwell", (11, 0): "Blackwell", (12, 0): "Blackwell", (12, 1): "Blackwell",
}  # fmt: skip


def nvidia_architecture(capability: tuple[int, int]) -> str:
    """Name an NVIDIA architecture: `(8, 6)` gives `Ampere sm_86`."""
    major, minor = capability
    return f"{_NVIDIA.get((major, minor), 'NVIDIA')} sm_{major}{minor}"


def _visible(found: Sequence[DeviceInfo]) -> tuple[DeviceInfo, ...]:
    """Apply the user's own visibility variable: `cuda:0` is the first device that it lists.

    Numbers in it count in PCI order, as they do in every worker.
    """
    mask = backend_of(found[0].spec.type).visibility if found else None
    wanted = os.environ.get(mask) if mask else None
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
    return tuple(replace(info, spec=DeviceSpec(type=info.spec.type, index=i)) for i, info in enumerate(chosen))


@functools.cache
def _probed() -> tuple[DeviceInfo, ...]:
    """Ask `torch.accelerator` in a separate process, where the installed torch can have an accelerator at all."""
    if not (_torch_build() or importlib.metadata.entry_points(group="torch.backends")):
        return ()
    return _ask()


def _plugged_in() -> tuple[str, ...]:
    """Return the types that `torch.accelerator` does not list, where their package is installed and asked for."""
    return tuple(
        b.type for b in BACKENDS.values() if b.package and _has(b.package) and os.environ.get(b.asked_by or "")
    )


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def _packaged(kind: str) -> tuple[DeviceInfo, ...]:
    return _ask(kind)


def _not_listed(kind: Sequence[str], why: str) -> UsageError:
    return UsageError(
        f"torch cannot list the devices of this machine{''.join(f' of type {one}' for one in kind)}",
        got=why,
        where="--devices",
        hint="name devices that work, such as cpu",
    )


def _ask(*kind: str) -> tuple[DeviceInfo, ...]:
    """Have the probe describe the devices of `torch.accelerator`, or those of one type.

    Raises
    ------
    UsageError
        It fails: what it would have found is not to be left out in silence.
    """
    try:
        done = subprocess.run(
            [*python_command(), "consistency.devices.probe", *kind],
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            env={**os.environ, **python_path(), **worker_variables()},
            check=True,
        )
        rows = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").split("\n") if error.stderr else []
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        raise _not_listed(kind, f"a process that lists them ended with {error.returncode}: {last}") from None
    except subprocess.TimeoutExpired:
        raise _not_listed(kind, f"a process that lists them did not end in {PROBE_TIMEOUT_S} s") from None
    except ValueError:
        raise _not_listed(kind, "a process that lists them wrote no JSON") from None
    return tuple(
        DeviceInfo(
            spec=DeviceSpec(type=row.pop("type"), index=row.pop("index")),
            # part of the name itself, because that is in every table, class and report
            architecture=row.pop("architecture") + (" (simulated)" if row.get("simulated") else ""),
            **row,
        )
        for row in rows
    )


def is_rocm() -> bool:
    """Report whether the installed torch is built for ROCm, where devices of AMD have the type `cuda`."""
    return "hip" in _torch_build()


@functools.cache
def _torch_build() -> frozenset[str]:
    """Return which of `Backend.builds` the installed torch has, from its `version.py`, without importing it."""
    known = {name for backend in BACKENDS.values() for name in backend.builds}
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return frozenset()
    source = read_text(Path(spec.origin).with_name("version.py")) or ""
    built = re.findall(r"^(\w+)\b[^=\n]*=\s*['\"][^'\"]+['\"]", source, flags=re.MULTILINE)
    return frozenset(known & {*built, sys.platform})
