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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from consistency.devices.backend import Variant
from consistency.devices.backends import BACKENDS, CPU, backend_of, mask_variables, worker_variables
from consistency.devices.host import nvml
from consistency.devices.host.pci import read_text
from consistency.devices.interpreter import python_command, python_path
from consistency.devices.kernels import KERNELS, missing_kernels
from consistency.devices.spec import AutoChoice, DeviceInfo, DeviceSpec, parse_device
from consistency.devices.vendors import PLATFORMS, SHARES_MEMORY, nvidia_architecture
from consistency.errors import UsageError, did_you_mean

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
        infos = _auto() if name == "auto" else (_find(parse_device(name)),)
        for info in infos:
            # a CPU that is named too stays the one that `auto` stands for
            if info.auto or info.spec.name not in chosen:
                chosen[info.spec.name] = info
    return tuple(chosen.values())


def cpu_info(spec: DeviceSpec | None = None) -> DeviceInfo:
    """Describe this host's CPU, as the kernel variant that `spec` asks for; None is the native one.

    Raises
    ------
    UsageError
        The processor cannot run the variant.
    """
    spec = spec or DeviceSpec(type=CPU)
    flags, model = _cpuinfo()
    variants = {variant.name: variant for variant in cpu_variants(flags)}
    if spec.variant is not None and spec.variant not in variants:
        raise UsageError(
            f"this processor cannot run {spec.name}",
            got=f"{model}, with " + (", ".join(variants) or "no variant known here"),
            where="--devices",
        )
    machine = platform.machine().replace("AMD64", "x86_64").replace("x86_64", "x86-64")
    # Variants are in the order of their instruction sets: the native kernels are those of the last that runs here.
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
    devices = list(_nvidia() or _probed())
    for kind in _plugged_in():
        devices += _packaged(kind)
    return tuple(devices)


def _auto() -> tuple[DeviceInfo, ...]:
    """Return the devices that `auto` stands for; the CPU has the reason where there is no accelerator."""
    native = cpu_info()
    others = accelerators()
    if not others:
        # the variant with the native kernels would be the CPU a second time
        others = tuple(info for info in _variants() if info.architecture != native.architecture)
    return (replace(native, auto=auto_choice()), *others)


def auto_choice() -> AutoChoice:
    """Return the accelerators that `auto` finds: where torch is built for some and has none, the reason.

    A machine whose driver is gone looks like one without GPUs, and only its user knows which it is.
    """
    masks = {name: os.environ[name] for name in sorted(mask_variables()) if name in os.environ}
    build = next((name for name in PLATFORMS if name in _torch_build()), None)
    if build is None or accelerators() or _hides_all(build):
        return AutoChoice(masks=masks)
    mask_text = "".join(f"; {name}={value} is set" for name, value in masks.items())
    return AutoChoice(masks=masks, build=build, reason=_why_none(build) + mask_text)


def _hides_all(build: str) -> bool:
    """Return whether the user hides every device of a platform on purpose; a list that shows none may be a mistake."""
    variables = {"cuda": ("CUDA_VISIBLE_DEVICES",), "hip": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}
    # to HIP an empty list is none; Slurm sets NoDevFiles for a job without GPUs
    hiding = ("-1", "NoDevFiles") if build == "hip" else ("-1", "NoDevFiles", "")
    return any(os.environ[name].strip() in hiding for name in variables.get(build, ()) if name in os.environ)


def _why_none(build: str) -> str:
    """Return why torch has no device of the platform that it is built for."""
    refusal = nvml.refusal() if build == "cuda" else None
    return "torch lists none" if refusal is None else f"NVML: {refusal}"


def _variants() -> tuple[DeviceInfo, ...]:
    """Return every kernel variant of this host's CPU."""
    return tuple(cpu_info(DeviceSpec(type=CPU, variant=variant.name)) for variant in cpu_variants(cpu_flags()))


def _find(spec: DeviceSpec) -> DeviceInfo:
    """Return the device of this host that a spec names; raise a `UsageError` where there is none."""
    if spec.is_cpu:
        return cpu_info(spec)
    devices = accelerators()
    for info in devices:
        if (info.spec.type, info.spec.index) == (spec.type, spec.index):
            return replace(info, spec=spec)
    names = [CPU, *(info.spec.name for info in devices)]
    choice = auto_choice()
    build = "" if _torch_build() else "; the installed torch is a CPU build"
    if choice.build:
        build += f"; torch is built for {PLATFORMS[choice.build].name} and finds no device: {choice.reason}"
    hint = _not_asked(spec)
    if hint is None:
        hint = (_meant_device(spec, names) or "`consistency devices` lists the devices of this machine") + build
    raise UsageError(f"this machine has no device {spec.name}", got=", ".join(names), where="--devices", hint=hint)


def _not_asked(spec: DeviceSpec) -> str | None:
    """Return what the user has to do before torch can have a type of device; None where nothing is missing."""
    backend = backend_of(spec.type)
    if backend.package is None or backend.asked_by is None:
        return None
    if not _is_installed(backend.package):
        return f"install {backend.package} for {spec.type}"
    if not os.environ.get(backend.asked_by):
        return f"set {backend.asked_by}, which chooses what {spec.type} runs on"
    return None


_OTHER_NAMES = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "rocm": "cuda",
    "hip": "cuda",
    "amd": "cuda",
    "metal": "mps",
    "apple": "mps",
    "intel": "xpu",
    "ascend": "npu",
    "tpu": "xla",
}
"""The type in torch of each name that people use for a device; ROCm's devices are `cuda` there."""


def _meant_device(spec: DeviceSpec, names: Sequence[str]) -> str | None:
    """Return a hint at the device that was meant by a name of another kind; `names` are those of this machine."""
    kind = spec.type.rstrip("0123456789")
    name = DeviceSpec(type=_OTHER_NAMES.get(kind, kind), index=spec.index).name
    return f"did you mean {name}?" if name in names else did_you_mean(spec.name, names)


@functools.cache
def _cpuinfo() -> tuple[frozenset[str], str]:
    """Return the flags and the name of the first processor in `/proc/cpuinfo`."""
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
        driver = nvml.driver(library)
        count, _ = nvml.answer(library, "nvmlDeviceGetCount")
        devices = []
        for number in range(count or 0):
            card = _Card(library, kind, number, driver)
            devices += [_Listed(card.number, card.uuid, info) for info in card.devices()]
        return _numbered(_shown(devices))


class _Card:
    """A card, as NVML describes it: boards and virtual machines refuse one or another question.

    Parameters
    ----------
    library : module
        NVML, initialized.
    kind : str
        Type of the device in torch.
    number : int
        NVML's number of the card.
    driver : str or None
        Version of the driver.
    """

    def __init__(self, library: Any, kind: str, number: int, driver: str | None) -> None:
        self.number = number
        self._library = library
        self._spec = DeviceSpec(type=kind, index=number)
        self._driver = driver
        self._unknown: dict[str, str] = {}
        self._handle = self._ask("handle", "nvmlDeviceGetHandleByIndex", number)
        self.uuid: str | None = None if self._handle is None else self._ask("UUID", "nvmlDeviceGetUUID", self._handle)

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Return the devices that a process can use: the card, or its instances where MIG is on."""
        if self._handle is None:
            return (self._lost(),)
        card = self._card()
        mode, _ = nvml.answer(self._library, "nvmlDeviceGetMigMode", self._handle)
        if not mode or int(mode[0]) != 1:  # the mode in force; the second is that after a reset
            return (card,)
        instances = tuple(self._instances(card))
        if instances:
            return instances
        reason = "MIG mode is on, and this process sees no instance: nvidia-smi mig -cgi makes one"
        return (replace(card, unusable=reason, alone=_MIG),)

    def _ask(self, fact: str, function: str, *arguments: Any) -> Any:
        """Return NVML's answer; where it has none, None, and the reason is noted under the name of the fact."""
        answer, reason = nvml.answer(self._library, function, *arguments)
        if reason is not None:
            self._unknown[fact] = reason
        return answer

    def _lost(self) -> DeviceInfo:
        """Describe a card that fell off the bus: only the reason is known."""
        reason = self._unknown["handle"]
        return DeviceInfo(
            spec=self._spec,
            architecture=f"NVIDIA, {reason}",
            model=f"NVIDIA, {reason}",
            driver=self._driver,
            visible_id=_NO_DEVICE,
            unusable=reason,
            alone="which is lost",
            not_reported=self._unknown,
        )

    def _card(self) -> DeviceInfo:
        """Describe the card as a whole."""
        capability = self._ask("compute capability", "nvmlDeviceGetCudaComputeCapability", self._handle)
        pci = self._ask("PCI bus id", "nvmlDeviceGetPciInfo", self._handle)
        memory = self._ask("memory", "nvmlDeviceGetMemoryInfo", self._handle)
        version = None if capability is None else (int(capability[0]), int(capability[1]))
        mode, _ = nvml.answer(self._library, "nvmlDeviceGetComputeMode", self._handle)
        unusable, alone = _COMPUTE_MODES.get(mode if isinstance(mode, int) else 0, ("", ""))
        return DeviceInfo(
            spec=self._spec,
            architecture="NVIDIA" if version is None else nvidia_architecture(version),
            model=self._ask("name", "nvmlDeviceGetName", self._handle) or "NVIDIA",
            uuid=self.uuid,
            pci_bus_id=None if pci is None else pci.busId,
            driver=self._driver,
            capability=None if version is None else f"{version[0]}.{version[1]}",
            memory_bytes=None if memory is None else int(memory.total),
            # under WSL, whose driver is Windows', and on chips with a GPU, a list of UUIDs has not been seen to work:
            # the worker checks which device a number is
            visible_id=str(self.number) if _WSL.exists() or version in SHARES_MEMORY else self.uuid,
            unusable=unusable,
            alone=alone,
            shares_memory=version in SHARES_MEMORY,
            not_reported=self._unknown,
        )

    def _instances(self, card: DeviceInfo) -> Iterator[DeviceInfo]:
        """Yield the MIG instances of the card, with the card's facts where NVML reports none of an instance."""
        count, _ = nvml.answer(self._library, "nvmlDeviceGetMaxMigDeviceCount", self._handle)
        for number in range(count or 0):
            handle, _ = nvml.answer(self._library, "nvmlDeviceGetMigDeviceHandleByIndex", self._handle, number)
            if handle is None:  # as many as there could be, with gaps
                continue
            unknown = dict(self._unknown)
            answers = {}
            for fact, function in (("UUID", "nvmlDeviceGetUUID"), ("memory", "nvmlDeviceGetMemoryInfo")):
                answers[fact], reason = nvml.answer(self._library, function, handle)
                if reason is not None:
                    unknown[fact] = reason
            name, _ = nvml.answer(self._library, "nvmlDeviceGetName", handle)
            yield replace(
                card,
                model=name or f"{card.model} MIG",
                uuid=answers["UUID"],
                visible_id=answers["UUID"],
                memory_bytes=None if answers["memory"] is None else int(answers["memory"].total),
                alone=_MIG,
                not_reported=unknown,
            )


_NO_DEVICE = "-1"  # the list that shows no device

_MIG = "of which a process sees one: an instance of MIG"

_WSL = Path("/dev/dxg")  # there under the Windows Subsystem for Linux

_EXCLUSIVE = "whose compute mode lets one process use it at a time (nvidia-smi -c 0 ends that)"
# nvml.h: nvmlComputeMode_t. For each mode, the texts of `DeviceInfo.unusable` and `DeviceInfo.alone`.
_COMPUTE_MODES = {
    1: ("", _EXCLUSIVE),
    2: ("its compute mode is prohibited: nvidia-smi -c 0 lets processes use it", "whose compute mode is prohibited"),
    3: ("", _EXCLUSIVE),
}


@dataclass(frozen=True, slots=True)
class _Listed:
    """A device, a card or an instance of one, with NVML's number and the UUID of its card."""

    number: int
    card_uuid: str | None
    info: DeviceInfo

    @property
    def is_instance(self) -> bool:
        return self.info.uuid != self.card_uuid

    def is_shown_by(self, entry: str) -> bool:
        """Return whether an entry of the visibility variable is the number of the card, or begins its UUID."""
        is_number = entry.isdigit() and int(entry) == self.number
        return is_number or bool(entry and (self.card_uuid or "").startswith(entry))

    def is_instance_shown_by(self, entry: str) -> bool:
        """Return whether an entry of the visibility variable begins the UUID of this instance."""
        return bool(entry) and self.is_instance and (self.info.uuid or "").startswith(entry)


def _shown(devices: Sequence[_Listed]) -> list[DeviceInfo]:
    """Apply the user's own visibility variable: `cuda:0` is the first device that it lists.

    Numbers in it count cards in PCI order, as they do in every worker. A card is all of its instances of MIG.
    """
    mask = backend_of(devices[0].info.spec.type).visibility if devices else None
    entries = os.environ.get(mask) if mask else None
    if entries is None:
        return [device.info for device in devices]
    chosen: list[DeviceInfo] = []
    for entry in map(str.strip, entries.split(",")):
        instances = [device for device in devices if device.is_instance_shown_by(entry)]
        matches = instances + [device for device in devices if device.is_shown_by(entry)]
        # CUDA itself stops at the first entry that it cannot resolve
        if len(instances) > 1 or len({device.number for device in matches}) != 1:
            break
        chosen += [device.info for device in matches]
    return chosen


def _numbered(devices: Sequence[DeviceInfo]) -> tuple[DeviceInfo, ...]:
    """Number devices as torch does in a process that sees them all, where one can."""
    numbered = [replace(info, spec=DeviceSpec(type=info.spec.type, index=i)) for i, info in enumerate(devices)]
    # CUDA skips a card that is lost, and shows one instance of MIG: then the numbers beside it are not known.
    apart = [f"{info.spec.name}, {info.alone}" for info in numbered if info.unusable or info.alone == _MIG]
    reason = f"what it would be numbered beside {apart[0]}, is not known" if apart else ""
    entries = tuple(info.visible_id for info in devices if info.visible_id is not None)
    visible_ids = entries if len(entries) == len(devices) and not apart else ()
    return tuple(replace(info, visible_ids=visible_ids, alone=info.alone or reason) for info in numbered)


@functools.cache
def _probed() -> tuple[DeviceInfo, ...]:
    """Ask `torch.accelerator` in a separate process, where the installed torch can have an accelerator at all."""
    if not (_torch_build() or importlib.metadata.entry_points(group="torch.backends")):
        return ()
    return _ask_torch()


def _plugged_in() -> tuple[str, ...]:
    """Return the types that `torch.accelerator` does not list, where their package is installed and asked for."""
    kinds = []
    for backend in BACKENDS.values():
        is_asked_for = bool(os.environ.get(backend.asked_by or ""))
        if backend.package and is_asked_for and _is_installed(backend.package):
            kinds.append(backend.type)
    return tuple(kinds)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def _packaged(kind: str) -> tuple[DeviceInfo, ...]:
    """Return the devices of one plugged-in type."""
    return _ask_torch(kind)


def _cannot_list(kind: Sequence[str], reason: str) -> UsageError:
    """Return the error for a probe that fails; `kind` is empty, or has the one type that was asked for."""
    type_text = "".join(f" of type {name}" for name in kind)
    return UsageError(
        f"torch cannot list the devices of this machine{type_text}",
        got=reason,
        where="--devices",
        hint="name devices that work, such as cpu",
    )


def _ask_torch(*kind: str) -> tuple[DeviceInfo, ...]:
    """Have the probe describe the devices of `torch.accelerator`, or those of one type."""
    devices = []
    for row in _from_probe(*kind):
        spec = DeviceSpec(type=row.pop("type"), index=row.pop("index"))
        architecture = row.pop("architecture")
        # part of the name itself, because that is in every table, class and report
        if row.get("simulated"):
            architecture += " (simulated)"
        devices.append(DeviceInfo(spec=spec, architecture=architecture, **row))
    return tuple(devices)


def _from_probe(*arguments: str) -> Any:
    """Return what the probe prints.

    Raises
    ------
    UsageError
        It fails: what it would have found is not to be left out in silence.
    """
    kind = [argument for argument in arguments if argument != KERNELS]
    try:
        process = subprocess.run(
            [*python_command(), "consistency.devices.probe", *arguments],
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            env={**os.environ, **python_path(), **worker_variables()},
            check=True,
        )
        return json.loads(process.stdout)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").split("\n") if error.stderr else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        raise _cannot_list(kind, f"a process that lists them ended with {error.returncode}: {last}") from None
    except subprocess.TimeoutExpired:
        raise _cannot_list(kind, f"a process that lists them did not end in {PROBE_TIMEOUT_S} s") from None
    except ValueError:
        raise _cannot_list(kind, "a process that lists them wrote no JSON") from None


def why_unusable(info: DeviceInfo) -> str:
    """Return why no process can use a device; empty where nothing is known against it.

    A worker finds out for itself that torch has no kernels for its device; without one, torch is asked in a separate
    process, which takes seconds.
    """
    if info.unusable or info.capability is None or info.spec.type != "cuda":
        return info.unusable
    return missing_kernels(info.capability, _kernels()) or ""


@functools.cache
def _kernels() -> tuple[str, ...]:
    """Return the architectures that torch has kernels for, of CUDA or ROCm."""
    return tuple(_from_probe(KERNELS))


def is_rocm() -> bool:
    """Report whether the installed torch is built for ROCm, where devices of AMD have the type `cuda`."""
    return "hip" in _torch_build()


@functools.cache
def _torch_build() -> frozenset[str]:
    """Return which of `Backend.builds` the installed torch has, from its `version.py`, without importing it."""
    builds: set[str] = set()
    for backend in BACKENDS.values():
        builds.update(backend.builds)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return frozenset()
    source = read_text(Path(spec.origin).with_name("version.py")) or ""
    # `cuda: Optional[str] = '12.8'`; a platform that torch is not built for is None there
    stated = re.findall(r"^(\w+)\b[^=\n]*=\s*['\"][^'\"]+['\"]", source, flags=re.MULTILINE)
    return frozenset(builds & {*stated, sys.platform})
